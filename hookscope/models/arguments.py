"""`--model-arg key=value`: from text to Python values. Reads no file and loads no torch."""

from __future__ import annotations

import tomllib
from typing import Any

from hookscope.errors import UsageError

_BOOLEANS = {"true": True, "false": False}


def parse_model_arg(text: str) -> tuple[str, object]:
    """`key=value` as a name and a value: an integer, float, boolean, quoted string or list, else plain text.

    Examples: `num_classes=10`, `dropout=0.5`, `aux_logits=false`, `widths=[8, 16]`, `name="7"`, `act=relu`.

    Raises:
        UsageError: there is no `=`, or no Python name before it.
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key.isidentifier():
        raise UsageError(f"a model argument is {text!r}", "write --model-arg name=value")
    return key, _literal(value)


def _literal(value: str) -> object:
    if value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    # A line break or a comment would let TOML see more, or less, than one value.
    if "\n" in value or ("#" in value and value[:1] not in "\"'["):
        return value
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
    return parsed if isinstance(parsed, int | float | str | list) else value
