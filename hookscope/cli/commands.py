"""The commands. Each is a few lines: its flags, and what they are handed to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hookscope.cli import talk
from hookscope.cli.camflags import GradcamFlags
from hookscope.cli.extractflags import ExtractFlags
from hookscope.cli.flags import (
    Images,
    LayerFlags,
    Model,
    ModelFlags,
    OutputFlags,
    PictureFlags,
    PreprocessFlags,
    RunFlags,
    TalkFlags,
)
from hookscope.cli.gradflags import GradnormFlags
from hookscope.cli.probes import FeatureMapsFlags
from hookscope.cli.recipe import read_recipe, use_recipe
from hookscope.cli.session import Shared, inspect
from hookscope.cli.statsflags import StatsFlags

DEMO_RECIPE = Path(__file__).parent.parent / "assets" / "demo.toml"

_PROBES: dict[str, type] = {
    "featuremaps": FeatureMapsFlags,
    "gradcam": GradcamFlags,
    "gradnorm": GradnormFlags,
    "stats": StatsFlags,
    "extract": ExtractFlags,
}


def layers(
    model: Model,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    run: RunFlags,
    talking: TalkFlags,
    image: Annotated[
        str | None, typer.Argument(metavar="IMAGE", help="A picture.", show_default=False)
    ] = None,
    input_size: Annotated[
        str | None, typer.Option(metavar="HxW|CxHxW", help="Run on zeros of this size instead of a picture.")
    ] = None,
) -> int:
    """List what can be hooked: name, type, calls, output shape, layout, parameters."""
    from hookscope.cli.listing import list_command

    return list_command(model, image, input_size, layers, weights, preprocess, run, talking)


def featuremaps(
    model: Model,
    own: FeatureMapsFlags,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
    images: Images = None,
) -> int:
    """Write a grid of channels for every chosen layer (default: type:Conv2d)."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    return inspect("featuremaps", model, images, shared, {"featuremaps": own})


def gradcam(
    model: Model,
    own: GradcamFlags,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
    images: Images = None,
) -> int:
    """Write class-activation maps (default layer: the last that the score depends on)."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    return inspect("gradcam", model, images, shared, {"gradcam": own})


def gradnorm(
    model: Model,
    own: GradnormFlags,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
    images: Images = None,
) -> int:
    """Write gradient norms by parameter and layer; fail on what the rules find."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    return inspect("gradnorm", model, images, shared, {"gradnorm": own})


def stats(
    model: Model,
    own: StatsFlags,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
    images: Images = None,
) -> int:
    """Write what passes through every layer: distributions, dead units; fail on what the rules find."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    return inspect("stats", model, images, shared, {"stats": own})


def extract(
    model: Model,
    own: ExtractFlags,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
    images: Images = None,
) -> int:
    """Write features of the chosen layers for every picture, in shards with an index."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    return inspect("extract", model, images, shared, {"extract": own})


def run(
    context: typer.Context,
    config_file: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.toml",
            help="Model, images, and a table for each probe.",
            is_eager=True,
            callback=use_recipe,
        ),
    ],
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    pictures: PictureFlags,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
) -> int:
    """Several probes from one forward pass, as a TOML file describes them."""
    shared = Shared(layers, weights, preprocess, pictures, run, output, talking)
    recipe = read_recipe(context, config_file, shared, _PROBES)
    return inspect("run", recipe.model, recipe.images, recipe.shared, recipe.probes)


def demo(
    context: typer.Context,
    run: RunFlags,
    output: OutputFlags,
    talking: TalkFlags,
) -> int:
    """Feature maps, Grad-CAM and gradient norms of the bundled model on the bundled cat."""
    shared = Shared(
        LayerFlags(), ModelFlags(), PreprocessFlags(), PictureFlags(limit=1), run, output, talking
    )
    recipe = read_recipe(context, str(DEMO_RECIPE), shared, _PROBES, adjustable=False)
    return inspect("demo", recipe.model, recipe.images, shared, recipe.probes)


def models(
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Only names that match.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,
) -> int:
    """List the names that MODEL may be."""
    from hookscope.models import list_models

    names = list_models(pattern)
    if as_json:
        talk.say_json(names)
    else:
        for name in names:
            talk.say(name)
    return 0


COMMANDS = (layers, featuremaps, gradcam, gradnorm, stats, extract, run, demo, models)
