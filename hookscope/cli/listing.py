"""`hookscope layers`: what can be hooked, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.cli import talk
from hookscope.cli.collecting import uncollected
from hookscope.cli.flags import LayerFlags, ModelFlags, PreprocessFlags, RunFlags, TalkFlags
from hookscope.cli.session import load, parsed_size, resolved_options
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.layers import LayerInfo
    from hookscope.models import LoadedModel

_COLUMNS = (
    ("layer", "left"), ("type", "left"), ("calls", "right"), ("output", "left"), ("layout", "left"),
    ("parameters", "right"), ("status", "left"),
)  # fmt: skip


def list_command(
    model: str,
    image: str | None,
    input_size: str | None,
    layers: LayerFlags,
    weights: ModelFlags,
    preprocess: PreprocessFlags,
    run: RunFlags,
    talking: TalkFlags,
) -> int:
    """List the layers and return the exit code."""
    if image is not None and input_size is not None:
        raise UsageError("both a picture and --input-size are given", "give one of them")
    with talk.only_results_on_stdout(), talk.ProgressBar(quiet=talking.quiet) as bar:
        with uncollected():
            from hookscope.runner import list_layers

            loaded = load(model, weights, preprocess, run.seed, bar)
        names, patterns = _chosen(loaded, layers)
        x = _input(loaded, image, input_size)
        found = list_layers(loaded.module, None if talking.dry_run else x)
    found = [info for info in found if info.name in names]
    for warning in () if talking.quiet else loaded.warnings:
        talk.complain("warning", warning)
    if talking.as_json:
        asked = {"model": model, "image": image, "input_size": input_size}
        options = resolved_options(layers, weights, preprocess, run) | asked
        talk.say_json(_manifest(loaded, found, patterns, options))
    elif not talking.quiet:
        talk.print_table(_COLUMNS, [_cells(info) for info in found])
    return 0


def _chosen(loaded: LoadedModel, flags: LayerFlags) -> tuple[set[str], dict[str, Any]]:
    """Names of the layers to list, and what each pattern resolved to."""
    from hookscope.layers import all_names, select

    if not flags.layer and not flags.exclude:
        return set(all_names(loaded.module)), {}
    selection = select(loaded.module, flags.layer or ("**",), flags.exclude)
    return set(selection.names), dict(selection.resolved)


def _input(loaded: LoadedModel, image: str | None, input_size: str | None) -> Tensor:
    import torch

    from hookscope.images import decode

    if image is not None:
        return loaded.batch([loaded.preprocess.tensor(decode(Path(image), image))])
    size: tuple[int, ...] = loaded.input_size
    if input_size is not None:
        hint = "HEIGHTxWIDTH or CHANNELSxHEIGHTxWIDTH"
        size = (size[0], *parsed_size("--input-size", input_size, (2, 3), hint))[-3:]
    try:
        return loaded.batch([torch.zeros(size)])
    except (RuntimeError, MemoryError):
        raise UsageError(
            f"an input of {'x'.join(map(str, size))} does not fit in memory", "a smaller --input-size"
        ) from None


def _cells(info: LayerInfo) -> tuple[str, ...]:
    name = info.name + (f" (also {', '.join(info.aliases)})" if info.aliases else "")
    calls = "" if info.calls is None else str(info.calls)
    status = "" if info.status in (None, "ok") else str(info.status)
    outputs = {output.site.output: output for output in info.outputs}
    shapes = ", ".join(
        (f"{path}: " if path else "") + "x".join(map(str, out.shape)) for path, out in outputs.items()
    )
    return (name, info.type, calls, shapes, info.layout, f"{info.parameters:,}", status)


def _manifest(
    loaded: LoadedModel, found: list[LayerInfo], patterns: dict[str, Any], options: dict[str, Any]
) -> Any:
    from hookscope.output.manifest import Manifest
    from hookscope.records import layer_records, model_record, versions

    extra = {
        info.name: {"calls": info.calls, "parameters": info.parameters, "aliases": info.aliases}
        for info in found
    }
    return Manifest(
        command="layers",
        versions=versions(),
        model=model_record(loaded),
        options=options,
        patterns=patterns,
        layers=[record | extra[info.name] for info in found for _, record in layer_records(info)],
        warnings=loaded.warnings,
    )
