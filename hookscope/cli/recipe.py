"""`hookscope run`: a TOML file to a model, pictures and probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import typer

from hookscope.cli.flags import (
    TABLES,
    LayerFlags,
    add_defaults,
    all_flags,
    as_parameters,
    group_from,
    parameter_names,
)
from hookscope.cli.session import ProbeFlags, Shared
from hookscope.config import Config, read_config
from hookscope.errors import UsageError, near_misses

_ANY_MODEL = "demo"
"""A probe's command wants a model to be parsed; which it is does not matter here."""


@dataclass(frozen=True)
class Recipe:
    """What a configuration describes."""

    model: str
    images: list[str]
    shared: Shared
    probes: dict[str, ProbeFlags]


@dataclass(frozen=True)
class _ProbeInRun:
    """A probe's flags with its own layers: of the command line, its table or the whole file."""

    flags: Any
    layers: LayerFlags

    @property
    def baseline(self) -> str | None:
        return getattr(self.flags, "baseline", None)

    @property
    def data(self) -> str | None:
        return getattr(self.flags, "data", None)

    @property
    def batches(self) -> int | None:
        return getattr(self.flags, "batches", None)

    def task(self, shared: Shared) -> Any:
        return self.flags.task(replace(shared, layers=self.layers))

    def drawing(self) -> Any:
        return self.flags.drawing()


def use_recipe(context: typer.Context, path: str) -> str:
    """Let the file's top-level keys be flag defaults of `run`."""
    if not context.resilient_parsing:
        add_defaults(context, [read_config(path)])
    return path


def read_recipe(
    context: typer.Context,
    path: str,
    shared: Shared,
    kinds: Mapping[str, type],
    *,
    adjustable: bool = True,
) -> Recipe:
    """The recipe of a TOML file; `kinds` are the flag groups of the probes that may have a table.

    `adjustable`: other configurations and the command line have a say in the probes' flags.

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
    typed = _typed(context, shared) if adjustable else None
    probes = {name: _probe(context, config, name, kinds[name], typed) for name in kinds if name in tables}
    return Recipe(model, _images(config), shared, probes)


def _probe(
    context: typer.Context, config: Config, name: str, kind: type, typed: list[str] | None
) -> ProbeFlags:
    """A command's own flags and layers as the file gives them, parsed as the command line would.

    `typed`: what the command line says of them; `None`: nothing but the file counts.
    """
    root = context.find_root()
    command: Any = root.command
    target = command.commands[name]
    _check_table(config, name, {item.name for item in fields(kind)}, parameter_names(target))
    given = as_parameters(target, config.defaults(name, all_flags(context)), config.source)
    # With resilient parsing no other configuration is read.
    how = {"parent": root, "default_map": given, "resilient_parsing": typed is None}
    with target.make_context(name, [_ANY_MODEL, *(typed or ())], **how) as made:
        return _ProbeInRun(group_from(kind, made.params), group_from(LayerFlags, made.params))


def _check_table(config: Config, name: str, own: set[str], names: Mapping[str, str]) -> None:
    """A probe's table may hold its own flags and its layers; what is shared stands above all tables."""
    allowed = [flag for flag, parameter in names.items() if parameter in own | {"layer", "exclude"}]
    # A flag that may be a table is no table of a command; what it holds is looked at with its value.
    given = {key: "" if key in TABLES else value for key, value in config.values[name].items()}
    Config(f"{config.source} [{name}]", given).defaults(name, {name: allowed})


def _typed(context: typer.Context, shared: Shared) -> list[str]:
    """The command line's words that go over what a probe's table says."""
    words = [] if shared.talk.config is None else ["--config", shared.talk.config]
    for name, globs in (("layer", shared.layers.layer), ("exclude", shared.layers.exclude)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            words += [word for glob in globs for word in (f"--{name}", glob)]
    return words


def _images(config: Config) -> list[str]:
    images = config.values.get("images", [])
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UsageError(f"'images' in {config.source} is not a list of paths", 'images = ["photos/"]')
    return images
