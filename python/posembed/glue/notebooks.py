"""Tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts, as HTML."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"
