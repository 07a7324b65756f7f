"""Answers a call that uses other libraries' names: other_names.json knows them.

Nothing here runs for a call that is right: Python has refused the arguments before.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from posembed.glue.validation import shown

_PUBLIC = ("posembed.functional", "posembed.modules")  # where functions and methods stand


@functools.cache
def tables() -> dict[str, dict[str, list[str]]]:
    """Other libraries' names by posembed's: of what it exports, of scalings, of arguments."""
    path = Path(__file__).with_name("other_names.json")
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def ours(table: str, name: str, known: Iterable[str] | None = None) -> str | None:
    """Posembed's name for another library's; the first of ``known`` if that is given."""
    others = tables()[table]
    found = (own for own in (others if known is None else known) if name in others.get(own, ()))
    return next(found, None)


def no_option(owner: str, kind: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a name that ``owner`` does not have, with what was meant."""
    names = [*known]
    meant = ours("arguments", name, names)
    reason = None if meant is not None else ours("absent", name)
    if meant is None and reason is None:
        meant = next(iter(difflib.get_close_matches(name, names, 1)), None)
    says = f"; did you mean {meant}?" if meant else f": {reason}." if reason else "."
    return TypeError(f"{owner}: no {kind} {name!r}{says} It has {', '.join(names)}")


def check_options(owner: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for an option that ``owner`` does not have."""
    names = [*known]
    for name in options:
        if name not in names:
            raise no_option(owner, "option", name, names)


def refused(
    owner: str, kind: str, method: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> TypeError | None:
    """The error for arguments that ``method`` cannot take; None if it can. Self is not in them."""
    named, placed = _parameters(method)
    if named is not None:
        known = [name for name in named if not name.startswith("_")]
        for name in kwargs:
            if name not in named:
                return no_option(owner, kind, name, known)
    if placed is None or len(args) <= len(placed):
        return None
    more = ", ".join(map(_brief, args[len(placed) :]))
    hint = ours("positional", owner)
    after = f" after {'it' if len(placed) == 1 else 'them'}" if placed else ""
    alone = f"{', '.join(placed)} alone" if placed else "nothing"
    hint = f"; {hint}" if hint else ""
    return TypeError(f"{owner}: expected {alone} by position, got {more}{after}{hint}")


def _parameters(method: Callable[..., Any]) -> tuple[list[str] | None, list[str] | None]:
    """Names of a method's arguments, and of those that have a place; None if any are taken."""
    plain: Any = inspect.unwrap(method)
    every = [*inspect.signature(plain).parameters.values()]
    every = every[every[0].name in ("self", "cls") :] if every else every
    of_any_number = any(each.kind is each.VAR_POSITIONAL for each in every)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [each.name for each in every if each.kind in kinds]
    named = [each.name for each in every if each.kind in (kinds[1], each.KEYWORD_ONLY)]
    for each in every:
        if each.kind is each.VAR_KEYWORD:
            fields = _fields(each.annotation, plain)
            if fields is None:
                return None, None if of_any_number else placed
            named += fields
    return named, None if of_any_number else placed


def _fields(annotation: Any, method: Any) -> list[str] | None:
    """The names in ``**options: Unpack[Options]``; None for Any and what is not known here."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, method.__globals__)
        except Exception:  # a user's text, such as a name that only type checkers import
            return None
    fields = getattr(next(iter(typing.get_args(annotation)), None), "__annotations__", None)
    return None if fields is None else [*fields]


def _brief(value: Any) -> str:
    """A value in a message: a tensor's type and shape, the text of anything else."""
    shape = getattr(value, "shape", None)
    return shown(value) if shape is None else f"a {type(value).__name__} {list(shape)}"


def unexpected(unknown: Mapping[str, Any]) -> TypeError:
    """The error of the public function or method that passed unknown arguments on."""
    frame: Any = sys._getframe(1)
    while frame.f_back.f_globals.get("__name__", "").startswith(_PUBLIC):
        frame = frame.f_back
    name, this = frame.f_code.co_name, frame.f_locals.get("self")
    function = frame.f_globals[name] if this is None else getattr(type(this), name)
    owner = name if this is None else f"{type(this).__name__}.{name}"
    explained = refused(owner, "argument", function, (), unknown)
    return explained or TypeError(f"{owner}: no argument {next(iter(unknown))!r}")


def answered(cls: type) -> None:
    """Makes the TypeError of constructors and class methods for a wrong name say the right one."""
    for name, method in [*vars(cls).items()]:
        if name == "__init__":
            cls.__init__ = _answered(method, cls.__name__, "option")  # type: ignore[misc]
        elif isinstance(method, classmethod) and inspect.getfullargspec(method.__func__).varkw:
            found = _answered(method.__func__, f"{cls.__name__}.{name}", "argument")
            setattr(cls, name, classmethod(found))


def _answered(function: Callable[..., Any], owner: str, kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(this: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(this, *args, **kwargs)
        except TypeError:
            explained = refused(owner, kind, function, args, kwargs)
            if explained is None:
                raise
            raise explained from None

    return call
