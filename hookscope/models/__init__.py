"""Models: from what the user typed to a module that is ready to be looked into.

Resolved on first use, so that importing the package loads no torch. It never prints and never registers a
hook.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookscope.models.arguments import parse_model_arg as parse_model_arg
    from hookscope.models.device import resolve_device as resolve_device
    from hookscope.models.load import list_models as list_models
    from hookscope.models.load import load_model as load_model
    from hookscope.models.loaded import LoadedModel as LoadedModel
    from hookscope.models.preprocess import Preprocess as Preprocess

_HOMES = {
    "LoadedModel": "loaded",
    "Preprocess": "preprocess",
    "list_models": "load",
    "load_model": "load",
    "parse_model_arg": "arguments",
    "resolve_device": "device",
}

__all__ = ["LoadedModel", "Preprocess", "list_models", "load_model", "parse_model_arg", "resolve_device"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
