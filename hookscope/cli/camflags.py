"""The flags of `gradcam`, and the task that they mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookscope.cam import PIXELS
from hookscope.cam.fusing import HOW
from hookscope.cam.methods import METHODS
from hookscope.cli import talk
from hookscope.cli.drawing import Alpha, Cmap, Format, View, drawing_of
from hookscope.errors import UsageError, check_choice

if TYPE_CHECKING:
    from hookscope.cli.session import Shared
    from hookscope.job import Drawing
    from hookscope.tasks import Task

RANGES = ("map", "image", "run")
"""Over what the colours of a map reach: its own values, all maps of the picture, or of the run, by each method."""

_TARGETS = "Targets"
_METHODS = "Methods"
_CHECKS = "Checks"
_EACH_FILE = "each:@"


def _list_methods(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        width = max(map(len, METHODS))
        for method in METHODS.values():
            talk.say(
                f"{method.name:{width}}  {method.summary} ({method.paper}). Needs {method.needs}; "
                f"costs {method.cost}; for: {method.when}."
            )
        raise typer.Exit


@dataclass(frozen=True)
class GradcamFlags:
    """What `gradcam` adds."""

    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            rich_help_panel=_METHODS,
            help=f"Repeatable: {', '.join(METHODS)}.",
        ),
    ] = field(default_factory=lambda: ["gradcam"])
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods",
            is_eager=True,
            callback=_list_methods,
            rich_help_panel=_METHODS,
            help="What each needs, costs and is for.",
        ),
    ] = False
    fuse: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(HOW),
            rich_help_panel=_METHODS,
            help="One map of all layers; refine: their product.",
        ),
    ] = None
    smooth: Annotated[
        str | None,
        typer.Option(
            metavar="noise:N,SD|flip",
            rich_help_panel=_METHODS,
            help="Average over N noisy pictures, or the mirrored.",
        ),
    ] = None
    no_relu: Annotated[
        bool, typer.Option("--no-relu", rich_help_panel=_METHODS, help="Keep what speaks against the class.")
    ] = False
    samples: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_METHODS,
            help="Noisy pictures of smoothgrad, smoothgradcam++.",
        ),
    ] = 16
    noise: Annotated[
        float,
        typer.Option(
            metavar="SD", rich_help_panel=_METHODS, help="Their noise, a share of the range of values."
        ),
    ] = 0.15
    top_channels: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="K", rich_help_panel=_METHODS, help="Of scorecam: the K channels that vary most."
        ),
    ] = None
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="HxW", rich_help_panel=_METHODS, help="Rows and columns of a token layer's patches."
        ),
    ] = None
    target: Annotated[
        list[str],
        typer.Option(
            "--target",
            "-t",
            metavar="top1|top:K|ID|LABEL|dataset|each:A,B|norm",
            rich_help_panel=_TARGETS,
            help="What to explain, repeatable; each: one class a picture, or each:@FILE.",
        ),
    ] = field(default_factory=lambda: ["top1"])
    contrast: Annotated[
        list[str],
        typer.Option(
            metavar="CLASS",
            rich_help_panel=_TARGETS,
            help="What tells the target from CLASS, repeatable (FinerCAM).",
        ),
    ] = field(default_factory=list)
    similar_to: Annotated[
        str | None,
        typer.Option(
            metavar="PICTURE", rich_help_panel=_TARGETS, help="Instead of top1: the likeness to PICTURE."
        ),
    ] = None
    logits: Annotated[
        str | None,
        typer.Option(
            metavar="KEY|INDEX", rich_help_panel=_TARGETS, help="Which tensor of the output has the scores."
        ),
    ] = None
    pixels: Annotated[
        str,
        typer.Option(metavar="|".join(PIXELS), rich_help_panel=_TARGETS, help="Of a segmentation's score."),
    ] = "mask"
    point: Annotated[
        str | None,
        typer.Option(metavar="X,Y", rich_help_panel=_TARGETS, help="A segmentation's score at that pixel."),
    ] = None
    min_score: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="S", rich_help_panel=_TARGETS, help="Of a detector's boxes."),
    ] = 0.5
    score: Annotated[
        bool,
        typer.Option("--score", rich_help_panel=_CHECKS, help="Deletion and insertion AUC, average drop."),
    ] = False
    score_steps: Annotated[
        int,
        typer.Option(min=1, metavar="N", rich_help_panel=_CHECKS, help="Steps of deletion and insertion."),
    ] = 16
    sanity: Annotated[
        bool,
        typer.Option("--sanity", rich_help_panel=_CHECKS, help="Compare with maps of randomised weights."),
    ] = False
    sanity_max: Annotated[
        float | None,
        typer.Option(
            metavar="R", rich_help_panel=_CHECKS, help="Fail (exit 1) when a rank correlation is above R."
        ),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(metavar="DIR", rich_help_panel=_CHECKS, help="Compare with the maps of an earlier run."),
    ] = None
    min_iou: Annotated[
        float | None,
        typer.Option(
            metavar="X", rich_help_panel=_CHECKS, help="Fail below this overlap of the hottest 20 %."
        ),
    ] = None
    min_corr: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=_CHECKS, help="Fail below this rank correlation."),
    ] = None
    sheet: Annotated[
        bool, typer.Option("--sheet", help="Also a contact sheet a picture: layers, methods, targets.")
    ] = False
    vmax: Annotated[
        str,
        typer.Option(
            metavar="|".join(RANGES),
            help="Colours reach over the map, or all maps of the picture or the run.",
        ),
    ] = "map"
    cmap: Cmap = "turbo"
    alpha: Alpha = 0.6
    view: View = "original"
    format: Format = None

    @property
    def data(self) -> None:
        """Pictures are drawn on."""

    @property
    def batches(self) -> None:
        """All of them."""

    def task(self, shared: Shared) -> Task:
        """The task of these flags."""
        from hookscope.cam.geometry import parse_point
        from hookscope.cam.plan import Smooth
        from hookscope.tasks.gradcam import GradcamOptions, GradcamTask

        self._check()
        options = GradcamOptions(
            layer=tuple(shared.layers.layer),
            exclude=tuple(shared.layers.exclude),
            method=tuple(self.method),
            target=tuple(map(_listed, self._targets())),
            contrast=tuple(self.contrast),
            similar_to=self.similar_to,
            logits=self.logits,
            pixels=self.pixels,
            point=None if self.point is None else parse_point(self.point),
            min_score=self.min_score,
            smooth=None if self.smooth is None else Smooth.parse(self.smooth),
            fuse=self.fuse,
            relu=not self.no_relu,
            grid=_grid(self.grid),
            samples=self.samples,
            noise=self.noise,
            top_channels=self.top_channels,
            seed=shared.run.seed,
            range_over_image=self.vmax == "image",
            sheet=self.sheet,
            checks=self._checks(shared),
        )
        return GradcamTask(options)

    def drawing(self) -> Drawing:
        """How the maps are drawn."""
        drawing = drawing_of(self.cmap, self.alpha, self.view, self.format, overlay=True)
        return replace(drawing, range_over_run=self.vmax == "run")

    def _targets(self) -> list[str]:
        """What to explain: the similarity alone where nothing else was asked for."""
        return [] if self.similar_to is not None and self.target == ["top1"] else self.target

    def _checks(self, shared: Shared) -> Any:
        from hookscope.tasks.camchecks import CheckOptions

        return CheckOptions(
            score=self.score,
            score_steps=self.score_steps,
            sanity=self.sanity,
            sanity_max=self.sanity_max,
            baseline=self.baseline,
            min_iou=self.min_iou,
            min_corr=self.min_corr,
            seed=shared.run.seed,
            batch=shared.run.batch_size,
        )

    def _check(self) -> None:
        check_choice("--vmax", self.vmax, RANGES)
        check_choice("--pixels", self.pixels, PIXELS)
        if self.fuse is not None:
            check_choice("--fuse", self.fuse, HOW)
            if self.no_relu:
                raise UsageError(
                    "--fuse takes what is above zero, and --no-relu keeps the rest", "give one of them"
                )
        if not 0 < self.noise < float("inf"):
            raise UsageError(f"--noise {self.noise!r} is no deviation", "a share above 0, such as 0.15")


def _listed(text: str) -> str:
    """The target with the file that it may name read."""
    if not text.strip().startswith(_EACH_FILE):
        return text
    from hookscope.models.labels import read_labels

    return "each:" + "\n".join(read_labels(Path(text.strip().removeprefix(_EACH_FILE)))) + "\n"


def _grid(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from hookscope.cli.session import parsed_size

    height, width = parsed_size("--grid", text, (2,), "HEIGHTxWIDTH, such as 14x14")
    return height, width
