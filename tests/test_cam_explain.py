"""What a review and an attack found in the making of maps, each with its right value."""

from __future__ import annotations

import nets
import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from hookscope.artifacts import MapStatus
from hookscope.cam.geometry import mirrored_back
from hookscope.cam.judging import Stack, judged, one_of_many
from hookscope.cam.plan import Made
from hookscope.cam.targets import parse_targets
from hookscope.errors import UsageError
from hookscope.layers import Site


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


def test_two_lists_of_one_class_a_picture_are_two_targets():
    assert [spec.name for spec in parse_targets(["each:1,2", "each:3,4"], None)] == ["each", "each2"]
    maps = hookscope.gradcam(
        nets.seeded(Net), nets.picture(2), layers="relu", targets=["each:1,2", "each:3,4"]
    )
    assert [found.target for found in maps] == [1, 3, 2, 4]


@pytest.mark.parametrize("option", [{"smooth": "noise:2,0.1"}, {"targets": "norm", "smooth": "noise:2,0.1"}])
def test_cam_holds_on_changed_pictures(option):
    # The rows of the classifier that a score is made of are those of the pass at hand.
    maps = hookscope.gradcam(nets.seeded(Net), nets.picture(2), layers="relu", methods="cam", **option)
    assert {found.status for found in maps} <= {"ok", "negative-only"}


def test_cam_holds_where_a_picture_lacks_the_target():
    model, x = nets.seeded(Net), nets.picture(3)
    best = model(x).argmax(1).tolist()
    maps = hookscope.gradcam(model, x, layers="relu", methods="cam", contrast=[best[0]])
    assert [found.status == "undefined" for found in maps] == [index == best[0] for index in best]


def test_a_smoothed_map_is_judged_by_what_is_shown():
    kept, signed = torch.tensor([[[0.5, 0.0]]]), torch.tensor([[[-1.0, -0.5]]])
    assert judged(Stack(kept, signed, (False,), True), signed=False) == [(0.0, 0.5, MapStatus.OK)]


def made(values, low, high, status):
    array = np.float32([values])
    return Made(0, Site("a"), "gradcam", array, array, low, high, status, None)


def test_fused_maps_say_what_they_are():
    negative = made([0, 0], -2.0, -1.0, MapStatus.NEGATIVE_ONLY)
    found = one_of_many([negative, made([0, 0], -3.0, -0.5, MapStatus.NEGATIVE_ONLY)], "mean")
    assert (found.minimum, found.maximum, found.status) == (-3.0, -0.5, MapStatus.NEGATIVE_ONLY)
    broken = one_of_many(
        [made([1, 2], 1.0, 2.0, MapStatus.OK), made([np.nan, 1], 1.0, 1.0, MapStatus.NON_FINITE)], "max"
    )
    assert broken.status == MapStatus.NON_FINITE
    assert np.isnan([broken.minimum, broken.maximum]).all()


class Company(Net):
    """Its scores are those less the mean of the batch."""

    def forward(self, x):
        scores = super().forward(x)
        return scores - scores.mean(0)


def test_a_score_that_depends_on_the_rest_of_the_batch_is_said():
    from hookscope.cam.here import Passes

    notes = []
    passes = Passes(note=notes.append)
    assert passes.note is not None
    model, x = nets.seeded(Company), nets.picture(1)
    with running_explainer(model, x, passes) as maps:
        assert maps
    assert any("depends on what runs beside or before it" in note for note in notes)


def running_explainer(model, x, passes):
    from contextlib import contextmanager

    from hookscope.cam.explain import Explainer
    from hookscope.cam.methods import method
    from hookscope.cam.plan import Plan
    from hookscope.cam.questions import Asked, Question
    from hookscope.layers import Selection, all_names, modules_by_name
    from hookscope.layouts import Layouts
    from hookscope.probes.shapes import ShapeProbe
    from hookscope.runner import running

    @contextmanager
    def explained():
        layouts = Layouts(modules_by_name(model), tuple(x.shape))
        plan = Plan((method("ablationcam"),), Question(parse_targets(["1"], None)), passes=passes)
        explainer = Explainer(plan, model, frozenset({"relu"}), lambda: layouts.outputs)
        everything = Selection(tuple(all_names(model)))
        with running(model, [ShapeProbe(layouts), explainer.probe], everything) as runner:
            done = runner.forward(x)
            explainer.ask(done.output, Asked(size=(10, 10), positions=range(len(x))))
            yield explainer.maps(runner, x, done)

    return explained()


def test_a_read_that_gives_nothing_back_is_seen():
    class Copied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.side = nn.Conv2d(3, 4, 3), None

        def forward(self, x):
            y = self.conv(x)
            self.side = torch.zeros(y.shape)
            self.side[:] = y
            return y

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.fc = Copied(), nn.Linear(4, 5)

        def forward(self, x):
            y = self.inner(x)
            return self.fc(y.relu().mean((2, 3)) + 3 * self.inner.side.mean((2, 3)))

    model, x = nets.seeded(Both), nets.picture(1)
    (found,) = hookscope.gradcam(model, x, layers="inner", targets=[1], methods="hirescam")
    a = model.inner.conv(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.fc(a.relu().mean((2, 3)) + 3 * a.mean((2, 3)))[0, 1], a)
    torch.testing.assert_close(found.raw, (a * g).sum(1)[0].clamp(min=0).detach())


class Detector(nn.Module):
    """A box without an area, and scores that depend on the picture."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        scores = self.conv(x).mean((2, 3))[:, :2].sigmoid()
        labels = torch.tensor([1, 1])
        return [{"boxes": torch.zeros(2, 4), "labels": labels, "scores": one} for one in scores]


def test_a_box_without_an_area_is_known_again():
    maps = hookscope.gradcam(
        nets.seeded(Detector), nets.picture(1), layers="conv", targets="top:2", min_score=0, relu=False
    )
    assert [found.status for found in maps] == ["ok", "ok"]


def test_a_model_that_differentiates_while_it_runs_is_explained():
    class Own(Net):
        def forward(self, x):
            with torch.enable_grad():
                y = self.conv(x)
                y = y if y.requires_grad else y.detach().requires_grad_()
                (g,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
            return self.fc(g.relu().mean((2, 3)))

    maps = hookscope.gradcam(nets.seeded(Own), nets.picture(1), layers="conv", targets=[1])
    assert len(maps) == 1


@pytest.mark.parametrize(
    "bad", [{"samples": 0}, {"noise": float("nan")}, {"noise": -1.0}, {"top_channels": 0}]
)
def test_numbers_that_make_no_sense_are_usage_errors(bad):
    with pytest.raises(UsageError):
        hookscope.gradcam(nets.seeded(Net), nets.picture(1), layers="relu", methods="smoothgrad", **bad)


def test_a_mirrored_map_is_turned_back_about_the_picture_and_not_its_padding():
    maps = torch.arange(12.0).reshape(1, 2, 6)
    assert torch.equal(mirrored_back(maps, 1.0), maps.flip(2))
    assert mirrored_back(maps, 4 / 6).tolist() == [[[3, 2, 1, 0, 0, 0], [9, 8, 7, 6, 0, 0]]]


class OneOnly(Net):
    def forward(self, x):
        assert len(x) == 1, "one only"
        return super().forward(x)


@pytest.mark.parametrize("name", ["scorecam", "ablationcam"])
def test_a_model_that_takes_one_picture_is_perturbed_one_by_one(name):
    model, x = nets.seeded(Net), nets.picture(1)
    alone = nets.seeded(OneOnly)
    alone.load_state_dict(model.state_dict())
    (found,) = hookscope.gradcam(alone, x, layers="relu", targets=[1], methods=name, relu=False)
    (wanted,) = hookscope.gradcam(model, x, layers="relu", targets=[1], methods=name, relu=False)
    torch.testing.assert_close(found.raw, wanted.raw, rtol=1e-4, atol=1e-6)
