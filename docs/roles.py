"""Names that docstrings mark, as in :func:`rotary`, become links on the page that has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# A heading of the reference, or a name inside a docstring. mkdocstrings leaves the mark as it is.
HEADING_OR_NAME = re.compile(
    r'<h\d id="(?P<place>posembed[^"]*)"'
    r"|:(?:func|class|meth|mod|attr):<code>(?P<name>[\w.]+)</code>"
)

# A class's list of bases, and a base in it that the page does not describe.
BASES = re.compile(r'<p class="doc doc-class-bases">.*?</p>', re.DOTALL)
INNER_BASE = re.compile(r'<code><span title="posembed\.[^"]*">\w+</span></code>(?:,\s*)?')


def without_inner_bases(html: str) -> str:
    """Lists of bases without classes of posembed that are not public."""

    def shown(found: re.Match[str]) -> str:
        bases = INNER_BASE.sub("", found[0])
        return bases if "<code>" in bases else ""

    return BASES.sub(shown, html)


def meanings(name: str, place: str) -> Iterator[str]:
    """Full names that a name may stand for in the description of ``place``: the nearest first."""
    while place:
        yield f"{place}.{name}"
        place = place.rpartition(".")[0]
    yield f"posembed.functional.{name}"
    yield name


def with_links(html: str) -> str:
    """Links for names that the page describes, and code for others."""
    places = {found["place"] for found in HEADING_OR_NAME.finditer(html)}
    place = ""

    def replacement(found: re.Match[str]) -> str:
        nonlocal place
        name = found["name"]
        if name is None:
            place = found["place"]
            return found[0]
        target = next((full for full in meanings(name, place) if full in places), None)
        code = f"<code>{name}</code>"
        return code if target is None else f'<a class="autorefs" href="#{target}">{code}</a>'

    return HEADING_OR_NAME.sub(replacement, html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Called by mkdocs with every page."""
    return with_links(without_inner_bases(output))
