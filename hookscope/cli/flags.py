"""Flags as dataclasses: declared once, shared by every command that takes the group.

A command's parameter that is annotated with a flag group becomes one flag for each of its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from hookscope.config import Config, project_config, read_config
from hookscope.errors import UsageError

Group = TypeVar("Group")

RECIPE_KEYS = ("model", "images")
"""Keys of a configuration that are arguments elsewhere."""

TABLES = ("severity", "limits")
"""Flags that a configuration writes as tables."""

_MODEL = "Model"
_PICTURES = "Pictures"
_RUN = "Run"
_OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision name, demo, package.module:callable, file.py:callable, timm/NAME or FILE.pt2.",
        show_default=False,
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Argument(metavar="IMAGE", help="Files, directories, quoted globs.", show_default=False),
]


@dataclass(frozen=True)
class LayerFlags:
    """Which layers."""

    layer: Annotated[
        list[str],
        typer.Option("--layer", "-l", metavar="GLOB", help="Layers by name, or type:GLOB by class."),
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str], typer.Option("--exclude", "-x", metavar="GLOB", help="Layers to leave out.")
    ] = field(default_factory=list)


@dataclass(frozen=True)
class ModelFlags:
    """How the model is loaded."""

    weights: Annotated[
        str,
        typer.Option(metavar="default|none|NAME|PATH", help="Weights to load.", rich_help_panel=_MODEL),
    ] = "default"
    model_arg: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="Argument of the model's callable.", rich_help_panel=_MODEL),
    ] = field(default_factory=list)
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda|mps", rich_help_panel=_MODEL, help="Where to run.")
    ] = "auto"
    precision: Annotated[
        str,
        typer.Option(
            metavar="fp32|bf16|fp16", rich_help_panel=_MODEL, help="Type of weights and activations."
        ),
    ] = "fp32"
    labels: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=_MODEL, help="Class names, one a line or JSON."),
    ] = None


@dataclass(frozen=True)
class PreprocessFlags:
    """How a picture becomes the model's input."""

    resize: Annotated[
        str | None,
        typer.Option(metavar="N|HxW", rich_help_panel=_PICTURES, help="Resize: shorter side, or both."),
    ] = None
    crop: Annotated[
        str | None, typer.Option(metavar="N|HxW", rich_help_panel=_PICTURES, help="Centre crop.")
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(metavar="X,X,X", rich_help_panel=_PICTURES, help="Mean of each channel, of 0..1."),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(metavar="X,X,X", rich_help_panel=_PICTURES, help="Deviation of each channel."),
    ] = None


@dataclass(frozen=True)
class PictureFlags:
    """Which pictures."""

    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_PICTURES, help="At most N pictures.")
    ] = None
    dataset: Annotated[
        str | None,
        typer.Option(metavar="DIR", rich_help_panel=_PICTURES, help="Pictures in a folder for each class."),
    ] = None


@dataclass(frozen=True)
class RunFlags:
    """How the run goes."""

    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_RUN, help="Pictures at a time.")
    ] = 8
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", rich_help_panel=_RUN, help="Decoding threads; as many as processors up to 4."
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, metavar="N", rich_help_panel=_RUN, help="Seed of all that is random."
        ),
    ] = 0


@dataclass(frozen=True)
class OutputFlags:
    """Where results go."""

    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="DIR", rich_help_panel=_OUTPUT, help="Default: hookscope-out/COMMAND."
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=_OUTPUT, help="Replace an earlier run in DIR.")
    ] = False
    tensorboard: Annotated[
        str | None,
        typer.Option(metavar="DIR", rich_help_panel=_OUTPUT, help="The same for TensorBoard, added to DIR."),
    ] = None


def _use_config(context: typer.Context, path: str | None) -> str | None:
    if not context.resilient_parsing:
        project = project_config(Path.cwd())
        add_defaults(context, [project] if project else [], below=True)
        add_defaults(context, [read_config(path)] if path is not None else [])
    return path


@dataclass(frozen=True)
class TalkFlags:
    """How much is said."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.toml",
            is_eager=True,
            callback=_use_config,
            rich_help_panel=_RUN,
            help="Flags in TOML.",
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="The manifest on stdout, nothing else.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=_RUN, help="Resolve everything, run nothing.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=_OUTPUT, help="Errors only.")] = (
        False
    )
    verbose: Annotated[bool, typer.Option("--verbose", "-v", rich_help_panel=_OUTPUT, help="Every file.")] = (
        False
    )
    debug: Annotated[bool, typer.Option("--debug", rich_help_panel=_RUN, help="Tracebacks.")] = False


def with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with every parameter that is a flag group replaced by the group's flags."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind  # type: ignore[assignment]
            parameters += _parameters_of(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> Any:
        built: dict[str, Any] = {name: group_from(kind, values) for name, kind in groups.items()}
        flags = {item.name for kind in groups.values() for item in fields(kind)}
        return function(**built, **{name: value for name, value in values.items() if name not in flags})

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def group_from(kind: type[Group], values: Mapping[str, Any]) -> Group:
    """The group filled from parsed values."""
    return kind(**{item.name: values[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def parameter_names(command: Any) -> dict[str, str]:
    """Long flag, without dashes, to parameter name."""
    flags = ((option, parameter.name) for parameter in command.params for option in parameter.opts)
    return {option.removeprefix("--"): name for option, name in flags if option.startswith("--")}


def all_flags(context: typer.Context) -> dict[str, set[str]]:
    """The flags of every command by its name."""
    root = context.find_root().command
    commands = getattr(root, "commands", {})
    never = {"config", "help", "debug"}  # the last has to be known before any file is read
    flags = {name: set(parameter_names(command)) - never for name, command in commands.items()}
    flags.setdefault("run", set()).update(RECIPE_KEYS)
    return flags


def add_defaults(context: typer.Context, configs: Iterable[Config], *, below: bool = False) -> None:
    """Let configurations give the command's defaults, over those given so far or (`below`) under them.

    Raises:
        UsageError: a key that no command has.
    """
    for config in configs:
        given = config.defaults(context.command.name or "", all_flags(context))
        new = as_parameters(context.command, given, config.source)
        old = dict(context.default_map or {})
        context.default_map = new | old if below else old | new


def as_parameters(command: Any, given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """TOML values under the parameters' names, as the command line would have them.

    Raises:
        UsageError: a value is of a kind that no command line can say.
    """
    names = parameter_names(command)
    options = {parameter.name: parameter for parameter in command.params}
    found: dict[str, Any] = {}
    for flag, value in given.items():
        if flag in names:
            option = options[names[flag]]
            if flag in TABLES and isinstance(value, dict):
                value = flattened(value, f"{flag!r} in {source}")
            _check_kind(flag, value, source, is_switch=option.is_flag)
            found[option.name] = _as_flag(value, multiple=option.multiple)
    return found


def flattened(table: Mapping[str, Any], what: str) -> list[str]:
    """`{name: value, glob: {name: value}}` as the flag's words: `name=value`, `glob:name=value`.

    Raises:
        UsageError: a value is of a kind that no command line can say.
    """
    words = []
    for key, value in table.items():
        rows = (
            {f"{key}:{name}": inner for name, inner in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        for name, inner in rows.items():
            if isinstance(inner, bool) or not isinstance(inner, str | int | float):
                raise UsageError(f"{name!r} of {what} is {inner!r}", "text or a number")
            words.append(f"{name}={inner}")
    return words


def _check_kind(flag: str, value: Any, source: str, *, is_switch: bool) -> None:
    # typer would take true for 1, and "no" or 3 for a switch.
    parts = value if isinstance(value, list) and not is_switch else [value]
    plain = [isinstance(part, str | int | float) and not isinstance(part, bool) for part in parts]
    if not (isinstance(value, bool) if is_switch else all(plain)):
        hint = "true or false" if is_switch else "text, a number, or a list of them"
        raise UsageError(f"{flag!r} in {source} is {value!r}", hint)


def _as_flag(value: Any, *, multiple: bool) -> Any:
    if multiple:
        return list(map(str, value)) if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value


def _parameters_of(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=_default(item), annotation=hints[item.name]
        )
        for item in fields(kind)
    ]


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    if item.default is MISSING:
        raise UsageError(f"flag {item.name} has no default")
    return item.default
