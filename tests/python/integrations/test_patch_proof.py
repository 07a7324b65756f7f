"""patch(model): what may be run, what branches, and the proof on the model's own data."""

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _door, _rotation, patch, unpatch
from posembed.integrations.huggingface._door import own_code
from torch import Tensor, nn

HEAD = """
import math, torch
from torch import nn
CALLS, STATS, COUNT, NAMES = [], {}, 0, {torch.float64: {"mps"}}
def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
@torch.no_grad()
def quiet(x):
    return half(x)
"""
MODEL = """
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return function(q, k, cos, sin)
"""
Q = "q, k = q * cos + half(q) * sin, k * cos + half(k) * sin; "
# What a function does beside its rotation, and what its row says.
STAYS = {
    "if q.shape[-2] > 16: q = q * math.log(q.shape[-2])": "it branches on shape",
    "if q.shape[-1] == 32: cos, sin = cos.flip(-1), sin.flip(-1)": "it branches on shape",
    "if q.shape[-2] == 1: return q, k": "it branches on shape",
    "if q.shape[0] > 4: sin = -sin": "it branches on shape",
    "q = q * (2 if q.shape[1] == 4 * k.shape[1] else 1)": "it branches on shape",
    Q + "return q.clamp(-50, 50), k": "it uses clamp",
    "if bool(cos.max() > 100): return q, k": "it uses max",
    Q + "return torch.nan_to_num(q), k": "it uses torch.nan_to_num",
    Q + "return torch.where(q > 9, q, q), k": "it uses torch.where",
    "q.register_hook(lambda g: g * 0.5) if q.requires_grad else None": "it uses",
    Q + "return q, k.detach()": "it uses detach",
    "if cos.isnan().any(): raise ValueError('a table has NaN')": "it uses isnan",
    "if torch.is_autocast_enabled('cpu'): return q, k": "it uses torch.is_autocast_enabled",
    "if torch.is_inference_mode_enabled(): return q, k": "it uses torch.is_inference",
    "if not q.is_contiguous(): return q, k": "it uses is_contiguous",
    "global COUNT; COUNT += 1": "it has an effect",
    "CALLS.append(q.shape)": "it uses append",
    "STATS['max'] = q": "it changes STATS",
    "function.last = q.shape": "it has an effect",
    "open('touched', 'a').write('x')": "it uses",
    "import os; os.remove('victim')": "it has an effect",
    "torch.os.remove('victim')": "it uses remove",
    "torch.os.environ.pop('VICTIM')": "it uses environ",
    "torch.use_deterministic_algorithms(True)": "it uses torch.use_deterministic_algorithms",
    "torch.set_printoptions(precision=1)": "it uses torch.set_printoptions",
    "torch.set_grad_enabled(False)": "it uses torch.set_grad_enabled",
    "torch.random.set_rng_state(torch.random.get_rng_state())": "it uses set_rng_state",
    "torch.threading.Thread(target=print).start()": "it uses Thread",
    "torch.sys.path.insert(0, 'x')": "it uses path",
    "torch.ctypes.memset(0, 0, 0)": "it uses memset",
    "q.share_memory_()": "it uses share_memory_",
    "with torch.no_grad(): q = q * cos": "it uses torch.no_grad",
    "q = quiet(q)": "it uses quiet",
    "q = torch.tensor(q)": "it uses torch.tensor",
    "q = q + torch.randn_like(q)": "it uses torch.randn_like",
    "cos.grad = sin": "it has an effect",
    "return torch.addcmul(q * cos, half(q), sin), k * cos": "it rotates, but rounds its products",
    "a = torch.outer(cos[0], sin[0]); return q * a.cos() + half(q) * a.sin(), k": "it makes its",
}
REPLACED = [
    "if q.shape[-1] != k.shape[-1]: raise ValueError('q and k')",
    "assert q.dim() == k.dim()",
    "if q.shape[-2] == 5: pass",
    "parts = []; parts.append(q)",
    "names = NAMES.get(torch.float64); q = -(-q) if names and q.device.type in names else q",
    "dtype = torch.float32 if q.device.type == 'mps' else torch.float32",
]


def module(folder: Path, line: str) -> Any:
    """A module with a rotation that has this line."""
    name = f"proof_{abs(hash((line, str(folder))))}"
    body = "def function(q, k, cos, sin):\n"
    body += "".join(f"    {part.strip()}\n" for part in line.split("; "))
    body += "    return q * cos + half(q) * sin, k * cos + half(k) * sin\n"
    (folder / f"{name}.py").write_text(HEAD + body + MODEL)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def state() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch._tensor_str.PRINT_OPTS.precision,
        torch.get_rng_state().tolist(),
        list(sys.path),
        os.environ.get("VICTIM"),
        Path("victim").exists(),
        Path("touched").exists(),
    )


@pytest.mark.parametrize("line", STAYS)
def test_functions_that_do_more_stay_and_are_not_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VICTIM", "1")
    Path("victim").touch()
    found = module(tmp_path, line)
    before = state()
    report = patch(found.Attention())
    assert state() == before
    assert (found.CALLS, found.STATS, found.COUNT) == ([], {}, 0)
    assert "function" not in {row.function for row in report.patched}
    (reason,) = [row.action for row in report.left if row.function == "function"]
    assert reason.startswith(STAYS[line])


@pytest.mark.parametrize("line", REPLACED)
def test_branches_whose_sides_agree_do_not_count(line: str, tmp_path: Path) -> None:
    found = module(tmp_path, line)
    (row,) = patch(found.Attention()).patched
    assert row.function == "function"


# ------------------------------------------------------------------------------- proved on own data


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + half(q) * sin, k * cos + half(k) * sin


class Attention(nn.Module):
    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(*given)


def arguments(first: int = 0, tokens: int = 5, dtype: torch.dtype = torch.float32) -> Any:
    q, k = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, tokens, 8)
    angles = (first + torch.arange(tokens)).view(-1, 1) * torch.tensor([1.0, 0.3, 0.1, 0.03])
    angles = torch.cat((angles, angles), -1)
    return q.to(dtype), k.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.fixture(autouse=True)
def no_proofs_before() -> None:
    _door._found.pop(rotate, None)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, found, expected))


def test_a_wrong_sign_is_seen_at_the_first_call_that_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call at position 0 proves nothing: every rule gives its bits."""
    model, right = Attention(), _rotation.Rule.run
    report = patch(model)

    def run(self: Any, given: dict[str, Any], plan: Any) -> Any:
        return right(self, {**given, self.roles.sin: -given[self.roles.sin]}, plan)

    monkeypatch.setattr(_rotation.Rule, "run", run)
    for first, tokens in ((0, 1), (0, 5), (3, 1), (0, 6)):
        given = arguments(first, tokens)
        assert same(model(*given), own(model, *given))
    (row,) = report.patched
    assert row.state.startswith("the model's own code runs for some calls: other bits for")
    assert "float32 [2, 4, 5, 8]" in row.state
    assert "own code runs" in " ".join(str(report).split())
    calls = report.calls()[0]
    assert (calls.kernel, calls.own) == (1, 3)


def test_values_that_cannot_tell_prove_nothing() -> None:
    model, report = Attention(), None
    report = patch(model)
    q, k, cos, sin = arguments(3)
    for given in (
        (torch.zeros_like(q), k, cos, sin),
        (torch.full_like(q, math.nan), k, cos, sin),
        (torch.ones_like(q), k, cos, sin),
        (q, k, torch.ones_like(cos), torch.zeros_like(sin)),
    ):
        model(*given)
        assert report.patched[0].state == "not proved yet"
    model(q, k, cos, sin)
    assert report.patched[0].state == ""
    assert not any(map(torch.equal, model(q, k, cos, sin), (q, k)))


def test_each_kind_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Attention(), []
    patch(model)
    right = _rotation.Rotation._difference

    def counted(self: Any, *given: Any) -> Any:
        seen.append(given)
        return right(self, *given)

    monkeypatch.setattr(_rotation.Rotation, "_difference", counted)

    def compared(*given: Tensor) -> int:
        before = len(seen)
        model(*given)
        model(*given)
        return len(seen) - before

    q, k, cos, sin = arguments(3)
    assert compared(q, k, cos, sin) == 1
    assert compared(*arguments(9)) == 0
    assert compared(*arguments(9, tokens=6)) == 0  # the same power of two
    assert compared(*arguments(9, tokens=40)) == 1
    assert compared(*arguments(9, dtype=torch.bfloat16)) == 1
    assert compared(q.requires_grad_(), k, cos, sin) == 1
    q = q.detach()
    assert compared(q.transpose(1, 2).contiguous().transpose(1, 2), k, cos, sin) == 1
    with torch.inference_mode():
        assert compared(q, k, cos, sin) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert compared(q, k, cos, sin) == 1


def test_modes_in_which_nothing_is_compared() -> None:
    """The kernel runs, and the row says that this is not proved."""
    model, given = Attention(), arguments(3)
    report = patch(model)
    expected = own(model, *given)
    found = torch.func.vmap(model, in_dims=(0, 0, None, None))(*given)
    assert same(found, expected)
    meta = model(*(x.to("meta") for x in given))
    assert meta[0].is_meta
    assert report.patched[0].state == "not proved yet"


def own(model: nn.Module, *given: Tensor) -> Any:
    with own_code():
        return model(*given)


def test_memory_that_runs_out_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    model, given = Attention(), arguments(3)
    report = patch(model)
    monkeypatch.setattr(_rotation, "_copied", out_of_memory)
    assert same(model(*given), own(model, *given))
    assert report.patched[0].state == "not proved yet"
    unpatch(model)
