"""Maps of a batch, whatever they need: the main pass by its probe, further passes beside it, smoothed and fused.

What the command and the library share. It knows no flag, no file and no picture but as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.artifacts import MapStatus, Target
from hookscope.cam.geometry import covered, mirrored_back
from hookscope.cam.heads import PooledHead, biases, classifier_weight
from hookscope.cam.here import Here
from hookscope.cam.judging import Stack, Verdict, averaged, channels_of, judged, one_of_many
from hookscope.cam.methods import Kind, Method
from hookscope.cam.plan import Made, Plan
from hookscope.cam.questions import Asked, scores_for
from hookscope.cam.rounds import INPUT, further, noisy, passes_needed
from hookscope.cam.scores import Score, objective
from hookscope.layers import OutputInfo, Selection, Site
from hookscope.layouts import is_spatial
from hookscope.probes.cam import CamProbe, Key, Raw
from hookscope.runner import Objective, Pass, Runner

_SMOOTH = "smooth"


class Explainer:
    """Makes the maps of one batch after another.

    Args:
        plan: how.
        model: read for its weights where a method needs them.
        layers: names of the layers to explain by.
        known: what is known of every site, for the size of picture that is run now.
        only: of all their sites just this one.
        scored: the scores are wanted even where no map is of one.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        layers: frozenset[str],
        known: Callable[[], Mapping[Site, OutputInfo]],
        only: Site | None = None,
        *,
        scored: bool = False,
    ) -> None:
        self.plan = plan
        self.scores: list[Score] = []
        self._known = known
        self._only = only
        self._scored = scored
        self._model = model
        self._layers = layers
        self._by_layer = tuple(method for method in plan.methods if not method.on_input)
        self._head: PooledHead | None = None
        self._telling = True
        self.probe = self._new_probe(self._by_layer if plan.smooth is None or plan.smooth.flip else ())

    def ask(self, output: Any, asked: Asked) -> list[Objective]:
        """What to differentiate, given the model's answer to a batch.

        Raises:
            UsageError: the answer has nothing of what is asked.
        """
        class_free = all(method.class_free for method in self.plan.methods)
        if class_free and not self._scored:
            return []
        self.scores = scores_for(self.plan.question, output, asked)
        if class_free:
            return []
        self.probe.objectives = frozenset(score.name for score in self.scores)
        self._learn(self.scores, output)
        return list(filter(None, map(objective, self.scores)))

    def maps(self, runner: Runner, x: Tensor, done: Pass) -> list[Made]:
        """The maps of the batch that the main pass was about: by picture, then target, layer and method."""
        return list(self._judged(self._rounds(runner, x, done)))

    def again(self, runner: Runner, x: Tensor) -> list[Made]:
        """The maps of the same pictures and scores by the model as it is now, its weights maybe others."""
        self._telling = False
        try:
            return list(self._judged(self._rounds(runner, x, None)))
        finally:
            self._telling = True

    def passes_a_picture(self) -> dict[str, int]:
        """How many forward passes smoothing and each method make for a picture beside the first, where any."""
        known = [self._info(site) for site in self._known() if site.layer in self._layers]
        sites = [info for info in known if info is not None and is_spatial(info)]
        smooth = self.plan.smooth
        rounds = 1 if smooth is None else (2 if smooth.flip else smooth.count)
        found = {} if smooth is None else {_SMOOTH: 1 if smooth.flip else rounds}
        for method in self.plan.methods:
            channels = [0] if method.on_input or method.kind is Kind.NOISY else [*map(channels_of, sites)]
            count = rounds * sum(passes_needed(method, number, self.plan.passes) for number in channels)
            if count:
                found[method.name] = count
        return found

    def _new_probe(self, methods: Sequence[Method]) -> CamProbe:
        probe = CamProbe(self._layers, self._info, methods, check=self._check)
        # A model may differentiate something itself while it runs: that is nobody's score.
        probe.objectives = frozenset(score.name for score in self.scores)
        return probe

    def _info(self, site: Site) -> OutputInfo | None:
        return self._known().get(site) if self._only in (None, site) else None

    def _learn(self, scores: Sequence[Score], output: Any) -> None:
        """What the head makes of this output, by the weights that it has now."""
        if any(method.name == "cam" for method in self.plan.methods):
            weight = classifier_weight(self._model, self._known())
            self._head = PooledHead(weight, self.plan.question.key)
            self._head.learn(scores, output)

    def _check(self, site: Site, activation: Tensor, gradient: Tensor, objective: str) -> None:
        if self._head is not None:
            self._head.check(site, activation, gradient, objective)

    def _rounds(self, runner: Runner, x: Tensor, done: Pass | None) -> dict[Key, Stack]:
        """Every map, over the picture as it is and over changed ones as the plan says."""
        smooth = self.plan.smooth
        if smooth is None or smooth.flip:
            rounds = [self._round(runner, x, self.scores, done)]
        else:
            # Another seed than that of the noise which a method may add itself.
            inputs = noisy(x, smooth.count, smooth.deviation, self.plan.passes.seed + 1)
            rounds = [self._round(runner, changed, self.scores, None) for changed in inputs]
        if smooth is not None and smooth.flip:
            mirrored = [score.mirrored(x.shape[3]) for score in self.scores]
            other = self._round(runner, x.flip(3), mirrored, None)
            _, across = covered(runner.model, x)
            rounds.append(
                {
                    key: replace(raw, values=mirrored_back(raw.values, 1.0 if key.site == INPUT else across))
                    for key, raw in other.items()
                }
            )
        return averaged(rounds, {method.name: self._rectified(method) for method in self.plan.methods})

    def _round(self, runner: Runner, x: Tensor, scores: Sequence[Score], done: Pass | None) -> dict[Key, Raw]:
        """Every map of these very pictures; `done`: the main pass was about them."""
        if done is not None:
            return self._completed(self.probe, runner, x, scores, done)
        probe = self._new_probe(self._by_layer)

        def objectives(output: Any) -> list[Objective]:
            self._learn(scores, output)
            return list(filter(None, map(objective, scores)))

        with runner.aside([probe], Selection(tuple(sorted(self._layers)))) as aside:
            done = aside.forward(x, objectives if probe.needs.gradients else None)
        if self.plan.smooth is not None:
            self.plan.passes.tell(_SMOOTH, len(x))
        return self._completed(probe, runner, x, scores, done)

    def _completed(
        self, probe: CamProbe, runner: Runner, x: Tensor, scores: Sequence[Score], done: Pass
    ) -> dict[Key, Raw]:
        by_gradient = [method for method in self._by_layer if method.kind is Kind.GRADIENT]
        probe.fill(by_gradient, done.unreached, done.unobservable)
        here = Here(
            runner,
            x,
            done.output,
            [score for score in scores if objective(score) is not None],
            probe.activations,
            self._known(),
            biases(self._model) if any(m.kind is Kind.BIASES for m in self.plan.methods) else {},
        )
        found = dict(probe.maps)
        for method in self.plan.methods:
            found |= further(method, here, self.plan.passes)
        self._fill_in(found, probe, x, scores)
        probe.forget()
        return found

    def _fill_in(self, found: dict[Key, Raw], probe: CamProbe, x: Tensor, scores: Sequence[Score]) -> None:
        """A map for what has none: undefined where no picture has the target, zero where no gradient came."""
        for method, score in product(self.plan.methods, scores):
            if method.class_free:
                continue
            asked = objective(score) is not None
            sites = [INPUT] if method.on_input else list(probe.activations)
            for site in sites:
                grid = x.shape[2:] if method.on_input else probe.activations[site].shape[2:]
                value = 0.0 if asked else float("nan")
                empty = Raw(torch.full((len(x), *grid), value), (asked,) * len(x), asked)
                found.setdefault(Key(site, method.name, score.name), empty)

    def _rectified(self, method: Method) -> bool:
        return method.rectified and self.plan.relu

    def _judged(self, stacks: Mapping[Key, Stack]) -> Iterator[Made]:
        by_name = {method.name: method for method in self.plan.methods}
        names = list(by_name)
        targets = {score.name: score.targets for score in self.scores}
        order = [None, *targets]
        sites = [*self._known(), INPUT]
        place = {site: index for index, site in enumerate(sites)}
        keys = sorted(
            stacks,
            key=lambda key: (order.index(key.objective), place[key.site], names.index(key.method)),
        )
        verdicts = {key: judged(stacks[key], signed=self._signed(key.method)) for key in keys}
        for image in range(len(stacks[keys[0]].kept) if keys else 0):
            singles = [
                self._one(
                    key,
                    image,
                    stacks[key],
                    verdicts[key][image],
                    targets[key.objective][image] if key.objective else None,
                )
                for key in keys
            ]
            yield from self._fused(singles, by_name) if self.plan.fuse is not None else singles

    def _one(self, key: Key, image: int, stack: Stack, verdict: Verdict, target: Target | None) -> Made:
        (low, high, status), kept, before = verdict, stack.kept[image], stack.signed[image]
        if target is not None and target.missing:
            low, high, status, kept = np.nan, np.nan, MapStatus.UNDEFINED, torch.full_like(kept, np.nan)
        signed = self._signed(key.method)
        return Made(
            image, key.site, key.method, kept.numpy(), before.numpy(), low, high, status, target, signed
        )

    def _signed(self, name: str) -> bool:
        """Whether the method's maps are shown with what is below zero, which they may have."""
        return not self.plan.relu and next(m.rectified for m in self.plan.methods if m.name == name)

    def _fused(self, singles: Sequence[Made], methods: Mapping[str, Method]) -> Iterator[Made]:
        """One map for all layers of each method and target."""
        groups: dict[tuple[str, Target | None], list[Made]] = {}
        for made in singles:
            groups.setdefault((made.method, made.target), []).append(made)
        for (name, _), members in groups.items():
            if methods[name].on_input or len(members) < 2:
                yield from members
            else:
                yield one_of_many(self._alive(members), self.plan.fuse or "")

    def _alive(self, members: Sequence[Made]) -> Sequence[Made]:
        """Without layers that the score does not depend on, which is said; all of them where it depends on none."""
        alive = [made for made in members if made.status is not MapStatus.ZERO_GRADIENT]
        for made in members if alive and self._telling else ():
            if made not in alive:
                self.plan.passes.note(f"{made.site}: {made.status}, left out of the fused {made.method}")
        return alive or members
