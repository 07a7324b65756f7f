"""One runner for tests of messages, which may say the same facts in a better sentence."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Words in quotes, lists, numbers, identifiers, and what came.
FACT = re.compile(r"'[^']*'|\[[^\]]*\]|[\w-]*\d[\w.+-]*(?<!\.)|\w+[._]\w[\w.]*(?<!\.)|\w+\.{3}|(?<=\bgot )\w+")
NAME = re.compile(r"([\w, ]+|\w[\w.]*): ")


def patterns(text: str) -> list[str]:
    """The argument's name and the facts of a text; the text itself, if it has none.

    The last one may be the beginning of a longer fact.
    """
    text = text.replace("\\", "")
    name = NAME.match(text)
    parts = (text[name.end() :] if name else text).split(".*")
    found = [re.escape(name[0].strip())] if name else []
    for part in parts:
        for fact in FACT.finditer(part):
            word = re.escape(fact[0])
            whole = re.match(r"[\w-]", fact[0]) and "..." not in fact[0]
            before = r"(?<![\w.-])" if whole else ""
            found.append(before + word + ("" if text.endswith(fact[0]) else r"(?!\w)"))
    return found or [re.escape(part) for part in parts]


def missing(message: str, text: str) -> list[str]:
    """What a message lacks of the name and facts of a text."""
    return [pattern for pattern in patterns(text) if not re.search(pattern, message)]


def refused(*rows: tuple[Callable[..., Any], type[Exception], str], given: Iterable[Any] = ()) -> None:
    """Makes each call, which must raise the error with the facts of the text; ".*" is any text.

    Args:
        rows: A call, the error and the text.
        given: The arguments of the calls.
    """
    given = tuple(given)
    for call, error, text in rows:
        with pytest.raises(error) as caught:
            call(*given)
        lacks = missing(str(caught.value), text)
        assert not lacks, f"{lacks} of {text!r} not in {caught.value}"
