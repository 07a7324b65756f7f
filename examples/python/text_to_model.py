"""From a text to a trained model: tokenizer, id file, windows without a copy, curves.

The text is Python's own handbook (pydoc's topics), or the file of --text. The program trains a
byte-level BPE on it (Sennrich et al., arXiv:1508.07909) and writes the ids to a file, two bytes
each. The loader's windows are views of that file. The model is language_model.py's decoder with
rotary positions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import posembed as pe
import torch
from language_model import Decoder, parse_settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, random_split
from tqdm import tqdm

HELD_OUT = 64  # windows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file (default: Python's handbook)")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--curves", type=Path, help="draw losses there: .png, .svg, .pdf")
    parser.add_argument("--prompt", default="The class definition")
    return parser.parse_args(arguments)


def read_text(path: Path | None) -> list[str]:
    """Independent texts: the paragraphs of a file, or the chapters of the handbook."""
    if path is not None:
        return path.read_text(encoding="utf-8").split("\n\n")
    return [topics[name] for name in sorted(topics)]


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Merges frequent pairs of symbols into new symbols, until there are ``size``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_ids(texts: list[str], tokenizer: Tokenizer, path: Path) -> int:
    """Writes the ids of all texts, with <end> after each, and returns their number."""
    end = [tokenizer.token_to_id("<end>")]
    encoded = (
        tokenizer.encode(text).ids + end for text in tqdm(texts, desc="tokenizing", disable=None)
    )
    return pe.data.save_ids(path, encoded, torch.uint16)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per token."""
    # One token per row, because softmax over strided classes is slow.
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Subset) -> float:
    """Mean loss on held-out windows."""
    inputs, targets = (torch.stack(parts) for parts in zip(*windows, strict=True))
    return loss_of(model, inputs, targets).item()


def batches(windows: Subset, size: int, steps: int):
    """``steps`` batches, in a new order on each pass through the text."""
    loader = DataLoader(windows, size, shuffle=True, drop_last=True)
    while steps > 0:
        for batch in loader:
            yield batch
            steps -= 1
            if steps == 0:
                return


def train(
    model: nn.Module, training: Subset, held_out: Subset, options: argparse.Namespace
) -> dict[str, tuple[list[int], list[float]]]:
    """Runs the training steps and returns the loss curves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
    losses: list[float] = []
    judged: tuple[list[int], list[float]] = ([0], [evaluate(model, held_out)])
    every = max(1, options.steps // 10)
    progress = tqdm(
        batches(training, options.batch, options.steps), "training", options.steps, disable=None
    )
    for step, (inputs, targets) in enumerate(progress, start=1):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % every == 0:
            judged[0].append(step)
            judged[1].append(evaluate(model, held_out))
        progress.set_postfix_str(f"loss {losses[-1]:.2f}, held out {judged[1][-1]:.2f}", False)
    return {"training": (list(range(1, len(losses) + 1)), losses), "held out": judged}


@torch.no_grad()
def write_on(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt, continued with the most likely tokens."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    for _ in range(count):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return tokenizer.decode(ids[0].tolist())


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    texts = read_text(options.text)
    tokenizer = train_tokenizer(texts, options.vocabulary)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.bin"
        count = write_ids(texts, tokenizer, path)
        needed = (HELD_OUT + options.batch) * options.length + 1
        if count < needed:
            print(f"--text: expected at least {needed} tokens, got {count}", file=sys.stderr)
            return 2
        windows = pe.data.WindowDataset(path, options.length, dtype=torch.uint16)
        vocabulary = tokenizer.get_vocab_size()
        print(f"{count} tokens of {vocabulary} kinds, {len(windows)} windows of {options.length}")
        training, held_out = random_split(windows, [len(windows) - HELD_OUT, HELD_OUT])

        settings = parse_settings([])
        settings.vocabulary = vocabulary
        model = Decoder("rope", settings)
        curves = train(model, training, held_out, options)

    first, last = curves["held out"][1][0], curves["held out"][1][-1]
    print(f"loss on {HELD_OUT} held-out windows: {first:.2f} before, {last:.2f} after")
    print(write_on(model, tokenizer, options.prompt, 24))
    if options.curves:
        pe.plot.losses(curves).figure.savefig(options.curves)
    return int(not last < first)


if __name__ == "__main__":
    sys.exit(main())
