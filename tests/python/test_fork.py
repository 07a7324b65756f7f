"""A process forks while its other threads call operators: no lock may stay closed in the child."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import posembed as pe
import pytest

FORKS = 1000 if os.environ.get("POSEMBED_LONG") == "1" else 100
LIBRARIES = [Path(pe.__file__).parent / "lib" / f"lib{name}.so" for name in ("posembed", "posembed_kernels")]

# Specifications that are new take the locks for writing, results of 4 MiB those of kept memory.
PROGRAM = """
import itertools, os, signal, sys, threading
import posembed as pe
import torch

torch.set_num_threads(1)
sys.setswitchinterval(1e-4)
f, x, ids = pe.functional, torch.ones(1, 1, 2, 8), torch.zeros(1, 1, dtype=torch.int64)
large, numbers = torch.ones(1, 1025, 8, 128), itertools.count()

def layers():  # a thread's own: torch locks a parameter while a backward pass adds to its gradient
    input_layer = pe.InputEmbedding(5, 8, max_positions=4)
    return pe.SinusoidalPositionalEmbedding(8), pe.ALiBi(2), input_layer

def call():
    base = 1e4 + next(numbers)
    for numerics in ("exact", "float32"):
        f.rotary(x, spec=pe.RotarySpec(8, base=base, numerics=numerics))
    pe.SinusoidalPositionalEmbedding(8, base=base)(x[:, :, 0])

def call_all(sinusoidal, alibi, layer):
    call()
    f.rotary(large, spec=pe.RotarySpec(128))
    sinusoidal(x[:, :, 0]), alibi(3), layer(ids).sum().backward()
    pe.set_cache_limit(1 << 24)
    pe.empty_cache()

def work():
    own = layers()
    while True:
        for _ in range(20):
            call()
        call_all(*own)

own = layers()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
while next(numbers) < 100:
    pass
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        torch.set_num_threads(1)  # torch's own threads are not forked
        call_all(*own)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status != 0:
        print(f"child {number} ended with {status}", flush=True)
        os._exit(1)
print("all children ended", flush=True)
os._exit(0)
"""


def test_children_of_a_process_whose_threads_call_operators() -> None:
    command = [sys.executable, "-c", PROGRAM, str(FORKS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3600 if FORKS == 1000 else 300)
    assert run.stdout == "all children ended\n", run.stdout + run.stderr[-2000:]


# Statics whose first use takes a lock nevertheless, and why a fork cannot copy it.
GUARDED = {
    "instruction_set()::chosen": "made while the library is loaded",
    "::apply_with_saved(": "made while torch compiles a backward pass, under a lock of its own",
    "cudaLaunchAttribute": "CUDA does not work in a forked child",
    "waits_for_previous_kernel<": "CUDA does not work in a forked child",
}


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_static_of_first_use_takes_a_lock() -> None:
    symbols = subprocess.run(["nm", "--demangle", *LIBRARIES], capture_output=True, text=True, check=True).stdout
    if "posembed::dispatcher::" not in symbols:
        pytest.skip("the library has no symbol table")
    own = [line for line in symbols.splitlines() if "guard variable for posembed::" in line]
    assert any("instruction_set()::chosen" in line for line in own)
    assert [line for line in own if not any(known in line for known in GUARDED)] == []
