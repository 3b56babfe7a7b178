"""GradientMonitor against autograd.grad, real copies and twins without it."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.checks import gradbaseline
from hookscope.errors import NothingMeasured, UsageError
from hookscope.layers import Site
from hookscope.monitor.events import GradientEvent, GradientWarning
from hookscope.monitor.records import Kind, Point

REL = 1e-5


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embed(x))))


class Shared(nn.Module):
    """One layer called three times, one never, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.a, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.a(self.a(self.a(x))))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)
        return self.last(x)


class Net(nn.Module):
    """Convolution, batch norm, an activation in place, dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.drop(self.relu(self.bn(self.conv(x))).mean((2, 3))))


def flat_batch(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def picture_batch(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 5, (rows,), generator=generator)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


NETS = {"mlp": mlp, "tied": Tied, "shared": Shared, "checkpointed": Checkpointed}


def made(kind):
    torch.manual_seed(0)
    return NETS[kind]()


def loss_of(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
}


def exact_norm(tensor, norm):
    return float(torch.linalg.vector_norm(tensor.detach().double(), norm))


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("norm", [1, 2, math.inf], ids=["L1", "L2", "Linf"])
@pytest.mark.parametrize("kind", NETS)
def test_norms_are_those_of_autograd_grad_step_by_step(kind, norm):
    model = made(kind)
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, norm=norm, history=5) as monitor:
        for step in range(5):
            parameters = trainable(model)
            found = torch.autograd.grad(
                loss_of(model, flat_batch(step)), parameters.values(), allow_unused=True
            )
            weights = {
                name: float(torch.linalg.vector_norm(p.detach().double(), norm))
                for name, p in parameters.items()
            }
            optimizer.zero_grad()
            loss_of(model, flat_batch(step)).backward()
            optimizer.step()
            record = monitor.last
            assert record.step == step
            assert record.point == Point.BACKWARD
            for (name, weight), gradient in zip(weights.items(), found, strict=True):
                row = record.parameters[name]
                if gradient is None:
                    assert (row.norm, row.status) == (None, "no-grad-path")
                    continue
                expected = exact_norm(gradient, norm)
                assert row.norm == pytest.approx(expected, rel=REL)
                assert row.weight_norm == pytest.approx(weight, rel=REL)
                assert row.ratio == pytest.approx(expected / weight, rel=REL)
                assert row.rms == pytest.approx(float(gradient.double().square().mean().sqrt()), rel=REL)
            whole = torch.cat([g.flatten() for g in found if g is not None]).double()
            assert record.total_norm == pytest.approx(float(torch.linalg.vector_norm(whole, norm)), rel=REL)
    assert len(monitor.history) == monitor.steps == 5


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_update_ratio_is_that_of_real_copies(name, kind):
    model = made(kind)
    optimizer = OPTIMISERS[name](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, update_ratio=True) as monitor:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, flat_batch(step)).backward()
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.step()
            for n, p in model.named_parameters():
                change = float((p.detach() - before[n]).double().norm() / before[n].double().norm())
                assert monitor.last.parameters[n].update_ratio == pytest.approx(change, rel=REL, abs=1e-12)


def test_update_ratio_by_hand():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[3.0, 4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookscope.GradientMonitor(model, optimizer, update_ratio=True) as monitor:
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
    assert monitor.last.parameters["weight"].update_ratio == pytest.approx(0.1)
    assert monitor.last.parameters["weight"].ratio == pytest.approx(1.0)


def train(model, optimizer, steps=6, **options):
    torch.manual_seed(7)

    def run():
        for step in range(steps):
            optimizer.zero_grad(set_to_none=bool(step % 2))
            x, y = picture_batch(step)
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    if options.pop("bare", False):
        run()
        return None
    with hookscope.GradientMonitor(model, optimizer, **options) as monitor:
        run()
    return monitor


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": True},
        {"update_ratio": True},
        {"every": 3, "activations": True, "update_ratio": True},
    ],
    ids=["parameters", "activations", "updates", "every"],
)
def test_a_twin_without_a_monitor_ends_with_the_same_bits(options):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    monitor = train(model, OPTIMISERS["adam"](model.parameters()), **options)
    train(twin, OPTIMISERS["adam"](twin.parameters()), bare=True)
    assert monitor.report().measured == (2 if "every" in options else 6)
    for (name, one), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_nothing_is_left_behind():
    model = Net()
    optimizer = OPTIMISERS["adam"](model.parameters())
    train(model, optimizer, activations=True, update_ratio=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_hooks_go_when_the_loop_raises():
    model = Net()
    optimizer = OPTIMISERS["adam"](model.parameters())
    with pytest.raises(ZeroDivisionError), hookscope.GradientMonitor(model, optimizer, activations=True):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_backward_that_raises_does_not_stop_the_monitor():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    x, y = flat_batch(0)
    with hookscope.GradientMonitor(model, optimizer) as monitor:
        with pytest.raises(ZeroDivisionError):
            model[2:](Breaks.apply(model[:2](x))).sum().backward()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert monitor.last.point == Point.BACKWARD
    assert monitor.last.parameters["0.weight"].norm > 0


def test_figures_are_from_before_clipping():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer) as monitor:
        loss_of(model, flat_batch(0)).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert monitor.last.total_norm == pytest.approx(float(total), rel=REL)


def test_micro_batches_count_as_one_step():
    model, parts = mlp(), 4
    optimizer = OPTIMISERS["sgd"](model.parameters())
    x, y = flat_batch(0, rows=16)
    whole = torch.autograd.grad(F.mse_loss(model(x), y), model.parameters())
    with hookscope.GradientMonitor(model, optimizer, activations=True) as monitor:
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.mse_loss(model(a), b) / parts).backward()
        optimizer.step()
    assert monitor.report().measured == monitor.steps == 1
    for (name, _), gradient in zip(model.named_parameters(), whole, strict=True):
        assert monitor.last.parameters[name].norm == pytest.approx(float(gradient.norm()), rel=REL)
    output = model(x)
    output.retain_grad()
    F.mse_loss(output, y).backward()
    row = monitor.last.activations[Site("4")]
    # The step was taken in between, so only what does not depend on the weights can be compared exactly.
    assert row.count == output.numel()


@pytest.mark.parametrize("kind", NETS)
def test_activation_figures_are_those_of_autograd_grad(kind):
    model = made(kind)
    optimizer = OPTIMISERS["sgd"](model.parameters())
    expected = truth(model, flat_batch(0))
    with hookscope.GradientMonitor(model, optimizer, activations=True) as monitor:
        loss_of(model, flat_batch(0)).backward()
        optimizer.step()
    assert set(monitor.last.activations) == set(expected)
    for site, gradient in expected.items():
        row, exact = monitor.last.activations[site], gradient.double()
        assert row.norm == pytest.approx(float(exact.norm()), rel=REL)
        assert row.mean == pytest.approx(float(exact.mean()), rel=1e-4, abs=1e-8)
        assert row.deviation == pytest.approx(float(exact.std(correction=0)), rel=1e-4)
        assert row.maximum == pytest.approx(float(exact.abs().max()), rel=REL)
        assert row.count == exact.numel()


def truth(model, batch):
    """Gradients at what every call of every layer returned, by autograd.grad on the outputs themselves."""
    kept, calls = {}, {}
    handles = []
    for name, module in model.named_modules():
        if name:

            def keep(module, args, output, name=name):
                if torch._C._current_graph_task_id() == -1:
                    kept[Site(name, calls.setdefault(name, 0))] = output
                    calls[name] += 1

            handles.append(module.register_forward_hook(keep))
    loss = loss_of(model, batch)
    for handle in handles:
        handle.remove()
    found = torch.autograd.grad(loss, list(kept.values()), allow_unused=True)
    return {site: gradient for site, gradient in zip(kept, found, strict=True) if gradient is not None}


class Scaled(torch.autograd.Function):
    """The value itself, and its gradient times a factor."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.factor


class Explodes(nn.Module):
    """Between b and c the gradient is scaled: b is the first layer, going back, that gets to feel it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.c(torch.tanh(Scaled.apply(self.b(self.a(x)))))


def explode(monitor, model, optimizer, factor, at=5, steps=8):
    try:
        with monitor:
            for step in range(steps):
                Scaled.factor = factor if step >= at else 1.0
                optimizer.zero_grad()
                loss_of(model, flat_batch(step)).backward()
                optimizer.step()
    finally:
        Scaled.factor = 1.0


@pytest.mark.parametrize(
    ("factor", "kind"),
    [(1e9, Kind.EXPLODED), (1e-20, Kind.VANISHED), (math.inf, Kind.NON_FINITE)],
    ids=["explodes", "vanishes", "non-finite"],
)
@pytest.mark.parametrize("activations", [False, True], ids=["parameters", "activations"])
def test_a_run_that_goes_wrong_at_a_known_step_and_layer_is_caught_there(factor, kind, activations):
    torch.manual_seed(0)
    model = Explodes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told = []
    monitor = hookscope.GradientMonitor(model, optimizer, activations=activations, on_event=told.append)
    explode(monitor, model, optimizer, factor)
    own = [event for event in told if event.kind is kind]
    assert {event.step for event in own} == {5}
    assert {event.layer for event in own} == {"b"}
    assert [event.local for event in own] == ([False, True] if activations else [False])
    assert all(event.mean is not None and event.parameter_norm is not None for event in own if event.local)
    assert monitor.events == tuple(told)


def test_a_stopped_run_keeps_its_weights():
    torch.manual_seed(0)
    model = Explodes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = hookscope.GradientMonitor(model, optimizer, on_event="raise")
    with pytest.raises(GradientEvent, match="step 5") as caught:
        explode(monitor, model, optimizer, math.inf)
    assert caught.value.event.kind is Kind.NON_FINITE
    assert all(p.isfinite().all() for p in model.parameters())


def test_warnings_say_the_step_and_the_name():
    torch.manual_seed(0)
    model = Explodes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(GradientWarning, match=r"step 5: the RMS of the gradient of b\.(weight|bias)"):
        explode(hookscope.GradientMonitor(model, optimizer, on_event="warn"), model, optimizer, 1e9)


def test_a_spike_is_one_beyond_median_and_mad():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.0, 1.05, 9.0, 1.0]
    with hookscope.GradientMonitor(model, optimizer, warmup=5, spike=6.0, window=8) as monitor:
        for value in values:
            optimizer.zero_grad()
            model(torch.tensor([[value]])).sum().backward()
            optimizer.step()
    (event,) = [one for one in monitor.events if one.kind is Kind.SPIKE]
    latest = values[1:9]
    median = statistics.median(latest)
    mad = statistics.median(abs(value - median) for value in latest)
    assert (event.step, event.value) == (9, 9.0)
    assert event.limit == pytest.approx(median + 6.0 * 1.4826 * mad)
    summary = monitor.report().total
    assert summary.mean == pytest.approx(statistics.fmean(values))
    assert summary.deviation == pytest.approx(statistics.pstdev(values))
    assert (summary.minimum, summary.maximum, summary.last) == pytest.approx((0.8, 9.0, 1.0))


def test_max_norm_is_an_event():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, max_norm=1e-6) as monitor:
        for step in range(2):
            loss_of(model, flat_batch(step)).backward()
            optimizer.step()
    (event,) = monitor.events
    assert (event.kind, event.step, event.limit) == (Kind.MAX_NORM, 0, 1e-6)
    assert [finding.rule for finding in monitor.report().findings] == ["max-norm"]


def amp_run(model, *, unscale, steps=6, overflow=(), **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    with hookscope.GradientMonitor(model, optimizer, scaler=scaler, history=99, **options) as monitor:
        truths = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, flat_batch(step)) * (1e38 if step in overflow else 1.0)
            truths.append(
                [float(g.norm()) for g in torch.autograd.grad(loss, model.parameters(), retain_graph=True)]
            )
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
    return monitor, truths


@pytest.mark.parametrize("unscale", [False, True], ids=["scaler-unscales", "user-unscales-and-clips"])
def test_scaled_gradients_are_divided_once(unscale):
    monitor, truths = amp_run(mlp(), unscale=unscale)
    assert len(monitor.history) == 6
    for record, truth_ in zip(monitor.history, truths, strict=True):
        assert [row.norm for row in record.parameters.values()] == pytest.approx(truth_, rel=1e-4)
    assert {record.scale for record in monitor.history} >= {2.0**12, 2.0**13}


@pytest.mark.parametrize("overflow", [(2,), (0, 1), (5,), (2, 3, 4)], ids=["one", "first", "last", "three"])
def test_steps_that_the_scaler_left_out_are_said_to_be_skipped(overflow):
    monitor, _ = amp_run(mlp(), unscale=False, overflow=overflow, update_ratio=True)
    assert [record.step for record in monitor.history] == list(range(6))
    assert tuple(record.step for record in monitor.history if record.skipped) == overflow
    for record in monitor.history:
        ratios = [row.update_ratio for row in record.parameters.values()]
        assert all(ratio == 0 for ratio in ratios) if record.skipped else all(ratio > 0 for ratio in ratios)
    assert monitor.report().skipped == len(overflow)
    assert not [event for event in monitor.events if event.kind is Kind.NON_FINITE]


def test_only_every_so_many_steps_are_measured():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, every=3, history=9, activations=True) as monitor:
        for step in range(8):
            optimizer.zero_grad()
            hooked = any(module._forward_hooks for module in model.modules())
            assert hooked == (step % 3 == 0)
            loss_of(model, flat_batch(step)).backward()
            optimizer.step()
    assert [record.step for record in monitor.history] == [0, 3, 6]
    assert all(record.activations for record in monitor.history)
    assert (monitor.steps, monitor.report().measured) == (8, 3)


def test_without_an_optimizer_every_backward_is_a_step():
    model = mlp()
    with hookscope.GradientMonitor(model, history=9) as monitor:
        for step in range(3):
            loss_of(model, flat_batch(step)).backward()
    assert [record.step for record in monitor.history] == [0, 1, 2]


def test_gradients_that_the_loop_sets_itself_are_read_at_the_step():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer) as monitor:
        gradients = torch.autograd.grad(loss_of(model, flat_batch(0)), model.parameters())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert monitor.last.point == Point.STEP
    assert monitor.last.parameters["0.weight"].norm == pytest.approx(float(gradients[0].norm()), rel=REL)


def test_a_closure_is_measured_too():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, flat_batch(0))
        loss.backward()
        return loss

    with hookscope.GradientMonitor(model, optimizer, update_ratio=True) as monitor:
        optimizer.step(closure)
        optimizer.step(closure)
    assert monitor.steps == 2
    assert monitor.last.parameters["0.weight"].update_ratio > 0


def test_a_parameter_without_gradient_is_not_zero():
    model = Shared()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with hookscope.GradientMonitor(model, optimizer, activations=True) as monitor:
        loss_of(model, flat_batch(0)).backward()
        optimizer.step()
    rows = monitor.last.parameters
    assert (rows["unused.weight"].norm, rows["unused.weight"].status) == (None, "no-grad-path")
    assert (rows["frozen.weight"].norm, rows["frozen.weight"].status) == (None, "frozen")
    assert {site.call for site in monitor.last.activations if site.layer == "a"} == {0, 1, 2}
    statuses = {str(row.site): row.status for row in monitor.report().grad.layers}
    assert statuses["unused"] == "not-called"


def test_zero_weights_have_no_ratio():
    model = nn.Linear(6, 6)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookscope.GradientMonitor(model, optimizer, update_ratio=True) as monitor:
        loss_of(model, flat_batch(0)).backward()
        optimizer.step()
    assert monitor.last.parameters["bias"].ratio is None
    assert monitor.last.parameters["bias"].update_ratio is None
    assert monitor.last.parameters["weight"].ratio > 0


@pytest.mark.parametrize("value", [1e-30, 1e25, 1e-42], ids=str)
def test_gradients_whose_squares_leave_float32_are_measured(value):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hookscope.GradientMonitor(model, optimizer, activations=True) as monitor:
        (model(torch.ones(1, 4)) * value).sum().backward()
        optimizer.step()
    exact = float(torch.tensor(value))
    assert monitor.last.parameters["weight"].norm == pytest.approx(2 * exact, rel=1e-6)
    assert monitor.last.parameters["weight"].status == "ok"
    assert monitor.last.activations[Site(".")].norm == pytest.approx(exact, rel=1e-6)


def test_a_sparse_gradient_is_measured_whole():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookscope.GradientMonitor(model, optimizer) as monitor:
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    assert monitor.last.parameters["0.weight"].norm == pytest.approx(math.sqrt(4 * 4 + 4))


def test_large_tensors_keep_their_digits():
    model = nn.Linear(3000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hookscope.GradientMonitor(model, optimizer) as monitor:
        (model(torch.randn(4, 3000)) ** 2).sum().backward()
        optimizer.step()
    assert monitor.last.total_norm == pytest.approx(float(model.weight.grad.double().norm()), rel=1e-6)


def test_one_read_a_step_and_none_in_between(monkeypatch):
    from hookscope.monitor import stepping

    reads = []
    real = stepping.read
    monkeypatch.setattr(stepping, "read", lambda tensors: reads.append(1) or real(tensors))
    model = mlp()
    optimizer = OPTIMISERS["adam"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, activations=True, update_ratio=True):
        for step in range(3):
            loss_of(model, flat_batch(step)).backward()
            loss_of(model, flat_batch(step)).backward()
            assert len(reads) == step
            optimizer.step()
    assert len(reads) == 3


def test_parameters_alone_do_not_touch_compiled_code():
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = mlp()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = OPTIMISERS["sgd"](model.parameters())
    torch._dynamo.utils.counters.clear()
    with hookscope.GradientMonitor(compiled, optimizer, history=9) as monitor:
        for step in range(6):
            optimizer.zero_grad()
            x, y = flat_batch(step)
            expected = torch.autograd.grad(F.mse_loss(model(x), y), model.parameters())
            F.mse_loss(compiled(x), y).backward()
            optimizer.step()
            assert [row.norm for row in monitor.last.parameters.values()] == pytest.approx(
                [float(g.norm()) for g in expected], rel=1e-4
            )
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert list(monitor.last.parameters) == [name for name, _ in model.named_parameters()]
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_activations_of_a_compiled_model_are_seen(how):
    torch._dynamo.reset()
    model = mlp()
    expected = truth(model, flat_batch(2))
    compiled = torch.compile(model, backend="eager") if how == "wrapper" else model
    if how == "in place":
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(compiled, flat_batch(0)).backward()
    with hookscope.GradientMonitor(compiled, optimizer, activations=True, every=2) as monitor:
        for step in range(3):
            loss_of(compiled, flat_batch(step)).backward()
            optimizer.step()
    assert {site: row.norm for site, row in monitor.last.activations.items()} == pytest.approx(
        {site: float(gradient.norm()) for site, gradient in expected.items()}, rel=REL
    )
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"history": -1}, "history=-1"),
        ({"window": 1}, "window=1"),
        ({"spike": 0}, "spike=0"),
        ({"spike": math.nan}, "spike=nan"),
        ({"on_event": "stop"}, "on_event='stop'"),
        ({"norm": 3}, "norm 3"),
        ({"layers": "nope.*"}, "nope"),
        ({"layers": "1"}, "own no parameter"),
        ({"limits": {"explode": 1}}, "explode"),
        ({"severity": {"9.*": {"zero": "off"}}}, "9"),
        ({"log": 3}, "log=3"),
        ({"norm": 1, "activations": True}, "L1"),
        ({"baseline": "nowhere.json"}, "nowhere.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_a_usage_error(options, words):
    model = mlp()
    with pytest.raises(UsageError, match=words.replace("*", ".")):
        hookscope.GradientMonitor(model, OPTIMISERS["sgd"](model.parameters()), **options).start()


def test_layers_choose_parameters():
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(
        model, optimizer, layers="type:Linear", exclude="2", activations=True
    ) as monitor:
        loss_of(model, flat_batch(0)).backward()
        optimizer.step()
    assert list(monitor.last.parameters) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert {site.layer for site in monitor.last.activations} == {"0", "4"}


def test_a_report_before_any_step_has_nothing_to_judge():
    model = mlp()
    with hookscope.GradientMonitor(model, OPTIMISERS["sgd"](model.parameters())) as monitor:
        report = monitor.report()
        assert (report.steps, report.total, report.last) == (0, None, None)
        with pytest.raises(NothingMeasured, match="no training step"):
            _ = report.findings
        with pytest.raises(UsageError, match="running already"):
            monitor.start()
    monitor.close()


def one_step(model, batch, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hookscope.GradientMonitor(model, optimizer, **options) as monitor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return monitor, loss.item()


def test_the_report_is_that_of_gradnorm(tmp_path):
    torch.manual_seed(0)
    model = Net().eval()
    batch = picture_batch(0)
    gate = hookscope.gradnorm(model, *batch)
    monitor, loss = one_step(model, batch, activations=True)
    ours = monitor.report().as_baseline(loss=loss, pictures=8).figures
    from hookscope.checks.gradfigures import figures_of

    theirs = figures_of(gate)
    assert list(ours.layers) == list(theirs.layers)
    assert ours == theirs
    saved = monitor.save(tmp_path, loss=loss, pictures=8)
    assert saved.name == gradbaseline.FILE
    assert gradbaseline.read(saved).figures == ours


def test_a_baseline_is_kept_to_while_training(tmp_path):
    torch.manual_seed(0)
    model = Net().eval()
    batch = picture_batch(0)
    monitor, _ = one_step(model, batch, activations=True)
    saved = monitor.save(tmp_path / "deep" / "b.json")
    same, _ = one_step(model, batch, activations=True, baseline=saved)
    assert same.events == ()
    assert not [finding for finding in same.report().findings if finding.rule == "drift"]
    other, _ = one_step(model, picture_batch(1), activations=True, baseline=saved)
    assert [event.kind for event in other.events] == [Kind.DRIFT]
    assert [finding for finding in other.report().findings if finding.rule == "drift"]


GATE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))

def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(6, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2]))]

def others():
    return batches(1)
"""


@pytest.mark.parametrize(("data", "code"), [("batches", 0), ("others", 1)], ids=["same", "drifted"])
def test_a_saved_report_is_a_baseline_of_the_gate(tmp_path, monkeypatch, capsys, data, code):
    from hookscope.cli.app import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "gated.py").write_text(GATE)
    space = {}
    exec(GATE, space)
    model = space["Net"]().train()
    ((x, y),) = space["batches"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookscope.GradientMonitor(model, optimizer, activations=True) as monitor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    monitor.save("b.json", loss=loss.item(), pictures=6)
    line = (
        f"gradnorm gated.py:Net --weights none --data gated.py:{data} --train-mode --baseline b.json -o out"
    )
    assert main(line.split()) == code, capsys.readouterr().err


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_a_report_between_backward_and_step_disturbs_nothing(scaled):
    model = mlp()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    with hookscope.GradientMonitor(model, optimizer, scaler=scaler, update_ratio=True) as monitor:
        loss = loss_of(model, flat_batch(0))
        (scaler.scale(loss) if scaled else loss).backward()
        assert monitor.report().measured == 0
        scaler.step(optimizer) if scaled else optimizer.step()
    assert (monitor.last.point, monitor.last.scale) == (Point.BACKWARD, 4.0 if scaled else 1.0)
    assert monitor.last.parameters["0.weight"].update_ratio > 0


def test_an_event_stops_a_backward_that_is_a_step():
    model = mlp()
    monitor = hookscope.GradientMonitor(model, max_norm=1e-9, on_event="raise")
    with monitor, pytest.raises(GradientEvent, match="total gradient norm"):
        loss_of(model, flat_batch(0)).backward()


def test_an_event_of_one_process_alone_does_not_stop_it():
    from hookscope.monitor.records import Event, StepRecord
    from hookscope.monitor.telling import Teller

    record = StepRecord(0, 1.0, {})
    event = Event(Kind.EXPLODED, 0, "a", "a", 2.0, 1.0, "too large", local=True)
    with pytest.warns(GradientWarning, match="too large"):
        Teller("raise").tell(record, [event], together=True)
    with pytest.raises(GradientEvent, match="too large"):
        Teller("raise").tell(record, [event], together=False)


def test_sinks_are_told_in_order_and_closed():
    class Kept:
        def __init__(self):
            self.told = []

        def record(self, record):
            self.told.append(("record", record.step))

        def event(self, event):
            self.told.append(("event", event.step))

        def close(self):
            self.told.append("closed")

    model, sink = mlp(), Kept()
    optimizer = OPTIMISERS["sgd"](model.parameters())
    with hookscope.GradientMonitor(model, optimizer, log=[sink], max_norm=1e-9):
        for step in range(2):
            loss_of(model, flat_batch(step)).backward()
            optimizer.step()
    assert sink.told == [("record", 0), ("event", 0), ("record", 1), "closed"]


def test_running_statistics_skip_what_is_missing_or_not_finite():
    import numpy as np

    from hookscope.monitor.running import Running

    rows = [[1.0, 4.0], [3.0, math.inf], [8.0, math.nan], [2.0, 6.0], [9.0, 5.0]]
    running = Running(2, window=3)
    for row in rows:
        values = np.array(row)
        running.add(values, np.isnan(values))
    first, second = running.summary(0), running.summary(1)
    whole = [row[0] for row in rows]
    assert (first.mean, first.deviation) == pytest.approx((statistics.fmean(whole), statistics.pstdev(whole)))
    assert (first.median, first.mad) == (8.0, 1.0)  # of 8, 2, 9
    assert (second.steps, second.non_finite, second.mean, second.median) == (3, 1, 5.0, 5.0)
    assert [list(part) for part in running.centre()] == [[8.0, 5.0], [1.0, 1.0]]


def test_merged_moments_are_those_of_all_entries():
    from hookscope.monitor.activations import Moments, merged

    parts = [torch.randn(7) + 3, torch.randn(100), torch.zeros(5)]
    found = merged(
        Moments(p.numel(), float(p.double().sum()), float(p.double().norm()), float(p.abs().max()))
        for p in parts
    ).figures()
    whole = torch.cat(parts).double()
    assert (found.mean, found.deviation, found.norm, found.maximum) == pytest.approx(
        (float(whole.mean()), float(whole.std(correction=0)), float(whole.norm()), float(whole.abs().max()))
    )


class Backwards(nn.Module):
    """Layers written down in the opposite order of their calls."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(Scaled.apply(self.middle(self.first(x)))))


def test_the_first_layer_is_the_first_that_backward_reaches_whatever_the_order_of_definition():
    torch.manual_seed(0)
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = hookscope.GradientMonitor(model, optimizer)
    explode(monitor, model, optimizer, 1e9)
    (event,) = monitor.events
    assert event.layer == "middle"
    assert {name.partition(".")[0] for name in event.others} == {"middle", "first"}


def test_gradients_read_at_a_scalers_step_are_unscaled_already():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookscope.GradientMonitor(model, optimizer, scaler=scaler) as monitor:
        loss = loss_of(model, flat_batch(0))
        exact = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        scaled = torch.autograd.grad(scaler.scale(loss), model.parameters())
        for parameter, gradient in zip(model.parameters(), scaled, strict=True):
            parameter.grad = gradient
        scaler.step(optimizer)
    assert monitor.last.point == Point.STEP
    assert [row.norm for row in monitor.last.parameters.values()] == pytest.approx(
        [float(gradient.norm()) for gradient in exact], rel=REL
    )
