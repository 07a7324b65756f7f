"""The Python reference as Markdown: signatures and docstrings, read by griffe without an import."""

from __future__ import annotations

import functools
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PYTHON = Path(__file__).parents[1] / "python"
WIDTH = 80
ROLE = re.compile(r":(?:func|class|meth|mod|attr):`([\w.]+)`")
PARSING: dict[str, Any] = {"warn_unknown_params": False, "warn_missing_types": False}


@functools.cache
def package(name: str) -> Any:
    """A package, parsed."""
    logging.getLogger("griffe").setLevel(logging.ERROR)
    return griffe.load(name, search_paths=[str(PYTHON)], docstring_parser="google")


def find(name: str) -> Any:
    """What a public name such as posembed.functional.rotary stands for."""
    root, _, inside = name.partition(".")
    found = package(root)[inside]
    return found.final_target if found.is_alias else found


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def arguments(function: Any, method: bool) -> list[str]:
    """The parameters of a signature, with marks for what is passed by position or by name only."""
    kinds = griffe.ParameterKind
    parts: list[str] = []
    starred = False
    public = [each for each in function.parameters if not each.name.startswith("_")]
    parameters = public[1 if method else 0 :]
    for place, parameter in enumerate(parameters):
        kind = parameter.kind
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(kind, "")
        if kind is kinds.keyword_only and not starred:
            parts.append("*")
        starred = starred or kind in (kinds.keyword_only, kinds.var_positional)
        text = stars + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}" if ": " in text else f"={parameter.default}"
        parts.append(text)
        following = parameters[place + 1].kind if place + 1 < len(parameters) else None
        if kind is kinds.positional_only and following is not kinds.positional_only:
            parts.append("/")
    return parts


def call(name: str, parts: list[str], returned: Any = None) -> str:
    """A signature on one line, or with a line for each parameter."""
    arrow = "" if returned is None else f" -> {returned}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])


def signature(owner: Any, item: Any, name: str) -> str:
    """A block of code with the ways to call a class or a function; nothing for others."""
    short = name.removeprefix("posembed.")
    if item.is_class:
        init = item.all_members.get("__init__")
        if init is None:
            return ""
        init = init.final_target if init.is_alias else init
        lines = [call(short.rpartition(".")[2], arguments(init, method=True))]
    elif item.is_function:
        method = owner is not None and owner.is_class and "staticmethod" not in item.labels
        lines = [call(short.rpartition(".")[2], arguments(item, method), item.returns)]
    else:
        return ""
    return "```python\n" + "\n".join(lines) + "\n```\n"


def meanings(name: str, place: str) -> Iterator[str]:
    """Full names that a name may stand for in the description of ``place``: the nearest first."""
    while place:
        yield f"{place}.{name}"
        place = place.rpartition(".")[0]
    yield f"posembed.functional.{name}"
    yield name


class Page:
    """The texts of a page, which link to each other."""

    def __init__(self, names: dict[str, tuple[str, ...]]) -> None:
        """``names``: what the page describes, and the inherited methods that it shows of each."""
        self.names = names
        self.titles: dict[str, str] = {}
        self.texts = {name: self.described(name, 3, extra) for name, extra in names.items()}

    def text(self, name: str) -> str:
        """The description of a name, with links."""
        place = ""
        lines = []
        for line in self.texts[name].splitlines():
            if line.startswith("<!-- place: "):
                place = line.removeprefix("<!-- place: ").removesuffix(" -->")
                continue
            lines.append(ROLE.sub(lambda found: self.link(found[1], place), line))  # noqa: B023
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    def link(self, name: str, place: str) -> str:
        """A name as code, which leads to its heading if the page has one."""
        for full in meanings(name, place):
            if full in self.titles:
                return f"[`{name}`](#{slug(self.titles[full])})"
        return f"`{name}`"

    def described(
        self, name: str, level: int, extra: tuple[str, ...] = (), owner: Any = None
    ) -> str:
        """Heading, signature and docstring of a name, then its members'."""
        item = find(name)
        title = name.removeprefix("posembed.")
        self.titles[name] = title
        parts = [f"<!-- place: {name} -->", f"{'#' * level} `{title}`\n"]
        parts.append(signature(owner, item, name))
        if item.docstring is not None:
            parts += map(section, item.docstring.parse("google", **PARSING))
        if item.is_class or item.is_module:
            for member in self.members(item, extra):
                parts.append(self.described(f"{name}.{member}", level + 1, owner=item))
        return "\n".join(parts) + "\n"

    def members(self, item: Any, extra: tuple[str, ...]) -> list[str]:
        """Public members with a docstring, in the order of the source."""
        if item.is_module and item.exports is not None:
            names = [str(getattr(name, "name", name)) for name in item.exports]
        else:
            own = [name for name, member in item.members.items() if not member.is_alias]
            names = [name for name in own if not name.startswith("_")] + list(extra)
        found = {name: item.all_members[name] for name in names if name in item.all_members}
        found = {n: m.final_target if m.is_alias else m for n, m in found.items()}
        return [name for name, member in found.items() if member.docstring and not member.is_module]


def indented(text: str) -> str:
    """The lines after the first belong to the same item of a list."""
    first, *rest = text.strip().splitlines() or [""]
    return "\n".join([first, *(textwrap.indent(line, "    ") if line else "" for line in rest)])


def section(part: Any) -> str:
    """A section of a docstring."""
    kind = part.kind.value
    if kind == "text":
        return str(part.value).strip() + "\n"
    if kind == "examples":
        shown = [
            text.strip() if form.value == "text" else f"```pycon\n{text.strip()}\n```"
            for form, text in part.value
        ]
        return "**Example**\n\n" + "\n\n".join(shown) + "\n"
    titles = {"parameters": "Arguments", "returns": "Returns", "raises": "Raises"}
    lines = [f"**{titles.get(kind, kind.capitalize())}**\n"]
    for item in part.value:
        name = getattr(item, "name", "") or (str(item.annotation) if item.annotation else "")
        begin = f"`{name}`: " if name and kind != "returns" else ""
        lines.append(f"- {begin}{indented(item.description)}")
    return "\n".join(lines) + "\n"
