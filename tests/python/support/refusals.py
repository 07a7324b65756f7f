"""One runner for tests of messages, which may say the same facts in a better sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Words in quotes, lists, whatever has a digit in it, and what came.
FACT = re.compile(r"'[^']*'|\[[^\]]*\]|-?\w*\d[\w.+-]*(?<!\.)|(?<=\bgot )[\w.]+")
NAME = re.compile(r"([\w, ]+|\w[\w.]*): ")


def facts(text: str) -> list[str]:
    """The argument's name with a colon and the facts of a text; the text, if it has none."""
    name = NAME.match(text)
    rest = text[name.end() :] if name else text
    found = [part for fact in FACT.findall(rest) for part in fact.split(".*")]
    return ([name[0].strip()] if name else []) + [x for x in found if x] or text.split(".*")


def lacking(message: str, text: str) -> list[str]:
    """The facts of a text that a message lacks."""
    return [
        fact
        for fact in facts(text)
        if not re.search(rf"(?<![\w.-]){re.escape(fact)}(?!\w)", message)
    ]


def refused(
    *rows: tuple[Callable[..., Any], type[Exception], str], given: Iterable[Any] = ()
) -> None:
    """Makes each call, which must raise the error with the facts of the text; ".*" is any text.

    Args:
        rows: A call, the error and the text.
        given: The arguments of the calls.
    """
    given = tuple(given)
    for call, error, text in rows:
        with pytest.raises(error) as caught:
            call(*given)
            pytest.fail(f"nothing was raised, expected: {text}")
        missing = lacking(str(caught.value), text)
        assert not missing, f"{missing} of {text!r} not in {caught.value}"
