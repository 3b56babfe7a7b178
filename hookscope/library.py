"""The library twins of the commands: a model and a tensor in, plain results out. Nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.activations import stats_of
from hookscope.artifacts import MapStatus, Target
from hookscope.cam import PIXELS
from hookscope.cam.choice import spatial_selection
from hookscope.cam.explain import Explainer
from hookscope.cam.fusing import HOW
from hookscope.cam.here import Passes
from hookscope.cam.methods import method
from hookscope.cam.outputs import embedding_of
from hookscope.cam.plan import Made, Plan, Smooth
from hookscope.cam.questions import Asked, Question
from hookscope.cam.targets import TargetSpec, check_count, parse_targets
from hookscope.errors import NothingMeasured, UsageError, check_choice
from hookscope.gradpasses import gradients_of
from hookscope.gradreport import GradReport
from hookscope.hooks import Needs, Probe
from hookscope.layers import OutputInfo, Selection, Site, all_names, modules_by_name, select
from hookscope.layouts import Layouts, with_grid
from hookscope.losses import loss_function
from hookscope.magnitudes import parse_norm
from hookscope.passes import pictures_in
from hookscope.probes.extract import ExtractProbe, Features
from hookscope.probes.shapes import ShapeProbe
from hookscope.probes.stats import Wanted
from hookscope.runner import Objective, list_layers, running
from hookscope.statsreport import StatsReport
from hookscope.userdata import DataBatch, checked, placed
from hookscope.wrappers import unwrapped


@dataclass(frozen=True)
class CamMap:
    """A class-activation map of one picture.

    `raw`: (h, w) float32, >= 0 unless `relu=False`, at the layer's own resolution and in the score's own scale; not a
    number where the gradient cannot be seen or the picture has no such target (status `undefined`). `target`: the
    class, `None` where it is none. `output`: which tensor of a nested output. `explained`: all that is known of the
    target: its score, and a detection's box; `None` for a method of no class. `minimum`, `maximum`: of the finite
    values; of a `negative-only` map, before its ReLU.
    """

    image: int
    layer: str
    call: int
    method: str
    target: int | None
    raw: Tensor
    status: MapStatus
    output: str = ""
    explained: Target | None = None
    minimum: float = 0.0
    maximum: float = 0.0


class _Keep(Probe):
    needs = Needs(outputs=True)

    def __init__(self) -> None:
        self.kept: dict[Site, Tensor] = {}

    def begin(self, pictures: int) -> None:
        self.kept.clear()

    def on_output(self, site: Site, tensor: Tensor) -> None:
        self.kept[site] = tensor.clone()


def feature_maps(model: nn.Module, x: Tensor, layers: str | Iterable[str]) -> dict[Site, Tensor]:
    """What the chosen layers returned for `x`, every value as it was when the layer returned it.

    Args:
        model: any module; run in eval mode, left as it was found.
        x: a batch, on the model's device.
        layers: globs, as for `hookscope.layers.select`.

    Returns:
        A copy of every tensor by `Site(layer, call, output)`, in the order in which the calls ended, in the
        model's own shape, layout and dtype.

    Raises:
        UsageError: a pattern matches no layer.
        ModelError: the model raised on `x`.
    """
    probe = _Keep()
    with running(model, [probe], layers) as runner:
        runner.forward(x)
    return probe.kept


def gradcam(
    model: nn.Module,
    x: Tensor,
    *,
    layers: str | Iterable[str] = (),
    targets: Sequence[int | str] | Tensor | str | None = None,
    methods: str | Iterable[str] = ("gradcam",),
    contrast: Sequence[int] = (),
    similar_to: Tensor | None = None,
    logits: str | None = None,
    pixels: str = "mask",
    point: tuple[float, float] | None = None,
    min_score: float = 0.5,
    smooth: str | None = None,
    fuse: str | None = None,
    relu: bool = True,
    grid: tuple[int, int] | None = None,
    samples: int = 16,
    noise: float = 0.15,
    top_channels: int | None = None,
    seed: int = 0,
) -> list[CamMap]:
    """Class-activation maps of every picture, target, layer and method, from one forward pass where one will do.

    Methods that need more (`scorecam`, `ablationcam`, noise) make them without a graph, or beside the main pass. The
    model may be a classifier, or return a map of class scores, a list of detections, or an embedding.

    Args:
        model: run in eval mode, left as it was found. Frozen parameters and `no_grad` do not matter.
        x: (N, C, H, W), on the model's device.
        layers: globs; each must match a layer with a spatial output. Not needed for methods of the input alone.
        targets: classes, each explained for every picture; or an (N,) integer tensor, one a picture; or words as
            for `--target`, such as `"top:3"` or `"norm"`; or nothing: each picture's best class.
        methods: names in `hookscope.cam.methods.METHODS`.
        contrast: classes whose mean score, times 0.6, is subtracted (FinerCAM).
        similar_to: (1, C, H, W), a picture: explains the cosine of both embeddings, and nothing else where no
            `targets` are given.
        logits: path of the tensor in a nested output that holds the scores, such as `"logits"` or `"1"`.
        pixels, point: of a segmentation, the class's score over its own `mask`, over `all` pixels, or at the point
            (x, y) in pixels of `x`.
        min_score: of a detection.
        smooth: `"flip"` or `"noise:N,SD"`, the mean of the maps of changed pictures.
        fuse: `mean`, `max` or `refine`: one map of all layers, its `layer` their names joined by `+`.
        relu: keep only what is above zero.
        grid: rows and columns of the patches of token layers.
        samples, noise, seed: noisy pictures of `smoothgrad` and `smoothgradcam++`: how many, their noise as a share
            of the picture's range of values, and its seed.
        top_channels: how many channels `scorecam` tries.

    Returns:
        Maps ordered by picture, then target, layer and method.

    Raises:
        UsageError: a pattern, method or class that cannot be served.
        ModelError: the model raised on `x`.
    """
    model, _ = unwrapped(model)
    layouts = Layouts(modules_by_name(model), tuple(x.shape))
    chosen = tuple(
        method(name) for name in dict.fromkeys((methods,) if isinstance(methods, str) else methods)
    )
    question = Question(
        specs=() if targets is None and similar_to is not None else _target_specs(targets),
        key=logits,
        contrast=_target_specs(list(contrast)) if contrast else (),
        pixels=check_choice("pixels", pixels, PIXELS),
        point=point,
        min_score=min_score,
        like=None if similar_to is None else _reference(model, similar_to, logits),
    )
    plan = Plan(
        methods=chosen,
        question=question,
        smooth=None if smooth is None else Smooth.parse(smooth),
        fuse=None if fuse is None else check_choice("fuse", fuse, HOW),
        relu=relu,
        passes=Passes(samples, noise, top_channels, seed),
    )
    check_count(question.specs, len(x))
    selection = select(model, layers) if plan.needs_layers else Selection(())

    def known() -> Mapping[Site, OutputInfo]:
        return layouts.outputs if grid is None else with_grid(layouts.outputs, grid)

    explainer = Explainer(plan, model, frozenset(selection.names), known)

    def objectives(output: Any) -> list[Objective]:
        if selection.names:
            spatial_selection(selection, known())
        return explainer.ask(output, _asked(x, point))

    # The layouts are learnt in the same pass: one more forward, even of one picture, would cost more than that.
    everything = Selection(tuple(all_names(model)))
    with running(model, [ShapeProbe(layouts), explainer.probe], everything) as runner:
        done = runner.forward(x, objectives if explainer.probe.needs.gradients else None)
        if not explainer.probe.needs.gradients:
            objectives(done.output)
        made = explainer.maps(runner, x, done)
    return [_cam_map(one) for one in made]


def gradnorm(
    model: nn.Module,
    x: Any = None,
    targets: Any = None,
    *,
    batches: Iterable[Any] | None = None,
    layers: str | Iterable[str] = "**",
    loss: str | Callable[[Any, Any], Tensor] = "cross_entropy",
    norm: float | str = 2,
    train_mode: bool = False,
    seed: int = 0,
) -> GradReport:
    """Gradient norms of every parameter, and of the outputs and inputs of the chosen layers.

    Args:
        model: any module; run in eval mode unless told otherwise, left as it was found, `.grad` included.
        x: (N, C, H, W), on the model's device; or what else the model takes: a tuple is its arguments, a dict its
            arguments by name.
        targets: (N,) classes, or what the loss takes; nothing: the model's own predictions.
        batches: instead of `x` and `targets`, any number of (input, target), such as a `DataLoader`. The report is
            of the mean loss over all of them, with the spread of the norms of each alone.
        layers: globs of the layers whose activations' gradients are measured.
        loss: `cross_entropy`, `score`, or `(output, targets) -> scalar`, a mean over the pictures.
        norm: 1, 2 or `"inf"`.
        train_mode: dropout is active and batch norm uses the batch; running statistics are put back.
        seed: of what is random in train mode.

    Raises:
        UsageError: an unknown loss or norm, a batch that is no pair, or an output that the loss cannot be taken of.
        ModelError: the model raised on `x`.
        NothingMeasured: there was not one batch.
    """
    if (x is None) == (batches is None) or (batches is not None and targets is not None):
        raise UsageError("gradnorm takes one batch or many", "x and its targets, or batches=")
    model, _ = unwrapped(model)
    return gradients_of(
        model,
        checked([(x, targets)], "x") if batches is None else checked(batches),
        select(model, layers),
        loss=loss_function(loss),
        norm=parse_norm(norm),
        train_seed=seed if train_mode else None,
    )


def stats(
    model: nn.Module,
    batches: Tensor | Iterable[Any],
    *,
    layers: str | Iterable[str] = "**",
    exclude: str | Iterable[str] = (),
    threshold: float = 0.0,
    histogram: bool = True,
    spectrum: bool = False,
    sample: int = 2048,
    seed: int = 0,
) -> StatsReport:
    """Distributions of all that the chosen layers received and returned, over any number of batches, in one pass.

    Memory does not grow with the number of batches: 350 bytes a channel and place, 7 kB a histogram, with `spectrum`
    4 bytes a pair of channels.

    Args:
        model: any module; run in eval mode, left as it was found.
        batches: (N, C, H, W), or any iterable of such, or of what else the model takes (a dict is its arguments by
            name), or of pairs of these and targets, which are not looked at, such as a `DataLoader`.
        layers: globs.
        exclude: globs of layers to leave out of these.
        threshold: what a unit must be above, once, to be alive.
        histogram: also a histogram and quantiles, of a sample.
        spectrum: also the spectrum of the channels' covariance.
        sample: how many values are drawn of each picture and tensor at most.
        seed: what decides which.

    Raises:
        UsageError: a pattern that matches no layer, or a batch that is none.
        ModelError: the model raised.
        NothingMeasured: there was not one batch.
    """
    model, _ = unwrapped(model)
    source = [batches] if isinstance(batches, Tensor) else batches
    return stats_of(
        model,
        checked(source, paired=False),
        select(model, layers, exclude),
        wanted=Wanted(threshold, histogram, spectrum, seed, sample),
    )


def extract(
    model: nn.Module,
    batches: Tensor | Iterable[Any],
    layers: str | Iterable[str],
    *,
    exclude: str | Iterable[str] = (),
    reduce: str = "none",
    max_size: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[dict[Site, Tensor]]:
    """Features of the chosen layers for each batch: `{site: (N, ...)}`, copies on the CPU.

    The forward pass stops after the last chosen layer. Between two batches the model is as it was found.

    Args:
        model: any module; run in eval mode.
        batches: as of `stats`.
        layers: globs.
        exclude: globs of layers to leave out of these.
        reduce: `none` is the very values; `avg` and `max` over positions, (N, C), of tokens over those of the picture;
            `flatten`: (N, everything); `cls`: the first token.
        max_size: height and width that larger maps are averaged down to (adaptive average pooling).
        dtype: of what is given; `None`: the layer's own.

    Raises:
        UsageError: a pattern that matches no layer, a batch that is none, or an unknown reduction.
        ModelError: the model raised.
        NothingMeasured: no chosen layer has such features, or there was not one batch.
    """
    model, _ = unwrapped(model)
    source = [batches] if isinstance(batches, Tensor) else batches
    selection, features = select(model, layers, exclude), Features(reduce, max_size, dtype)
    return _extracted(model, checked(source, paired=False), selection, features)


def _extracted(
    model: nn.Module, batches: Iterator[DataBatch], selection: Selection, features: Features
) -> Iterator[dict[Site, Tensor]]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    probe: ExtractProbe | None = None
    sites: frozenset[Site] = frozenset()
    for batch in batches:
        x = placed(batch, device).x
        if probe is None:
            outputs = _featured(model, x, selection, features)
            probe, sites = ExtractProbe(outputs, features), frozenset(outputs)
        with running(model, [probe], selection) as runner:
            runner.forward(x, until=sites)
        yield probe.take()


def _featured(model: nn.Module, x: Any, selection: Selection, features: Features) -> dict[Site, OutputInfo]:
    """The chosen sites that have features."""
    chosen, pictures = set(selection.names), pictures_in(x)
    found = [info for layer in list_layers(model, x) if layer.name in chosen for info in layer.outputs]
    fit = [info for info in found if info.shape[:1] == (pictures,) and not features.missing(info)]
    if not fit:
        why = next((f": {info.site}: {said}" for info in found if (said := features.missing(info))), "")
        raise NothingMeasured(f"no chosen layer has such features{why}", "other layers, or another reduce")
    return {info.site: info for info in fit}


def _cam_map(made: Made) -> CamMap:
    return CamMap(
        image=made.image,
        layer=made.site.layer,
        call=made.site.call,
        method=made.method,
        target=made.target.index if made.target is not None else None,
        raw=torch.from_numpy(made.values),
        status=made.status,
        output=made.site.output,
        explained=made.target,
        minimum=made.minimum,
        maximum=made.maximum,
    )


def _asked(x: Tensor, point: tuple[float, float] | None) -> Asked:
    height, width = x.shape[2], x.shape[3]
    points: Sequence[tuple[float, float] | None] = ()
    if point is not None:
        inside = 0 <= point[0] < width and 0 <= point[1] < height
        points = [((point[0] + 0.5) / width, (point[1] + 0.5) / height) if inside else None] * len(x)
    return Asked(size=(height, width), positions=range(len(x)), points=points)


def _reference(model: nn.Module, picture: Tensor, key: str | None) -> tuple[Tensor, str]:
    if picture.dim() != 4 or len(picture) != 1:
        raise UsageError(f"similar_to of shape {tuple(picture.shape)} is not one picture", "(1, C, H, W)")
    with running(model, [], Selection(())) as runner:
        return embedding_of(runner.outputs(picture), key)[0], "similar_to"


def _target_specs(targets: Sequence[int | str] | Tensor | str | None) -> tuple[TargetSpec, ...]:
    if targets is None:
        return (TargetSpec("top1", rank=1),)
    if isinstance(targets, str):
        return parse_targets([targets], None)
    if isinstance(targets, Tensor):
        if targets.dim() != 1 or targets.is_floating_point():
            what = f"{tuple(targets.shape)} {targets.dtype}"
            raise UsageError(
                f"targets of shape and type {what}", "an (N,) integer tensor, or a list of classes"
            )
        return (TargetSpec("target", per_picture=tuple(targets.tolist())),)
    words = [str(target) for target in targets]
    return parse_targets(words, None)
