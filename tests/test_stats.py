"""Distributions of what layers receive and return: against copies made in a twin without in-place ops, and by hand."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from itertools import permutations

import numpy as np
import pytest
import torch
from nets import AWKWARD, Raises, ReluThrice, Tied, out_of_place, picture, seeded
from torch import nn
from torchvision import models

import hookscope
from hookscope.activations import bounds_of, kind_of, stats_passes, stats_probe, stats_report
from hookscope.errors import ModelError, NothingMeasured, UsageError
from hookscope.layers import Site, select
from hookscope.nested import tensors_in
from hookscope.probes.stats import StatsProbe, Wanted
from hookscope.runner import list_layers, running
from hookscope.statsreport import INPUT, OUTPUT
from hookscope.userdata import checked


def captured(model, x, around=out_of_place):
    """Copies of all that layers received and returned, {(site, side): tensor}; with no op in place by default."""
    found, calls, handles = {}, {}, []

    def before(name):
        def hook(module, args, kwargs):
            call = calls[name] = calls.get(name, -1) + 1
            for path, tensor in tensors_in((*args, kwargs) if kwargs else args):
                found[Site(name, call, path), INPUT] = tensor.detach().clone()

        return hook

    def after(name):
        def hook(module, args, output):
            for path, tensor in tensors_in(output):
                found[Site(name, calls[name], path), OUTPUT] = tensor.detach().clone()

        return hook

    for name, module in list(model.named_modules())[1:]:
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        with around(model), torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def rows_of(report):
    return {(row.site, row.side): row for row in report.rows}


def row(report, place):
    (found,) = (row for row in report.rows if row.place == place)
    return found


def check_against(row, tensor):
    """A row against a float64 copy of all that passed there."""
    values, found = tensor.double().numpy(), row.distribution
    assert found.count == values.size
    assert found.zeros == (values == 0).sum()
    # The twin's own figures are float32, and its convolutions need not add up in the same order.
    assert found.mean == pytest.approx(values.mean(), rel=1e-5, abs=1e-5 * values.std())
    assert found.std == pytest.approx(values.std(), rel=1e-5, abs=1e-7)
    assert found.minimum == pytest.approx(values.min(), rel=1e-5, abs=1e-6)
    assert found.maximum == pytest.approx(values.max(), rel=1e-5, abs=1e-6)
    if found.channels is not None:
        by_channel = np.moveaxis(values, found.channels.axis, -1).reshape(-1, found.channels.channels)
        assert found.channels.mean == pytest.approx(by_channel.mean(axis=0), abs=2e-6)
        assert found.channels.std == pytest.approx(by_channel.std(axis=0), rel=1e-5, abs=1e-6)
        assert found.channels.energy == pytest.approx(np.square(by_channel).mean(axis=0), rel=1e-5, abs=1e-6)
        assert found.channels.alive.tolist() == (by_channel > 0).sum(axis=0).tolist()
        assert found.channels.maximum == pytest.approx(by_channel.max(axis=0), rel=1e-5, abs=1e-6)


class Copies(hookscope.Probe):
    """Keeps all that passes."""

    needs = hookscope.Needs(inputs=True, outputs=True)

    def __init__(self):
        self.found = {}

    def on_input(self, site, tensor):
        self.found[site, INPUT] = tensor.clone()

    def on_output(self, site, tensor):
        self.found[site, OUTPUT] = tensor.clone()


SMALL = {
    "resnet": lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], 5, width_per_group=4),
    "mobilenet": lambda: models.MobileNetV2(5, width_mult=0.2),
    "densenet": lambda: models.DenseNet(4, (2, 2), 8, num_classes=5),
    "convnext": lambda: models.ConvNeXt(
        [models.convnext.CNBlockConfig(8, 16, 2), models.convnext.CNBlockConfig(16, None, 1)], num_classes=5
    ),
    "swin": lambda: models.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [2, 2], num_classes=5),
    "vit": lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5),
}


class TestAgainstATwin:
    @pytest.mark.parametrize("name", AWKWARD)
    def test_every_place_of_an_awkward_net(self, name):
        x = picture(pictures=3)
        # Where only the side effect of an op in place counts, a twin without it is another net.
        around = nullcontext if name == "in-place-ignored" else out_of_place
        expected = captured(seeded(AWKWARD[name]), x, around)
        found = rows_of(hookscope.stats(seeded(AWKWARD[name]), x))
        assert {place for place, row in found.items() if row.distribution is not None} == set(expected)
        for place, tensor in expected.items():
            check_against(found[place], tensor)

    @pytest.mark.parametrize("name", SMALL)
    def test_every_place_of_a_real_architecture(self, name):
        # Copied in the same pass: two passes need not agree on the last bit, nor then on what is above 0.
        model, copies = seeded(SMALL[name]), Copies()
        selection, x = select(model, "**"), picture(pictures=2, size=32)
        probe = stats_probe(model, list_layers(model, x[:1]), selection, tuple(x.shape), Wanted())
        with running(model, [probe, copies], selection) as runner:
            runner.forward(x)
            probe.finish_batch()
        found = rows_of(report_of(probe, model))
        assert {place for place, row in found.items() if row.distribution is not None} == set(copies.found)
        for place, tensor in copies.found.items():
            check_against(found[place], tensor)
            if found[place].same_as is not None:
                assert torch.equal(tensor, copies.found[found[place].same_as])
        same = [row.same_as is not None for row in found.values()]
        assert np.mean(same) > 0.3


class Fires(nn.Module):
    """Four units of which the second fires at one pixel only, the third and fourth never; one of them by a hair."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(x)


@pytest.fixture
def units():
    x = torch.full((2, 4, 3, 3), -1.0)
    x[0, 0] = 2.0
    x[1, 1, 2, 2] = 1e-30
    x[:, 3] = 0.0
    return x


class TestByHand:
    def test_one_pixel_keeps_a_unit_alive(self, units):
        found = row(hookscope.stats(Fires().eval(), units), "relu").distribution
        # A mean over positions would call the second one dead, the share of zeros the first one half dead.
        assert found.channels.alive.tolist() == [9, 1, 0, 0]
        assert found.channels.mean.tolist() == pytest.approx([1, 1e-30 / 18, 0, 0])
        assert found.channels.std.tolist() == pytest.approx([1, 1e-30 * math.sqrt(17) / 18, 0, 0])
        assert found.channels.energy.tolist() == pytest.approx([2, 0, 0, 0])
        assert (found.count, found.zeros, found.non_finite) == (72, 62, 0)
        assert (found.mean, found.minimum, found.maximum) == (0.25, 0, 2)
        assert found.std == pytest.approx(math.sqrt(0.5 - 0.0625))

    def test_a_threshold_is_to_be_exceeded(self, units):
        report = hookscope.stats(Fires().eval(), units, threshold=2.0)
        assert report.threshold == 2.0
        assert row(report, "relu").distribution.channels.alive.tolist() == [0, 0, 0, 0]

    def test_what_a_layer_received_is_from_before_it_wrote(self, units):
        class InPlace(Fires):
            def __init__(self):
                super().__init__()
                self.relu = nn.ReLU(inplace=True)

        report = hookscope.stats(InPlace().eval(), units)
        assert row(report, "relu:0<").distribution.minimum == -1
        assert row(report, "relu").distribution.minimum == 0

    def test_the_histogram_is_of_all_where_all_fit(self, units):
        found = row(hookscope.stats(Fires().eval(), units), "relu").distribution.histogram
        assert found.complete
        assert found.sampled == 72
        assert found.quantile(0.5) == 0
        assert found.quantile(0.99) == pytest.approx(2, rel=found.value_error + 1e-6)

    def test_without_a_histogram(self, units):
        report = hookscope.stats(Fires().eval(), units, histogram=False)
        assert all(row.distribution.histogram is None for row in report.rows)

    def test_non_finite_entries_are_counted_apart(self, units):
        units[0, 0, 0, 0] = math.inf
        units[1, 3] = math.nan
        report = hookscope.stats(Fires().eval(), units)
        found = row(report, "relu")
        assert found.status == "non-finite"
        assert (found.distribution.count, found.distribution.non_finite) == (72, 10)
        assert found.distribution.channels.count.tolist() == [17, 18, 18, 9]
        assert found.distribution.maximum == 2
        assert (report.first_non_finite.site, report.first_non_finite.cause) == (Site("relu"), "received")
        assert report.first_non_finite.non_finite == 10


class TestKinds:
    @pytest.mark.parametrize(
        ("layer", "kind", "bounds"),
        [
            (nn.ReLU(), "relu", None),
            (nn.ReLU6(), "relu6", (-math.inf, 6)),
            (nn.Hardtanh(-2, 3), "hardtanh", (-2, 3)),
            (nn.Sigmoid(), "sigmoid", (pytest.approx(0.0067, abs=1e-4), pytest.approx(0.9933, abs=1e-4))),
            (nn.Tanh(), "tanh", (-0.97, 0.97)),
            (nn.Hardsigmoid(), "hardsigmoid", (0, 1)),
            (nn.BatchNorm2d(3), "norm", None),
            (nn.InstanceNorm2d(3), "norm", None),
            (nn.LayerNorm(3), "norm", None),
            (nn.GroupNorm(1, 3), "norm", None),
            (nn.RMSNorm(3), "norm", None),
            (models.convnext.LayerNorm2d(3), "norm", None),
            (nn.GELU(), "", None),
            (nn.LeakyReLU(), "", None),
            (nn.Softmax(-1), "", None),
            (nn.Conv2d(3, 3, 1), "", None),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_by_class(self, layer, kind, bounds):
        assert kind_of(layer) == kind
        assert bounds_of(layer) == bounds

    @pytest.mark.parametrize(
        ("layer", "saturated"),
        [
            (nn.ReLU6(inplace=True), [0, 2, 0]),
            (nn.Hardtanh(), [1, 4, 0]),
            (nn.Hardsigmoid(inplace=True), [0, 2, 0]),
            (nn.Sigmoid(), [0, 4, 0]),
            (nn.Tanh(), [0, 4, 0]),
            (nn.ReLU(), None),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_entries_at_the_bounds(self, layer, saturated):
        x = torch.tensor([[1.0, 6.0, 0.0], [0.5, 7.0, 0.0], [-0.5, -5.5, 0.5], [0.1, 5.9, 0.0]])
        if isinstance(layer, nn.Hardsigmoid):
            x[:, 1] = torch.tensor([3.0, 0.0, -3.0, 1.0])
        report = hookscope.stats(nn.Sequential(layer).eval(), x)
        found = row(report, "0").distribution.channels
        assert (found.saturated if saturated is None else found.saturated.tolist()) == saturated
        assert row(report, "0:0<").distribution.channels.saturated is None

    def test_a_place_with_bounds_has_them_whatever_was_there_before(self):
        class Odd(nn.Tanh):
            """Returns the very tensor that it was given, as a layer of this class never should."""

            def forward(self, x):
                return x

        report = hookscope.stats(nn.Sequential(nn.Linear(3, 3), Odd()).eval(), torch.full((2, 3), 100.0))
        assert row(report, "1").distribution.channels.saturated is not None


class TestAxes:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("vit", {("NCHW", 1, 16), ("NTC", 2, 16), ("NTC", 2, 32), ("NC", 1, 16), ("NC", 1, 5)}),
            ("swin", {("NCHW", 1, 12), ("NHWC", 3, 12), ("NHWC", 3, 48), ("NHWC", 3, 24), ("NC", 1, 5)}),
            ("convnext", {("NCHW", 1, 8), ("NHWC", 3, 8), ("NHWC", 3, 32), ("NCHW", 1, 16), ("NC", 1, 5)}),
        ],
        ids=["vit", "swin", "convnext"],
    )
    def test_of_the_channels_is_known(self, name, expected):
        report = hookscope.stats(seeded(SMALL[name]), picture(pictures=2, size=32))
        found = {
            (row.layout, row.distribution.channels.axis, row.distribution.channels.channels)
            for row in report.rows
            if row.distribution is not None and row.distribution.channels is not None
        }
        assert expected <= found
        known = [row.distribution.channels is not None for row in report.rows if row.distribution is not None]
        assert np.mean(known) > 0.9

    def test_a_place_is_known_by_whoever_reads_the_same_tensor(self):
        inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        report = hookscope.stats(nn.Sequential(inner, nn.Flatten()).eval(), picture())
        # Of a Sequential's input nothing is known; the convolution that is given it knows.
        outer = row(report, "0:0<")
        assert (outer.layout, outer.distribution.channels.channels) == ("NCHW", 3)
        assert row(report, "0.0:0<").distribution is outer.distribution

    def test_another_number_of_channels_leaves_the_whole(self):
        class Any(nn.Module):
            def __init__(self):
                super().__init__()
                self.relu = nn.ReLU()

            def forward(self, x):
                return self.relu(x)

        batches = [picture(pictures=2), picture(pictures=3)[:, :2]]
        for ordered in (batches, batches[::-1]):
            found = row(hookscope.stats(Any().eval(), ordered), "relu")
            flat = torch.cat([batch.flatten() for batch in batches]).relu()
            assert found.distribution.channels is None
            assert found.layout == ""
            assert found.distribution.mean == pytest.approx(float(flat.mean()), rel=1e-6)
            assert found.distribution.std == pytest.approx(float(flat.std(correction=0)), rel=1e-6)

    def test_pictures_of_other_sizes_are_of_the_same_channels(self):
        model = seeded(ReluThrice)
        report = hookscope.stats(model, [picture(2, 12), picture(1, 17)])
        found = row(report, "a")
        assert found.shape == (1, 4, 10, 10)
        assert found.distribution.channels.count.tolist() == [2 * 100 + 225] * 4


class Roundabout(nn.Module):
    """What passes between layers is made anew each time, in memory that was just given back."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(20))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x * (number + 1)) / (number + 2)
        return x


class TestOnce:
    def test_an_output_that_is_an_input_is_reduced_once(self, monkeypatch):
        reduced = []
        kept = StatsProbe._reduced
        monkeypatch.setattr(
            StatsProbe, "_reduced", lambda self, *at: reduced.append(at[0]) or kept(self, *at)
        )
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()
        ).eval()
        report = hookscope.stats(model, picture(), layers=["0", "1", "2", "3"])
        assert [f"{site}{'<' * (side == INPUT)}" for site, side in reduced] == ["0:0<", "0", "1", "2"]
        assert row(report, "1:0<").same_as == (Site("0"), OUTPUT)
        assert row(report, "3").same_as == (Site("2"), OUTPUT)
        assert row(report, "3").distribution is row(report, "2").distribution
        assert row(report, "2").same_as is None

    def test_memory_that_was_given_back_is_another(self):
        x = torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(0))
        model = Roundabout().eval()
        expected, report = captured(model, x), hookscope.stats(model, x)
        assert len(expected) == 40
        for place, tensor in expected.items():
            assert rows_of(report)[place].distribution.mean == pytest.approx(
                float(tensor.double().mean()), rel=1e-6
            )
        assert all(row.same_as is None for row in report.inputs)

    def test_tensors_without_a_version_are_never_one(self):
        probe = StatsProbe(lambda *_: "NC", {}, Wanted())
        probe.begin(2)
        with torch.inference_mode():
            tensor = torch.ones(2, 3)
            probe.on_output(Site("a"), tensor)
            tensor.mul_(5)
            probe.on_input(Site("b", 0, "0"), tensor)
        probe.finish_batch()
        assert probe.kept((Site("a"), OUTPUT)).moments.means().tolist() == [1, 1, 1]
        assert probe.kept((Site("b", 0, "0"), INPUT)).moments.means().tolist() == [5, 5, 5]

    @pytest.mark.parametrize(
        "other",
        [
            lambda t: t[:, 1:],
            lambda t: t.T,
            lambda t: t.view(3, 4),
            lambda t: t.view(torch.int32),
            torch.clone,
        ],
        ids=["offset", "stride", "shape", "dtype", "copy"],
    )
    def test_another_view_of_the_memory_is_another(self, other):
        probe = StatsProbe(lambda *_: "", {}, Wanted())
        probe.begin(4)
        tensor = torch.rand(4, 3)
        probe.on_output(Site("a"), tensor)
        probe.on_output(Site("b"), other(tensor))
        probe.on_output(Site("c"), tensor.detach())
        probe.finish_batch()
        kept = [probe.kept((Site(name), OUTPUT)) for name in "abc"]
        assert kept[0] is kept[2]
        assert kept[0] is not kept[1]


class Either(nn.Module):
    """A tensor is the next layer's input only where the picture is bright; `extra` is called for dark ones alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.extra = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sigmoid()

    def forward(self, x):
        y = self.conv(x)
        if x.mean() > 0:
            return self.relu(y)
        return self.extra(self.relu(y * 2))


def flat(value):
    """All numbers and words of a report, in bits."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return tuple(flat(one) for one in value)
    return (
        (type(value).__name__, flat(list(vars(value).items()))) if hasattr(value, "__dict__") else repr(value)
    )


def batches_of(x, *sizes):
    numbers = torch.split(torch.arange(len(x)), sizes)
    return [(tuple(at.tolist()), x[at]) for at in numbers]


def probed(model, batches, wanted=Wanted(), look=None):  # noqa: B008
    """A probe that has seen batches of ((number, ...), x), and the statuses."""
    selection = select(model, "**")
    look = batches[0][1] if look is None else look
    layers = list_layers(model, look[:1])
    probe = stats_probe(model, layers, selection, tuple(look.shape), wanted)
    with running(model, [probe], selection) as runner:
        for numbers, x in batches:
            probe.expect(numbers)
            runner.forward(x)
            probe.finish_batch()
    return probe


def report_of(probe, model):
    return stats_report(probe, model, dict.fromkeys(select(model, "**").names, "ok"))


@pytest.fixture
def either():
    x = picture(pictures=6, size=12)
    x -= x.mean((1, 2, 3), keepdim=True)
    x += torch.tensor([1.0, -1, 1, -1, -1, 1]).view(6, 1, 1, 1)
    return seeded(Either), x


class TestMerging:
    def test_no_order_of_batches_changes_a_bit(self, either):
        model, x = either
        batches = batches_of(x, 1, 2, 2, 1)
        seen = {flat(report_of(probed(model, order, look=x[1:2]), model)) for order in permutations(batches)}
        assert len(seen) == 1

    @pytest.mark.parametrize("wanted", [Wanted(), Wanted(histogram=False, threshold=0.3)], ids=["", "plain"])
    @pytest.mark.parametrize("world", [1, 2, 3, 6])
    def test_no_number_of_processes_changes_a_bit(self, either, world, wanted):
        model, x = either
        batches = batches_of(x, *[1] * 6)
        alone = flat(report_of(probed(model, batches, wanted, x[:1]), model))
        for order in permutations(range(world)) if world <= 3 else [range(world), range(world)[::-1]]:
            parts = [probed(model, batches[rank::world], wanted, x[:1]) for rank in order]
            for part in parts[1:]:
                parts[0].absorb(pickle.loads(pickle.dumps(part.share())))
            assert flat(report_of(parts[0], model)) == alone

    def test_a_process_without_a_batch_adds_nothing(self, either):
        model, x = either
        alone, idle = probed(model, batches_of(x, 6)), probed(model, [], look=x)
        expected = flat(report_of(alone, model))
        alone.absorb(idle.share())
        assert flat(report_of(alone, model)) == expected
        idle.absorb(alone.share())
        assert flat(report_of(idle, model)) == expected

    @pytest.mark.parametrize(
        "form", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"]
    )
    def test_batch_size_changes_the_last_digits_only(self, form):
        # What these layers give for a picture is the same in every batch; of convolutions it is not.
        model = nn.Sequential(nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Sigmoid()).eval()
        model[0].running_mean[:] = torch.tensor([0, 3.0, -1, 5, 0.1])
        model[0].running_var[:] = torch.tensor([1, 9, 1e-4, 1, 100.0])
        x = torch.randn(8, 5, 90, 90, generator=torch.Generator().manual_seed(0)).to(memory_format=form)
        whole = hookscope.stats(model, x)
        for sizes in ((1,) * 8, (3, 5), (7, 1)):
            parts = hookscope.stats(model, list(torch.split(x, sizes)))
            assert [row.same_as for row in parts.rows] == [row.same_as for row in whole.rows]
            for one, other in zip(parts.rows, whole.rows, strict=True):
                a, b = one.distribution, other.distribution
                assert (one.place, a.count, a.zeros) == (other.place, b.count, b.zeros)
                assert (a.minimum, a.maximum) == (b.minimum, b.maximum)
                assert a.histogram.counts.tolist() == b.histogram.counts.tolist()
                assert a.channels.alive.tolist() == b.channels.alive.tolist()
                assert (a.channels.saturated is None) == (one.kind != "sigmoid" or one.side == INPUT)
                for figure in ("mean", "std", "energy"):
                    mine, theirs = getattr(a.channels, figure), getattr(b.channels, figure)
                    assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6 * b.channels.std.min()), figure
                assert (a.mean, a.std) == pytest.approx((b.mean, b.std), rel=1e-6)

    def test_batch_size_does_not_change_counts_at_all(self, units):
        # Values that no batch size rounds otherwise.
        x = torch.cat([units, units.flip(1), units * 3])
        whole, *others = (
            hookscope.stats(Fires().eval(), list(torch.split(x, size)), sample=5) for size in (6, 4, 1)
        )
        for report in others:
            for one, other in zip(report.rows, whole.rows, strict=True):
                a, b = one.distribution, other.distribution
                assert (a.count, a.zeros, a.channels.alive.tolist()) == (
                    b.count,
                    b.zeros,
                    b.channels.alive.tolist(),
                )
                assert a.histogram.counts.tolist() == b.histogram.counts.tolist()
                assert not a.histogram.complete
                assert (a.mean, a.std) == pytest.approx((b.mean, b.std), rel=1e-12)

    def test_a_batch_that_failed_does_not_count(self):
        model, x = seeded(Raises), picture()
        selection = select(model, "**")
        probe = stats_probe(model, list_layers(model, x[:1]), selection, tuple(x.shape), Wanted())
        with running(model, [probe], selection) as runner:
            model.error = ValueError("no")
            with pytest.raises(ModelError):
                runner.forward(x.fill_(math.nan))
            model.error = None
            runner.forward(picture())
            probe.finish_batch()
        assert flat(report_of(probe, model)) == flat(report_of(probed(model, [((0, 1), picture())]), model))

    def test_the_first_batch_that_is_not_finite_is_the_data_sets(self):
        model = seeded(ReluThrice)
        batches = batches_of(picture(pictures=5), *[1] * 5)
        batches[1][1][:] = math.nan
        batches[2][1][0, 0, 0, 0] = math.inf
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
            probe = probed(model, [batches[at] for at in order])
            assert (probe.first_non_finite.batch, probe.first_non_finite.site) == (1, Site("a"))
        late, early = (probed(model, batches[rank::2]) for rank in range(2))
        late.absorb(early.share())
        assert (late.first_non_finite.batch, late.first_non_finite.count) == (1, 400)
        assert report_of(late, model).first_non_finite.cause == "received"


class TestSpectrum:
    def test_of_a_layers_channels(self):
        rows = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
        rows[:, 3] = rows[:, 2]
        report = hookscope.stats(nn.Sequential(nn.Identity()).eval(), list(rows.split(90)), spectrum=True)
        found = row(report, "0:0<").spectrum
        values = np.linalg.eigvalsh(np.cov(rows.double().numpy().T, bias=True))[::-1]
        assert found.eigenvalues == pytest.approx(values, abs=1e-8)
        assert found.samples == 400
        # What is one place has one spectrum.
        assert [(row.place, row.spectrum is None) for row in report.rows] == [("0:0<", False), ("0", True)]

    def test_too_few_rows_say_so(self):
        report = hookscope.stats(nn.Sequential(nn.Linear(3, 9)).eval(), torch.ones(4, 3), spectrum=True)
        assert row(report, "0").spectrum.missing

    def test_is_not_made_unasked(self):
        assert row(hookscope.stats(nn.Sequential(nn.Identity()), torch.ones(4, 3)), "0:0<").spectrum is None


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back, self.spare = _Fourier(), nn.Identity(), nn.Linear(2, 2)

    def forward(self, x):
        return self.back(self.there(x)).real


class _Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.fft2(x)


class TestRows:
    def test_are_in_the_order_of_the_pass_what_was_not_called_last(self):
        report = hookscope.stats(seeded(AWKWARD["never-called"]), picture())
        assert [(row.place, row.status, row.depth) for row in report.rows] == [
            ("conv:0<", "ok", 0),
            ("conv", "ok", 0),
            ("spare", "not-called", None),
            ("bypassed", "not-called", None),
        ]

    def test_complex_ones_are_named_and_left_out(self):
        report = hookscope.stats(seeded(Waves), picture())
        assert row(report, "there").status == row(report, "back:0<").status == "complex"
        assert row(report, "there").distribution is None
        assert row(report, "there:0<").status == "ok"
        assert row(report, "spare").status == "not-called"

    def test_every_call_of_a_shared_layer_is_its_own(self):
        report = hookscope.stats(seeded(Tied), picture())
        calls = [row for row in report.outputs if row.site.layer == "first"]
        assert [row.site.call for row in calls] == [0, 1]
        assert calls[0].distribution.mean != calls[1].distribution.mean

    def test_a_type_and_a_kind(self):
        report = hookscope.stats(seeded(ReluThrice), picture())
        assert {(row.type, row.kind) for row in report.rows if row.site.layer in ("a", "relu")} == {
            ("Conv2d", ""), ("ReLU", "relu"),
        }  # fmt: skip


class TestLibrary:
    @pytest.mark.parametrize(
        "batches",
        [
            lambda x: x,
            lambda x: [x[:2], x[2:]],
            lambda x: iter([(x[:2], [1, 2]), (x[2:], None)]),
            lambda x: torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(x, torch.zeros(len(x))), batch_size=2
            ),
            lambda x: [{"x": x[:3]}, {"x": x[3:]}],
        ],
        ids=["tensor", "tensors", "pairs", "loader", "by-name"],
    )
    def test_takes_any_batches(self, batches):
        x = picture(pictures=5)
        report = hookscope.stats(seeded(ReluThrice), batches(x), layers="a")
        assert report.pictures == 5
        assert row(report, "a").distribution.count == 5 * 4 * 100
        assert [row.place for row in report.rows] == ["a:0<", "a"]

    def test_leaves_out_what_is_excluded(self):
        report = hookscope.stats(seeded(ReluThrice), picture(), layers="**", exclude=["relu", "fc"])
        assert not {row.site.layer for row in report.rows} & {"relu", "fc"}

    def test_leaves_the_model_as_it_was(self):
        model = seeded(AWKWARD["dropping"]).train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        hookscope.stats(model, picture())
        assert model.training
        assert model.conv.weight.grad is None
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_inside_inference_mode(self):
        x = picture()
        model = seeded(ReluThrice)
        expected = flat(hookscope.stats(model, x))
        with torch.inference_mode():
            assert flat(hookscope.stats(model, x)) == expected

    @pytest.mark.parametrize("batches", [[], iter(())], ids=["list", "iterator"])
    def test_no_batch_is_an_error(self, batches):
        with pytest.raises(NothingMeasured):
            hookscope.stats(seeded(ReluThrice), batches)

    @pytest.mark.parametrize(
        ("batches", "layers"), [(picture(), "nothing.*"), (3, "**"), ([3], "**")], ids=str
    )
    def test_what_it_cannot_take(self, batches, layers):
        with pytest.raises(UsageError):
            hookscope.stats(seeded(ReluThrice), batches, layers=layers)

    def test_the_seed_decides_the_sample_and_nothing_else(self):
        reports = [hookscope.stats(seeded(ReluThrice), picture(), seed=seed, sample=50) for seed in (0, 0, 1)]
        one, same, other = (row(report, "a").distribution for report in reports)
        assert one.histogram.counts.tolist() == same.histogram.counts.tolist()
        assert one.histogram.counts.tolist() != other.histogram.counts.tolist()
        assert one.histogram.sampled == 100
        assert one.channels.mean.tolist() == other.channels.mean.tolist()

    def test_several_processes_share_the_batches_of_one_source(self):
        model, x = seeded(ReluThrice), picture(pictures=7)
        batches = [(batch, None) for batch in x.split([2, 1, 3, 1])]
        selection = select(model, "**")

        def passes(mine):
            return stats_passes(model, checked(batches), selection, mine=mine)

        probe, statuses = passes(lambda number: number % 2 == 0)
        probe.absorb(passes(lambda number: number % 2 == 1)[0].share())
        alone = hookscope.stats(model, batches)
        assert flat(stats_report(probe, model, statuses)) == flat(alone)
        assert alone.batches == 4
