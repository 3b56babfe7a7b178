"""`hookscope layers`: what can be hooked, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.cli import talk
from hookscope.cli.flags import LayerFlags, ModelFlags, PreprocessFlags, RunFlags, TalkFlags
from hookscope.cli.session import load
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
    from hookscope.layers import all_names, select
    from hookscope.runner import list_layers

    if image is not None and input_size is not None:
        raise UsageError("both a picture and --input-size are given", "give one of them")
    loaded = load(model, weights, preprocess, run.seed)
    patterns: dict[str, Any] = {}
    chosen = set(all_names(loaded.module))
    if layers.layer or layers.exclude:
        selection = select(loaded.module, layers.layer or ("**",), layers.exclude)
        chosen, patterns = set(selection.names), selection.resolved
    x = _input(loaded, image, input_size)
    found = list_layers(loaded.module, None if talking.dry_run else x)
    found = [info for info in found if info.name in chosen]
    for warning in () if talking.quiet else loaded.warnings:
        talk.complain("warning", warning)
    if talking.as_json:
        talk.say_json(_manifest(loaded, found, patterns, model, image, input_size))
    elif not talking.quiet:
        talk.print_table(_COLUMNS, [_cells(info) for info in found])
    return 0


def _input(loaded: LoadedModel, image: str | None, input_size: str | None) -> Tensor:
    import torch

    from hookscope.images import decode

    if image is not None:
        x = loaded.preprocess.tensor(decode(Path(image), image))
    else:
        x = torch.zeros(_parsed_size(input_size, loaded.input_size) if input_size else loaded.input_size)
    layout = torch.channels_last if loaded.channels_last else torch.contiguous_format
    return x[None].to(loaded.device, loaded.dtype, memory_format=layout)


def _parsed_size(text: str, default: tuple[int, int, int]) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--input-size {text!r} is not a size", "HEIGHTxWIDTH or CHANNELSxHEIGHTxWIDTH")
    size = tuple(map(int, parts))
    return size if len(size) == 3 else (default[0], *size)


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
    loaded: LoadedModel,
    found: list[LayerInfo],
    patterns: dict[str, Any],
    model: str,
    image: str | None,
    input_size: str | None,
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
        options={"model": model, "image": image, "input_size": input_size},
        patterns=patterns,
        layers=[record | extra[info.name] for info in found for _, record in layer_records(info)],
        warnings=loaded.warnings,
    )
