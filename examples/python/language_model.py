"""The twin of examples/cpp/language_model: same seed, same data, same losses, in Python.

Trains one small byte-level language model per position method on real text, then reads held-out
text in windows of 1, 2 and 4 times the trained length. The losses show how methods extrapolate.
After Press et al., "Train Short, Test Long", arXiv:2108.12409.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import sysconfig
from pathlib import Path

import posembed as pe
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

METHODS = ("none", "learned", "sinusoidal", "rope", "alibi")
LEARNED_FREQUENCIES = "rope-learned"  # on request, and only in this program
TOLERANCE = 1e-4  # between the losses of the two programs


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Options and defaults are those of the C++ program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of .py files (default: the standard library)",
    )
    parser.add_argument("--methods", type=lambda list_: list_.split(","), default=METHODS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=64, help="bytes of a training window")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--held-out", type=int, default=65536, help="bytes of held-out text")
    parser.add_argument(
        "--compare",
        type=Path,
        help="losses of the C++ program: take the --first steps and fail if they differ",
    )
    parser.add_argument("--first", type=int, default=10, help="steps to compare")
    settings = parser.parse_args(arguments)
    settings.vocabulary, settings.layers, settings.width, settings.heads = 256, 2, 96, 4
    settings.learning_rate = 3e-3
    return settings


def read_bytes(folder: Path, size: int) -> Tensor:
    """The first ``size`` bytes of a folder's .py files, files sorted by name: int64 [size]."""
    files = sorted(path for path in folder.iterdir() if path.suffix == ".py" and path.is_file())
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text, dtype=torch.uint8)[:size].long()
    raise ValueError(f"{folder}: expected {size} bytes of .py files, found {len(text)}")


class Block(nn.Module):
    """Attention and feed-forward, each added to its input, on normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rope: pe.RotaryEmbedding | None, bias: Tensor | None) -> Tensor:
        """x: [batch, seq, width]; bias: [1, heads, seq, seq], causal mask included, or None."""
        x = x + self.attention_output(self.attend(self.attention_norm(x), rope, bias))
        return x + self.down(functional.gelu(self.up(self.feedforward_norm(x))))

    def attend(self, x: Tensor, rope: pe.RotaryEmbedding | None, bias: Tensor | None) -> Tensor:
        # [batch, seq, 3 * width] -> three of [batch, heads, seq, head_dim], still views
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        if rope is not None:
            query, key = rope(query, key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=bias is None
        )
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """A small causal language model; decoder.h says where the position methods apply."""

    def __init__(self, method: str, settings: argparse.Namespace) -> None:
        super().__init__()
        if method not in (*METHODS, LEARNED_FREQUENCIES):
            raise ValueError(f"--methods: no position method is called {method}")
        width, heads = settings.width, settings.heads
        self.learned = self.sinusoidal = self.rope = self.alibi = None
        # Small weights learn fast; once scaled, they are as large as sinusoids of amplitude 1.
        self.token = pe.TokenEmbedding(settings.vocabulary, width, scale="sqrt_dim")
        if method == "learned":
            self.learned = pe.LearnedPositionalEmbedding(settings.length, width)
        elif method == "sinusoidal":
            self.sinusoidal = pe.SinusoidalPositionalEmbedding(width)
        elif method in ("rope", LEARNED_FREQUENCIES):
            self.rope = pe.RotaryEmbedding(
                width // heads, layout="bhsd", learned_frequencies=method == LEARNED_FREQUENCIES
            )
        elif method == "alibi":
            self.alibi = pe.ALiBi(heads)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width)

        torch.manual_seed(settings.seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:  # norms keep their ones and zeros
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 ids [batch, seq] -> logits of the next id [batch, seq, vocabulary]."""
        x = self.token(ids)
        if self.learned is not None:
            x = self.learned(x)
        if self.sinusoidal is not None:
            x = self.sinusoidal(x)
        bias = None if self.alibi is None else self.alibi(ids.shape[1]).unsqueeze(0)
        for block in self.blocks:
            x = block(x, self.rope, bias)
        return self.token.logits(self.norm(x))


def next_byte_loss(model: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per byte."""
    # cross_entropy expects classes in dim 1; transposing keeps the targets a view.
    return functional.cross_entropy(model(inputs).transpose(1, 2), targets)


def learning_rate(step: int, settings: argparse.Namespace) -> float:
    """A linear warm-up, then cosine decay to a tenth."""
    wave = 0.55 + 0.45 * math.cos(math.pi * step / settings.steps)
    return settings.learning_rate * min(1.0, (step + 1) / 50.0) * wave


def train(
    model: Decoder, ids: Tensor, settings: argparse.Namespace, *, name: str, stop: int
) -> list[float]:
    """Takes the first ``stop`` steps and returns the loss before each."""
    inputs, targets = pe.data.windows(ids, settings.length)
    inputs = inputs.unflatten(0, (settings.batch, settings.steps))
    targets = targets.unflatten(0, (settings.batch, settings.steps))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    losses = []
    progress = tqdm(range(stop), desc=f"{name:12}", disable=None)  # no bars in a log
    for step in progress:
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        optimizer.zero_grad()
        loss = next_byte_loss(model, inputs[:, step], targets[:, step])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


@torch.no_grad()
def evaluate(model: Decoder, ids: Tensor, length: int) -> float:
    """Mean loss in nats per byte when the model reads ``ids`` in windows of ``length``."""
    inputs, targets = pe.data.windows(ids, length)
    batch = max(1, 8192 // length)
    total = 0.0
    for some, following in zip(inputs.split(batch), targets.split(batch), strict=True):
        total += next_byte_loss(model, some, following).item() * len(some)
    return total / len(inputs)


def print_table(models: dict[str, Decoder], ids: Tensor, settings: argparse.Namespace) -> None:
    lengths = [factor * settings.length for factor in (1, 2, 4)]
    print(f"Loss in nats per byte on {settings.held_out} held-out bytes, read in windows of")
    print(" " * 12 + "".join(f"{length:10}" for length in lengths))
    for method, model in models.items():
        row = f"{method:12}"
        for length in lengths:
            past_table = method == "learned" and length > settings.length
            row += f"{'n/a':>10}" if past_table else f"{evaluate(model, ids, length):10.3f}"
        print(row)


def differences(file: Path, losses: dict[str, list[float]]) -> dict[str, float]:
    """The largest difference between each method's losses and those of the C++ program."""
    with file.open() as stream:
        written = [(row["method"], float(row["loss"])) for row in csv.DictReader(stream)]
    by_method = {
        method: [loss for _, loss in rows]
        for method, rows in itertools.groupby(written, key=lambda row: row[0])
    }
    return {
        method: max(abs(a - b) for a, b in zip(mine, by_method[method], strict=False))
        for method, mine in losses.items()
    }


def main(arguments: list[str] | None = None) -> int:
    settings = parse_settings(arguments)
    training_bytes = settings.batch * settings.steps * settings.length
    cuda = torch.cuda.is_available() and pe.build_info()["cuda_version"]
    device = settings.device if settings.device != "auto" else "cuda" if cuda else "cpu"
    # The last byte of each part is only a target.
    ids = read_bytes(settings.text, training_bytes + 1 + settings.held_out + 1).to(device)
    training, held_out = ids[: training_bytes + 1], ids[training_bytes + 1 :]

    stop = min(settings.first, settings.steps) if settings.compare else settings.steps
    models, losses = {}, {}
    for method in settings.methods:
        models[method] = Decoder(method, settings).to(device)
        losses[method] = train(models[method], training, settings, name=method, stop=stop)
    if not settings.compare:
        print_table(models, held_out, settings)
        return 0

    print(f"Losses of the first {stop} steps, Python against C++ (at most {TOLERANCE:g} apart)")
    worst = 0.0
    for method, difference in differences(settings.compare, losses).items():
        first, last = losses[method][0], losses[method][-1]
        print(f"{method:10}  {first:.6f} ... {last:.6f}   largest difference {difference:.1e}")
        worst = max(worst, difference)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
