"""diagnose: names what a program's rotation does wrong."""

from __future__ import annotations

import argparse

import torch

from posembed.commands import common
from posembed.diagnosis import verdict
from posembed.models.files import file_of

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def add(commands: common.Commands) -> None:
    """Arguments of diagnose."""
    summary = "name what a program's rotation does wrong; exit code 1 unless it is right"
    examples = [
        "config.json --program my_engine.py:rotate",
        "model_folder --program transformers.models.llama.modeling_llama",
        "config.json --program rotation.onnx --layer-type full_attention",
        "config.json --program recorded.safetensors",
    ]
    parser = common.add_command(commands, "diagnose", run, summary, examples)
    parser.add_argument("config", help=common.FILES)
    parser.add_argument(
        "--program",
        required=True,
        help="file.py:name or module:name of a function of x [batch, heads, seq, head_dim] and "
        "positions; a modeling module of transformers; an .onnx graph; or .safetensors with x, "
        "positions and output, or a cos_sin_cache",
    )
    parser.add_argument("--layer", type=int, help="the index of a layer, where layers differ")
    parser.add_argument("--max-position", type=common.positive, help="the last position to test")
    parser.add_argument("--heads", type=common.positive, help="number of heads of x")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of x")
    parser.add_argument("--device", default="cpu", help="of x and positions")
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the verdict and its evidence."""
    file = file_of(arguments.config)
    given = vars(arguments)
    names = ("layer_type", "layer", "max_position", "heads", "device")
    options = {**{name: given[name] for name in names}, **common.options_of(arguments)}
    dtype = DTYPES[arguments.dtype]
    found = verdict.diagnose(arguments.program, file, dtype=dtype, **options)
    if arguments.json:
        common.print_json(found.to_dict())
    else:
        print(found)
    return int(not found.right)
