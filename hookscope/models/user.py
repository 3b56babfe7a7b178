"""The user's own models: `package.module:callable` and `path/file.py:callable`.

The one place where code that is not ours is imported and called to make a model; whatever it raises becomes
one ModelError.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from hookscope.errors import HookscopeError, ModelError, UsageError, near_misses
from hookscope.models.checkpoint_file import read_state_dict
from hookscope.models.loaded import Request, Source
from hookscope.models.weights import fill, is_file
from hookscope.wording import one_line
from hookscope.wrappers import unwrapped

AS_BUILT = "as the callable made it"

Make = Callable[[Mapping[str, object]], nn.Module]
"""Makes the model, with more arguments than the user gave."""


def is_user_spec(spec: str) -> bool:
    """Whether the word means a Python object: `module:name`, `file.py:name`, or a file without a name."""
    return ":" in spec or spec.endswith(".py")


def load(spec: str, request: Request) -> Source:
    """What the user's callable makes, with a checkpoint's weights where one is given.

    Raises:
        UsageError: no such file, module, name or argument; weights that are no file.
        ModelError: the user's code raises, or makes no module; the checkpoint does not fit.
    """
    with resolved(spec) as found:
        make = _maker(spec, found, request.arguments)
        module, notes = unwrapped(make({}))
        ours = not isinstance(found, nn.Module)
        source = Source(module, spec, AS_BUILT, ours=ours, warnings=notes)
        return _with_weights(source, request, make if _takes_classes(found, request.arguments) else None)


def given(module: nn.Module, request: Request) -> Source:
    """A module that the caller made; a checkpoint's weights go into a copy."""
    if request.arguments:
        raise UsageError(
            "a module that is already made takes no arguments", "shape it before handing it over"
        )
    inner, notes = unwrapped(module)
    source = Source(inner, type(inner).__name__, "as given", ours=False, warnings=notes)
    return _with_weights(source, request)


@contextlib.contextmanager
def resolved(spec: str) -> Iterator[Any]:
    """The object that `module:name` or `file.py:name` names; its imports are found while the context lasts.

    Raises:
        UsageError: no such file, module or name.
        ModelError: the code raises while it is imported.
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"the model {spec!r} names no callable", "write file.py:NAME or package.module:NAME")
    is_path = place.endswith(".py")
    directory = Path(place).expanduser().resolve().parent if is_path else Path.cwd()
    with _importable(directory, forget=is_path):
        module = _imported_file(Path(place).expanduser()) if is_path else _imported(place)
        yield _attribute(module, attribute, place)


def _with_weights(source: Source, request: Request, make: Make | None = None) -> Source:
    """The source with a file's weights where one is given; `make` builds it anew for other classes."""
    if request.weights.lower() in ("default", "none"):
        return source
    if not is_file(request.weights):
        raise UsageError(
            f"{source.name!r} has no weights {request.weights!r}", "give a checkpoint's path, or none"
        )
    path = Path(request.weights).expanduser()
    raw = read_state_dict(path)

    def rebuild(classes: int) -> nn.Module:
        return unwrapped(cast(Make, make)({"num_classes": classes}))[0]

    module = source.module if source.ours else own_copy(source.module)
    filled = fill(module, raw, rebuild if make else None, origin=f"the weights {path.name!r}")
    return replace(
        source,
        module=filled.module,
        weights=path.name,
        ours=True,
        warnings=(*source.warnings, *filled.warnings),
    )


def own_copy(module: nn.Module) -> nn.Module:
    """A copy that may be changed.

    Raises:
        ModelError: the module cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:  # tensors with a graph, locks, open files: a module may hold anything
        raise ModelError(
            f"the {type(module).__name__} must change mode, device, precision or weights, "
            f"but cannot be copied: {one_line(error)}",
            "give a function that makes it, or change it yourself",
        ) from error


def _maker(spec: str, found: Any, arguments: Mapping[str, object]) -> Make:
    if isinstance(found, nn.Module):
        if arguments:
            raise UsageError(
                f"{spec!r} is a module already and takes no arguments", "name a function or a class"
            )
        return lambda _: found
    if not callable(found):
        raise ModelError(f"{spec!r} is a {type(found).__name__}, no module and nothing that makes one")

    def make(more: Mapping[str, object]) -> nn.Module:
        complete = {**arguments, **more}
        _check_arguments(spec, found, complete)
        with _users_code(spec):
            made = found(**complete)
        return _checked(spec, made)

    return make


def _checked(spec: str, made: Any) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    raise ModelError(f"{spec!r} made a {type(made).__name__}, no torch.nn.Module", "return the module alone")


def _check_arguments(spec: str, found: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    signature = _signature(found)
    if signature is None:
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = next((name for name in arguments if name not in known), "")
        hint = (
            near_misses(unknown, known)
            or f"it takes {', '.join(known) or 'no arguments'}: --model-arg name=value"
        )
        raise UsageError(f"{spec!r} cannot be called: {error}", hint) from error


def _takes_classes(found: Any, arguments: Mapping[str, object]) -> bool:
    signature = None if isinstance(found, nn.Module) else _signature(found)
    return signature is not None and "num_classes" in signature.parameters and "num_classes" not in arguments


def _signature(found: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(found)
    except (TypeError, ValueError):
        return None


def _imported_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {str(path)!r}", near_misses(path.name, siblings))
    # A name of its own: two files called model.py must not be one module.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"_hookscope_user_{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"{str(path)!r} cannot be imported", "is it Python source?")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        with _users_code(str(path)):
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imported(place: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        with _users_code(place):
            return importlib.import_module(place)
    except ModelError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError) and cause.name is not None
        if missing and (place == cause.name or place.startswith(f"{cause.name}.")):  # type: ignore[union-attr]
            raise UsageError(
                f"there is no module {place!r}",
                "is it installed? a file is named with its suffix: file.py:NAME",
            ) from error
        raise


def _attribute(module: ModuleType, dotted: str, place: str) -> Any:
    found: Any = module
    for part in dotted.split("."):
        try:
            with _users_code(place):
                found = getattr(found, part)
        except ModelError as error:
            if not isinstance(error.__cause__, AttributeError):
                raise
            known = [name for name in dir(found) if not name.startswith("_")]
            hint = near_misses(part, known) or f"it has {', '.join(known[:8]) or 'nothing'}"
            raise UsageError(f"{place!r} has no {dotted!r}", hint) from error
    return found


@contextlib.contextmanager
def _users_code(where: str) -> Iterator[None]:
    try:
        yield
    except HookscopeError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{where!r} raised {type(error).__name__}: {one_line(error)}", "run it by itself to see where"
        ) from error


@contextlib.contextmanager
def _importable(directory: Path, *, forget: bool) -> Iterator[None]:
    """The directory is on the path for a while; with `forget`, what was imported from it is not kept by name.

    Else the second of two models, each beside a `layers.py` of its own, would get the layers of the first.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(directory))
        for name in set(sys.modules) - before if forget else ():
            file = getattr(sys.modules[name], "__file__", None)
            if file and not name.startswith("_hookscope_user_") and Path(file).is_relative_to(directory):
                del sys.modules[name]
