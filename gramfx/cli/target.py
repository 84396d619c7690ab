"""``package.module:attribute`` or ``file.py:attribute``, with literal arguments, as the thing that it names."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gramfx.errors import GramfxError, InputError


def model_of(target: str) -> Callable[..., Any]:
    """A module, or what a class or a factory makes. Raises :class:`InputError`."""
    found, arguments = _found(target)
    made = found if isinstance(found, nn.Module) and arguments is None else _called(target, found, arguments or {})
    if not callable(made):
        raise InputError("the target makes no model", expected="a module", got=f"{target}: {type(made).__name__}")
    held: Callable[..., Any] = made
    return held


def objective_of(target: str) -> Callable[..., Any]:
    """A function or a module, or what a class makes. Raises :class:`InputError`."""
    found, arguments = _found(target)
    made = _called(target, found, arguments or {}) if arguments is not None or isinstance(found, type) else found
    if not callable(made):
        raise InputError("the objective cannot be called", expected="a function or a module", got=target)
    held: Callable[..., Any] = made
    return held


def _called(target: str, function: Any, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except GramfxError:
        raise
    except Exception as problem:
        raise InputError("the target could not be made", got=f"{target}: {problem}") from problem


def _found(target: str) -> tuple[Any, dict[str, Any] | None]:
    """What a target names, and the arguments that it is to be called with; ``None`` where it has no brackets."""
    place, colon, text = target.partition(":")
    if not place or not colon or not text:
        raise InputError("this is no target", expected="package.module:attribute or file.py:attribute", got=target)
    path, arguments = _parsed(target, text)
    held: Any = _module(target, place)
    for name in path:
        if not hasattr(held, name):
            raise InputError("the target names nothing", expected=f"an attribute of {place}", got=f"{name!r}")
        held = getattr(held, name)
    return held, arguments


def _parsed(target: str, text: str) -> tuple[list[str], dict[str, Any] | None]:
    try:
        expression = ast.parse(text, mode="eval").body
        if not isinstance(expression, ast.Call):
            return _path(expression), None
        if expression.args:
            raise ValueError("arguments need names")
        return _path(expression.func), {str(one.arg): ast.literal_eval(one.value) for one in expression.keywords}
    except (SyntaxError, ValueError) as problem:
        raise InputError(
            "the target cannot be read", expected="name or name(argument=literal, ...)", got=f"{target}: {problem}"
        ) from problem


def _path(expression: ast.expr) -> list[str]:
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        return [*_path(expression.value), expression.attr]
    raise ValueError("only names and dots may come before the brackets")


def _module(target: str, place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _from_file(place)
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    except Exception as problem:
        raise InputError("the target cannot be imported", got=f"{target}: {problem}") from problem


@functools.cache
def _from_file(place: str) -> ModuleType:
    """As Python runs a script: once, its folder first on the path."""
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
