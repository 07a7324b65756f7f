"""Tests posembed_kernels.h on CUDA: the operators' bits, one record of errors for both, and what is refused."""

import ctypes
from pathlib import Path
from typing import Any

import posembed as pe
import posembed_kernels as kernels
import pytest
import torch
from support.halves import CUDA_ON_CPU
from torch import Tensor

pytestmark = pytest.mark.gpu
f = pe.functional
KINDS = {"torch.int": 0, "torch.float": 2, "torch.bfloat": 4, "torch.bool": 6}
SPEC = pe.RotarySpec(64, scaling=pe.Llama3Scaling(8.0, 1.0, 4.0, 8192))
# In a build of make test-cuda-on-cpu, the operators' library has the CUDA half of the C functions, too.
LIBRARY = ctypes.CDLL(str(Path(pe.__file__).parent / "lib/libposembed.so")) if CUDA_ON_CPU else kernels.library()
LIBRARY.posembed_last_error.restype = ctypes.c_char_p


def dltensor(tensor: Tensor, **changes: Any) -> Any:
    sizes = ctypes.c_int64 * tensor.dim()
    fields = {
        "data": tensor.data_ptr(),
        "device_type": 2,
        "device_id": tensor.device.index or 0,
        "ndim": tensor.dim(),
        "code": KINDS[str(tensor.dtype).rstrip("0123456789")],
        "bits": 8 * tensor.element_size(),
        "lanes": 1,
        "shape": sizes(*tensor.shape),
        "strides": sizes(*tensor.stride()),
    }
    return kernels.Tensor(**(fields | changes))


def call(function: str, fields: dict[str, Any], changes: dict[str, Any] | None = None, **tensors: Tensor) -> int:
    """The status of a call on the current stream."""
    made = {name: dltensor(tensor, **(changes or {}).get(name, {})) for name, tensor in tensors.items()}
    struct = kernels.struct(function, fields | {name: ctypes.addressof(each) for name, each in made.items()})
    stream = 0 if CUDA_ON_CPU else torch.cuda.current_stream().cuda_stream
    threads = kernels.Threads(size=ctypes.sizeof(kernels.Threads), stream=stream)
    return int(getattr(LIBRARY, function)(ctypes.byref(struct), ctypes.byref(threads)))


def last_error() -> str:
    return str(LIBRARY.posembed_last_error().decode())


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_calls_have_the_operators_bits(dtype: torch.dtype, cuda: torch.device) -> None:
    query, key = (drawn(2, 5, heads, 64, dtype=dtype, device=cuda) for heads in (4, 2))
    positions = torch.tensor([[3, 1, -1, 1_000_003, 7], [0, 1, 2, 3, 4]], device=cuda)
    rotated = torch.empty_like(query), torch.empty_like(key)
    outputs = {"query_out": rotated[0], "key_out": rotated[1]}
    fields = kernels.rotation(SPEC.to_json(), 64)
    assert call("posembed_rotary", fields, query=query, key=key, positions=positions, **outputs) == 0
    expected = f.rotary(query, key, positions, spec=SPEC)
    assert all(map(torch.equal, rotated, expected))

    x = drawn(2, 5, 64, dtype=dtype, device=cuda)
    out = torch.empty_like(x)
    row = positions[1]
    assert call("posembed_sinusoidal", kernels.sinusoid(None, 64), x=x, positions=row, out=out) == 0
    assert torch.equal(out, f.sinusoidal(x, row, spec=pe.SinusoidalSpec(64)))

    slopes, mask = pe.ALiBi(4).slopes.to(cuda), torch.tensor([True, True, False, True, True], device=cuda)
    bias = torch.empty(2, 4, 5, 5, dtype=dtype, device=cuda)
    rows = {"query_positions": positions.clamp(0, 9), "key_positions": row, "attention_mask": mask}
    assert call("posembed_alibi_bias", {"not_causal": True}, slopes=slopes, out=bias, **rows) == 0
    assert torch.equal(bias, f.alibi_bias(slopes, 5, 5, causal=False, dtype=dtype, **rows))

    weight, ids = x[0], torch.tensor([[4, 0, 4]], device=cuda)
    looked_up = torch.empty(1, 3, 64, dtype=dtype, device=cuda)
    assert call("posembed_embedding", {"scale": 3.0}, weight=weight, ids=ids, out=looked_up) == 0
    assert torch.equal(looked_up, f.embedding(ids, weight, scale=3.0))


def look_up(device: torch.device, *ids: int, **changes: Any) -> tuple[int, Tensor]:
    out = torch.full((len(ids), 2), 7.0, device=device)
    weight = torch.arange(8.0, device=device).view(4, 2)
    status = call("posembed_embedding", {}, changes, weight=weight, ids=torch.tensor(ids, device=device), out=out)
    return status, out


BAD_ID = "token id 9 at index 1 of an earlier call on cuda:0 is out of range: expected 0 to 3"


def test_an_id_outside_is_recorded_and_reported_once(cuda: torch.device) -> None:
    status, out = look_up(cuda, 3, 9)
    assert (status, LIBRARY.posembed_check_errors(1)) == (0, 3)
    assert out.tolist() == [[6.0, 7.0], [0.0, 0.0]]
    assert BAD_ID in last_error()
    assert LIBRARY.posembed_check_errors(1) == 0


def test_operators_and_c_calls_share_the_record(cuda: torch.device) -> None:
    look_up(cuda, 0, 9)
    with pytest.raises(IndexError, match=BAD_ID):
        pe.check_errors()
    f.embedding(torch.tensor([0, 9], device=cuda), torch.ones(4, 2, device=cuda))
    if not CUDA_ON_CPU:
        torch.cuda.synchronize()
    status, out = look_up(cuda, 1, 2)
    assert (status, out.unique().tolist()) == (3, [7.0]), "launched although an error was recorded"
    assert BAD_ID in last_error()
    assert look_up(cuda, 1)[0] == 0


def test_positions_outside_are_recorded(cuda: torch.device) -> None:
    query, positions = torch.ones(1, 2, 1, 64, device=cuda), torch.tensor([5, -7], device=cuda)
    fields = kernels.rotation(None, 64)
    assert call("posembed_rotary", fields, query=query, query_out=query, positions=positions) == 0
    assert LIBRARY.posembed_check_errors(1) == 3
    assert "position -7 at index 1" in last_error()
    slopes, far = torch.ones(1, device=cuda), torch.tensor([2**40], device=cuda)
    out = torch.empty(1, 1, 1, device=cuda)
    assert call("posembed_alibi_bias", {"not_causal": True}, slopes=slopes, out=out, query_positions=far) == 0
    assert LIBRARY.posembed_check_errors(1) == 3
    assert "distance between a query and a key" in last_error()


def test_tensors_of_a_call_are_on_one_device(cuda: torch.device) -> None:
    for change, got in (({"device_type": 1}, "the CPU"), ({"device_id": 1}, "cuda:1")):
        assert look_up(cuda, 0, ids=change)[0] == 1
        assert last_error() == f"ids: expected memory of cuda:0, as weight, got {got}"
    assert look_up(cuda, 0, weight={"device_id": 128})[0] == 1
    assert "weight: expected device_id 0 to 127, got 128" in last_error()
