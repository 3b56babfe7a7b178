"""Tensors inside nested values: what modules take and return, by path."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every dense tensor in a nested value with its path: `""`, `"0"`, `"out"`, `"1.boxes"`, ..."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, f"{path}.{key}" if path else str(key))


def rebuilt(value: Any, replaced: Mapping[str, Tensor], path: str = "") -> Any:
    """The same nested value with the tensors at the given paths replaced."""
    if isinstance(value, Tensor):
        return replaced.get(path, value)
    items = _items(value)
    if not items:
        return value
    new = {key: rebuilt(item, replaced, f"{path}.{key}" if path else str(key)) for key, item in items}
    if isinstance(value, Mapping):
        return _filled_mapping(value, new)
    if isinstance(value, tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
    return type(value)(new.values()) if isinstance(value, list) else replace(value, **new)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(item.name, getattr(value, item.name)) for item in fields(value) if item.init]
    return []


def _filled_mapping(value: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    filled: Any = copy.copy(value)
    for key, item in new.items():
        filled[key] = item
    return filled
