"""`hookscope run`: a TOML file to a model, pictures and probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import typer

from hookscope.cli.flags import LayerFlags, add_defaults, as_parameters, group_from, parameter_names
from hookscope.cli.session import ProbeFlags, Shared
from hookscope.config import Config, read_config
from hookscope.errors import UsageError, near_misses


@dataclass(frozen=True)
class Recipe:
    """What a configuration describes."""

    model: str
    images: list[str]
    shared: Shared
    probes: dict[str, ProbeFlags]


@dataclass(frozen=True)
class _ProbeInRun:
    """A probe's flags with the layers its own table gives, which go before those for the whole run."""

    flags: Any
    layers: LayerFlags

    def task(self, shared: Shared) -> Any:
        return self.flags.task(replace(shared, layers=self.layers))

    def drawing(self) -> Any:
        return self.flags.drawing()


def use_recipe(context: typer.Context, path: str) -> str:
    """Let the file's top-level keys be flag defaults of `run`."""
    if not context.resilient_parsing:
        add_defaults(context, [read_config(path)])
    return path


def read_recipe(context: typer.Context, path: str, shared: Shared, kinds: Mapping[str, type]) -> Recipe:
    """The recipe of a TOML file; `kinds` are the flag groups of the probes that may have a table.

    Raises:
        UsageError: the file names no model, no probe, or a key that is not known.
    """
    config = read_config(path)
    model = config.values.get("model")
    if not isinstance(model, str):
        raise UsageError(f"{path} names no model", 'model = "demo", or a torchvision name')
    tables = {name: table for name, table in config.values.items() if isinstance(table, dict)}
    odd = [name for name in tables if name not in kinds]
    if odd:
        raise UsageError(
            f"unknown table {odd[0]!r} in {path}", near_misses(odd[0], kinds) or f"known: {', '.join(kinds)}"
        )
    if not tables:
        raise UsageError(f"{path} has no table for a probe", f"[{'], ['.join(kinds)}]")
    probes = {
        name: _probe(context, path, name, kinds[name], tables[name], shared)
        for name in kinds
        if name in tables
    }
    return Recipe(model, _images(config), shared, probes)


def _probe(
    context: typer.Context, path: str, name: str, kind: type, table: Mapping[str, Any], shared: Shared
) -> ProbeFlags:
    """A command's own flags as its table gives them, parsed as the command line would."""
    command: Any = context.find_root().command
    target = command.commands[name]
    names = parameter_names(target)
    own = {flag for flag, parameter in names.items() if parameter in {item.name for item in fields(kind)}}
    allowed = own | {"layer", "exclude"}
    defaults = Config(f"{path} [{name}]", table).defaults(name, {name: allowed})
    given = as_parameters(target, defaults)
    with target.make_context(name, [str(table.get("model", "demo"))], default_map=given) as made:
        layers = group_from(LayerFlags, made.params)
        flags: Any = group_from(kind, made.params)
    return _ProbeInRun(flags, layers if {"layer", "exclude"} & set(defaults) else shared.layers)


def _images(config: Config) -> list[str]:
    images = config.values.get("images", [])
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UsageError(f"'images' in {config.source} is not a list of paths", 'images = ["photos/"]')
    return images
