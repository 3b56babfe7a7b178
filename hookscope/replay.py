"""The rest of a model after a site: the layers before it return what they returned, and are not computed again.

What happens between modules still runs, so a replay is exact as long as the layers are called in the same order;
that is checked on a pass with nothing changed. Where it is not exact, or cannot be learnt, whole passes are made,
and the reason is said. Knows no command, no method and no file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.batch_axes import Axes, Axis, axes_of, axis_of, difference, first, is_half, repeated, same
from hookscope.continuation import Continuation as Continuation
from hookscope.continuation import Rest
from hookscope.edits import storage
from hookscope.errors import UsageError, near_misses
from hookscope.hooks import Edit, attached
from hookscope.layers import Selection, Site, modules_by_name
from hookscope.nested import tensors_in
from hookscope.recording import (
    PICTURE,
    Diverged,
    Kind,
    Player,
    Recorder,
    Recording,
    copied,
    forwards_replaced,
    kept_aside,
)
from hookscope.turns import Shared
from hookscope.wording import one_line

# As shares of a tensor's largest value; a net that is badly conditioned, in small batches, was seen to reach 1e-4.
_ROUNDING = 1e-2
_ROUNDING_HALF = 0.2

Whole = Callable[[Tensor, Sequence[Edit]], Any]


class _NotExact(Exception):
    """A replay would not be, or was not, what the model computes."""


@dataclass(frozen=True)
class _Plan:
    """How to replay for one site and input shape: where the pictures lie, and which steps return memory of their own.

    `real` steps do, and compute where they hand on an input's; the others return views of what was recorded.
    """

    order: tuple[Any, ...]
    steps: tuple[Axes, ...]
    output: Axes
    value: Axis
    real: frozenset[int]

    def played(self, recording: Recording, index: int, copies: int) -> Any:
        """What a step returns for copies of the picture; `None` where it computes."""
        step, real = recording.steps[index], index in self.real
        if step.kind is Kind.OPEN or (real and step.shares):
            return None
        # A view of one copy could be written to, and with it the recording.
        return repeated(step.output, self.steps[index], copies, real=real or copies == 1)


class Replays:
    """What is known of the ways to replay a model, learnt once for each site and input shape.

    Args:
        model: in the mode in which it is to run.
        whole: runs all of it on a batch with edits; returns a copy of its output.
        quiet: the context in which its probes hear nothing.
    """

    def __init__(
        self, model: nn.Module, whole: Whole, quiet: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._model = model
        self._whole = whole
        self._quiet = quiet
        self._plans: dict[Any, _Plan | str] = {}

    def continuation(self, x: Tensor, site: Site) -> Continuation:
        """The rest of the model after a site, for one picture, (1, C, H, W).

        Raises:
            ModelError: the model raised.
            UsageError: the model has no such site, or `x` is not one picture.
        """
        self._refuse(x, site)
        with self._running():
            x = x.detach().clone()
            try:
                plan, recording = self._prepared(x, site)
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:
                return self._by_whole_passes(x, site, one_line(error))

        def replay(copies: int, values: Tensor, given_away: bool) -> Any:
            return self._replayed(site, plan, recording, copies, values, given_away=given_away)

        made = Continuation(site, recording.value.clone(), plan.value, self._whole_passes(x, site))
        made.replay_by(replay)
        return made

    def _refuse(self, x: Tensor, site: Site) -> None:
        modules = modules_by_name(self._model)
        if site.layer not in modules:
            raise UsageError(f"no layer is named {site.layer!r}", near_misses(site.layer, modules))
        if x.dim() == 0 or x.shape[0] != 1:
            raise UsageError(f"an input of shape {tuple(x.shape)} is not one picture", "give one at a time")

    def _by_whole_passes(self, x: Tensor, site: Site, reason: str) -> Continuation:
        held: list[Tensor] = []
        self._whole(x, [_kept(site, held)])
        if not held:
            raise UsageError(
                f"the model has no value at {site}", "`hookscope layers MODEL IMAGE` lists the sites"
            )
        rows = held[0].shape[0] if held[0].dim() else 1
        made = Continuation(site, held[0], Axis(0, rows), self._whole_passes(x, site))
        made.give_up(reason)
        return made

    def _whole_passes(self, x: Tensor, site: Site) -> Rest:
        def whole(copies: int, values: Tensor, given_away: bool) -> Any:
            edit = Edit(site.layer, lambda at, tensor: values, site.call, site.output, given_away)
            return self._whole(x.expand(copies, *x.shape[1:]), [edit])

        return whole

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._quiet(), torch.inference_mode(False), torch.no_grad():
            yield

    def _prepared(self, x: Tensor, site: Site) -> tuple[_Plan, Recording]:
        key = (site, tuple(x.shape), x.dtype)
        known = self._plans.get(key)
        if isinstance(known, str):
            raise _NotExact(known)
        if known is None:
            try:
                plan, recording = self._learnt(x, site)
            except MemoryError:
                raise
            except (Exception, SystemExit) as error:
                self._plans[key] = one_line(error)
                raise
            self._plans[key] = plan
            return plan, recording
        recording = self._recorded(x, site)
        if recording.order != known.order:
            raise Diverged
        self._check(site, known, recording, 1, recording.output)
        return known, recording

    def _learnt(self, x: Tensor, site: Site) -> tuple[_Plan, Recording]:
        pair = self._recorded(Axis(0).repeated(x, 2), site)
        before = kept_aside([self._model])
        # The single picture last: what is kept aside unseen then fits any number of copies.
        recording = self._recorded(x, site)
        _refuse_kept_aside(before, recording)
        if len(pair.steps) != len(recording.steps):
            raise Diverged
        plan = _Plan(
            order=recording.order,
            steps=tuple(
                axes_of(one.output, two.output) for one, two in zip(recording.steps, pair.steps, strict=True)
            ),
            output=axes_of(recording.output, pair.output),
            value=axis_of(recording.value, pair.value),
            real=recording.handed_on,
        )
        half = _first_of(pair, plan, recording.x)
        _refuse_company(half, recording)
        try:
            self._check(site, plan, half, 2, pair.output)
        except MemoryError:
            raise
        except Exception:
            # Something is written to in place that was a view.
            plan = replace(plan, real=frozenset(range(PICTURE, len(plan.steps))))
            self._check(site, plan, _first_of(pair, plan, recording.x), 2, pair.output)
        self._check(site, plan, recording, 1, recording.output)
        return plan, recording

    def _recorded(self, x: Tensor, site: Site) -> Recording:
        held: list[Tensor] = []
        with attached(self._model, (), Selection(()), [_kept(site, held)]) as hooks:
            target, calls = modules_by_name(self._model)[site.layer], hooks.editing.calls
            recorder = Recorder(target, lambda: calls.get(site.layer, 0) == site.call + 1)
            given = x.clone()
            with forwards_replaced(self._model.modules(), recorder.forward_of):
                output = self._model(given)
        if not held:
            raise _NotExact(f"it has no value at {site}")
        return Recording(x.clone(), storage(given), tuple(recorder.steps), held[0], copied(output))

    def _check(self, site: Site, plan: _Plan, recording: Recording, copies: int, expected: Any) -> None:
        """A replay with nothing changed gives what the model gives for copies of the picture."""
        if not any(tensor.is_floating_point() for _, tensor in tensors_in(expected)):
            raise _NotExact("it returns no tensor")
        with _UNWARNED.held():  # the model's own were heard when it was recorded
            values = plan.value.repeated(recording.value, copies)
            output = self._replayed(site, plan, recording, copies, values)
        if not same(output, expected):
            raise _NotExact(
                f"sparing the layers before it changes its output by {difference(output, expected):.2g}"
            )

    def _replayed(
        self,
        site: Site,
        plan: _Plan,
        recording: Recording,
        copies: int,
        values: Tensor,
        *,
        given_away: bool = False,
    ) -> Any:
        """The model's output for copies of the recorded picture, with `values` at the site."""
        put: list[Site] = []

        def change(at: Site, tensor: Tensor) -> Tensor:
            if at.call != player.call:
                return tensor
            put.append(at)
            return values

        edit = Edit(site.layer, change, output=site.output, gives_away=given_away)
        writes = recording.writes()
        with self._running(), attached(self._model, (), Selection(()), [edit]) as hooks:
            player = Player(
                recording.steps,
                lambda index: plan.played(recording, index, copies),
                lambda: hooks.editing.calls.get(site.layer, 0) - 1,
            )
            x = Axis(0).repeated(recording.x, copies, real=copies == 1 or PICTURE in plan.real)
            with forwards_replaced((step.module for step in recording.steps), player.forward_of):
                output = copied(self._model(x))
        if not put:
            raise Diverged
        if recording.writes() != writes:
            raise _NotExact("it writes to what was recorded")
        return output


@contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The filters are the process's: two threads that put back what each found could leave none.
_UNWARNED = Shared(_unwarned)


def _kept(site: Site, held: list[Tensor]) -> Edit:
    def keep(at: Site, tensor: Tensor) -> Tensor:
        held.append(tensor.detach().clone())
        return tensor

    return Edit(site.layer, keep, site.call, site.output)


def _first_of(pair: Recording, plan: _Plan, x: Tensor) -> Recording:
    """What was recorded of the first of two copies: two are replayed from it by the same kernels, rounded alike."""
    steps = (
        replace(step, output=first(step.output, axes))
        for step, axes in zip(pair.steps, plan.steps, strict=True)
    )
    return replace(pair, x=x.clone(), steps=tuple(steps), value=plan.value.first(pair.value))


def _refuse_company(half: Recording, alone: Recording) -> None:
    """What comes before the site must be the same for a picture in any batch, but for the rounding of its kernels."""
    pairs = [(one.output, other.output) for one, other in zip(half.steps, alone.steps, strict=True)]
    limit = _ROUNDING_HALF if is_half(half.value) else _ROUNDING
    if any(difference(one, other) > limit for one, other in [*pairs, (half.value, alone.value)]):
        raise _NotExact("what it makes of a picture depends on the others in the batch")


def _refuse_kept_aside(before: dict[tuple[int, str], list[Tensor]], recording: Recording) -> None:
    """What a layer leaves behind for others to find is not left behind when it is spared."""
    spared = kept_aside(step.module for step in recording.steps if step.kind is not Kind.OPEN)
    for (owner, name), tensors in spared.items():
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in before.get((owner, name), ())]:
            raise _NotExact(f"a layer keeps values aside as {name!r}")
