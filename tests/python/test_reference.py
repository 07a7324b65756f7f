"""Tests that names in docstrings, as in :func:`rotary`, exist and become links."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import posembed as pe
import pytest
from support.documentation import program

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "posembed"
MARKED = re.compile(r":(?:func|class|meth|mod|attr):`([^`]+)`")


def marked() -> list[tuple[str, str]]:
    """Each module and a name that it marks."""
    result = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("posembed", *path.relative_to(PACKAGE).with_suffix("").parts))
        for name in sorted(set(MARKED.findall(path.read_text(encoding="utf-8")))):
            result.append((module.removesuffix(".__init__"), name))
    return result


def find(scope: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(scope, part):
            return part in getattr(scope, "__annotations__", {})
        scope = getattr(scope, part)
    return True


@pytest.mark.parametrize(("module", "name"), marked())
def test_marked_names_exist(module: str, name: str) -> None:
    if module in ("posembed.integrations.torchrec", "posembed.integrations.torchtitan"):
        pytest.importorskip(module.rpartition(".")[2])
    where = importlib.import_module(module)
    classes = [value for value in vars(where).values() if isinstance(value, type)]
    importlib.import_module("posembed.analysis")  # users import it themselves
    package = type("Package", (), {"posembed": pe})  # for full names
    assert any(find(scope, name) for scope in (where, *classes, pe, pe.functional, package))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("griffe")
    return program("reference")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("forward", "[`forward`](#alibiforward)"),
        ("ALiBi", "[`ALiBi`](#alibi)"),
        ("alibi_bias", "[`alibi_bias`](#functionalalibi_bias)"),
        ("elsewhere", "`elsewhere`"),
    ],
)
def test_marked_names_become_links(name: str, written: str, reference: ModuleType) -> None:
    names = ("posembed.TokenEmbedding", "posembed.ALiBi", "posembed.functional")
    page = reference.Page(dict.fromkeys(names, ()))
    assert page.link(name, "posembed.ALiBi") == written
    assert "](#" in page.text("posembed.ALiBi")


def test_reference_shows_signatures_and_sections(reference: ModuleType) -> None:
    text = reference.Page({"posembed.RotaryEmbedding": ()}).text("posembed.RotaryEmbedding")
    assert text.startswith("### `RotaryEmbedding`\n\n```python\nRotaryEmbedding(\n")
    for part in ("\n    layout: Layout = 'bshd',\n", "\n**Arguments**\n\n- `head_dim`: "):
        assert part in text
    for part in ("\n**Raises**\n\n- `ValueError`: ", "\n```pycon\n>>> ", "\n#### `RotaryEmbedding."):
        assert part in text
    assert "self" not in "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert not re.search(r"#### `RotaryEmbedding\._", text)


# Methods that posembed itself calls on its modules.
INNER = {"host_names", "near", "row_ids", "rows_at", "use_table"}


def described() -> dict[str, set[str]]:
    """The names in the reference, and the inherited methods that it shows of each."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    found = re.findall(r"^<!-- written: python posembed\.(\S+) ?(.*) -->$", page, re.MULTILINE)
    return {name: set(methods.split()) for name, methods in found}


def test_reference_has_methods_of_bases_that_it_does_not_describe() -> None:
    options = described()
    classes = {name: getattr(pe, name) for name in options if isinstance(getattr(pe, name, 0), type)}
    assert len(classes) > 15
    for name, cls in classes.items():
        inner = [
            base for base in cls.__mro__ if base.__module__.startswith("posembed") and base not in classes.values()
        ]
        if pe.scaling.Scaling in inner:
            continue
        methods = {
            method
            for base in inner
            for method, value in vars(base).items()
            if not method.startswith("_") and (callable(value) or isinstance(value, property))
        }
        methods -= {method for method in vars(cls) if method in methods}
        listed = options[name]
        assert methods - INNER <= listed, name
        assert all(any(find(base, method) for base in cls.__mro__) for method in listed), name


@pytest.mark.parametrize("name", ["analysis", "data", "functional", "plot", "positions", "pretrained"])
def test_reference_shows_public_names_of_a_module(name: str) -> None:
    module = getattr(pe, name)
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    shown = {*re.findall(rf"^#### `{name}\.(\w+)`$", page, re.MULTILINE)}
    made = {each for each in module.__all__ if inspect.isroutine(getattr(module, each))}
    made |= {each for each in module.__all__ if isinstance(getattr(module, each), type)}
    assert made <= shown <= {*module.__all__}  # the others are names of types, without a text
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, each) for each in module.__all__)
    if name != "functional":
        names = {each for each in dir(module) if not each.startswith("_")}
        assert names <= {*module.__all__}
