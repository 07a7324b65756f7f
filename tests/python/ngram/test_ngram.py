"""Tests of NgramSpec, NgramEmbedding and PerLayerEmbedding, beside models' modules."""

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from safetensors.torch import save_file
from support.refusals import refused
from torch import Tensor, nn

SPEC = pe.NgramSpec((3, 2**61 + 1, -7), ((11, 13), (17, 19)), boundary=2, num_embeddings=64)


def make_ids(batch: int = 2, seq: int = 9) -> Tensor:
    return torch.randint(0, 5, (batch, seq), generator=torch.Generator().manual_seed(0))


def expected(memory: pe.NgramEmbedding, ids: Tensor, **options: Any) -> Tensor:
    """The rows by torch's own operators, in float64."""
    numbers = {field.name: getattr(memory.spec, field.name) for field in dataclasses.fields(SPEC)}
    for name in ("num_embeddings", "arguments"):
        del numbers[name]
    rows = memory.weight.double()[pe.functional.ngram_ids(ids, **numbers, **options)]
    return rows.sum(-2) if memory.summed else rows.flatten(-2)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(summed: bool, dtype: torch.dtype, device: torch.device) -> None:
    memory = pe.NgramEmbedding(SPEC, 12, summed=summed, device=device, dtype=dtype)
    assert memory.weight.shape == (64, 12 if summed else 3)
    ids = make_ids().to(device)
    for given in (ids, ids[0], ids.int(), ids[:0]):
        torch.testing.assert_close(memory(given), expected(memory, given).to(dtype))
    bounds = torch.tensor([0, 4, 9], device=device)
    packed = memory(ids[0], cu_seqlens=bounds)
    assert torch.equal(packed, torch.cat([memory(ids[0, :4]), memory(ids[0, 4:])]))


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_training(summed: bool, gradient: Any, device: torch.device) -> None:
    memory = pe.NgramEmbedding(SPEC, 4, summed=summed, gradient=gradient, device=device)
    ids, factors = make_ids().to(device), torch.randn(2, 9, 4, device=device)
    (memory(ids) * factors).sum().backward()
    weight = memory.weight.detach().double().requires_grad_()
    twin = pe.NgramEmbedding.from_pretrained(weight, SPEC, summed=summed, freeze=False)
    (expected(twin, ids) * factors).sum().backward()
    found = memory.weight.grad
    assert found.is_sparse == memory.sparse == (gradient == "rows")
    torch.testing.assert_close(found.to_dense().double(), twin.weight.grad, rtol=1e-6, atol=1e-6)
    optimizer = torch.optim.SparseAdam if gradient == "rows" else torch.optim.Adam
    before = memory.weight.detach().clone()
    optimizer(memory.parameters()).step()
    assert not torch.equal(before, memory.weight)


def test_decoding_gives_the_whole_text(device: torch.device) -> None:
    memory, ids = pe.NgramEmbedding(SPEC, 12, device=device), make_ids().to(device)
    step = torch.compile(memory, fullgraph=True, dynamic=True, backend="aot_eager")
    for forward in (memory, step):
        history = memory.next_history(ids[:, :0])
        assert history.tolist() == [[2, 2], [2, 2]]
        parts = []
        for begin, end in [(0, 1), (1, 5), (5, 6), (6, 9)]:
            parts.append(forward(ids[:, begin:end], history))
            history.copy_(memory.next_history(ids[:, begin:end], history))
        assert torch.equal(torch.cat(parts, 1), memory(ids))


@pytest.mark.parametrize("namespace", [pe, pe.cpp], ids=["python", "cpp"])
def test_a_history_is_a_copy(namespace: Any) -> None:
    """It stays when its sources are written, and keeps no text in memory."""
    memory, ids = namespace.NgramEmbedding(SPEC, 12), make_ids()
    first = memory.next_history(ids)
    second = memory.next_history(ids[:, :1], first)
    kept = [history.clone() for history in (first, second)]
    ids.fill_(-1)
    assert torch.equal(first, kept[0])
    first.fill_(-1)
    assert torch.equal(second, kept[1])
    for history in (first, second):
        assert history.untyped_storage().nbytes() == history.nbytes


@pytest.mark.parametrize("summed", [False, True])
def test_a_padded_prompt_has_the_rows_that_it_has_alone(summed: bool, device: torch.device) -> None:
    memory, ids = pe.NgramEmbedding(SPEC, 12, summed=summed, device=device), make_ids().to(device)
    padding = torch.full((2, 3), 4, device=device)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], 1)
    left, right = torch.cat([padding, ids], 1), torch.cat([ids, padding], 1)
    lengths = torch.tensor([9, 9], device=device)
    alone = memory(ids)
    assert torch.equal(memory(left, attention_mask=mask)[:, 3:], alone)
    assert torch.equal(memory(right, attention_mask=mask.flip(1).bool())[:, :9], alone)
    assert torch.equal(memory(right, lengths=lengths)[:, :9], alone)
    assert torch.equal(memory.prefetch(right, lengths=lengths).take()[:, :9], alone)
    history = memory.next_history(ids)
    assert torch.equal(memory.next_history(left, attention_mask=mask), history)
    assert torch.equal(memory.next_history(right, lengths=lengths), history)
    assert not torch.equal(memory(left)[:, 3:], alone)


def test_histories_after_unequal_acceptance(device: torch.device) -> None:
    """Each row keeps another number of a draft's tokens, and goes on as alone."""
    memory, ids = pe.NgramEmbedding(SPEC, 12, device=device), make_ids(4, 9).to(device)
    accepted = [0, 1, 2, 4]
    history = memory.next_history(ids[:, :3])
    lengths = torch.tensor(accepted, device=device)
    for given in (history, None):
        kept = memory.next_history(ids[:, 3:7], given, lengths=lengths)
        for row, count in enumerate(accepted):
            own = None if given is None else given[row : row + 1]
            alone = memory.next_history(ids[row : row + 1, 3 : 3 + count], own)
            assert torch.equal(kept[row : row + 1], alone)
    mask = torch.arange(4, device=device) < lengths.unsqueeze(1)
    assert torch.equal(
        memory.next_history(ids[:, 3:7], history, attention_mask=mask),
        memory.next_history(ids[:, 3:7], history, lengths=lengths),
    )
    assert memory.next_history(ids[0, :4], lengths=lengths[3]).tolist() == ids[0, 2:4].tolist()
    refused((lambda: memory.next_history(ids, attention_mask=mask), ValueError, "attention_mask: expected the shape of ids"))  # fmt: skip
    refused(
        (lambda: memory.next_history(ids, ids), ValueError, "history: expected"),
        (lambda: memory(ids, attention_mask=ids.float()), TypeError, "attention_mask: expected bool"),
    )  # fmt: skip


@pytest.mark.parametrize("layer", [0, 1])
def test_as_qwen4_exp(layer: int) -> None:
    """Transformers puts the end token in place of padding before it hashes."""
    qwen = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = qwen.Qwen4ExpTextConfig(
        vocab_size=50, hidden_size=32, ple_layer_ids=[1, 2], ngram_vocab_size_base=90, eos_token_id=3
    )
    theirs = qwen.Qwen4ExpTextNGramEmbedding(config, 32, layer, layer)
    spec = pe.NgramSpec.qwen4_exp(50, boundary=3, layer=layer, rows=90)
    ours = pe.NgramEmbedding.from_pretrained(theirs.ngram_embedding.weight, spec)
    ids, mask = make_ids(3, 8), torch.ones(3, 8, dtype=torch.int64)
    for row, padded in enumerate((0, 3, 7)):
        mask[row, :padded] = 0
    expected = theirs(torch.where(mask.bool(), ids, 3), None)
    assert torch.equal(ours(ids, attention_mask=mask), expected)


def test_specs_have_defaults_and_are_numbers() -> None:
    spec = pe.NgramSpec([3, 5, 7], [[11, 13], [17, 19]])
    assert spec == pe.NgramSpec((3, 5, 7), torch.tensor([[11, 13], [17, 19]]).tolist())
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert (spec.offsets, spec.sizes, spec.ngram_size) == (((0, 11), (24, 41)), (2, 3), 3)
    assert (spec.columns, spec.num_embeddings, spec.padding_token) == (4, 60, 0)


def test_as_engram_is_published() -> None:
    """DeepSeek-V4.1-Flash's tables: 24 heads of the primes after 16 million, 384,006,168 rows."""
    first, second = (pe.NgramSpec.engram(99_092, 2, layers=(1, 14), layer=layer, ngram_size=4) for layer in (1, 14))
    assert first.num_embeddings == 384_006_168
    assert (first.ngram_size, first.columns, first.padding_token) == (4, 24, 2)
    heads = [prime for spec in (first, second) for row in spec.moduli for prime in row]
    assert heads == sorted(set(heads))
    draws = np.random.default_rng(10007 * 14).integers(0, (2**63 - 1) // 99_092 // 2, 4)
    assert second.multipliers == tuple((2 * draws + 1).tolist())


def test_as_blt() -> None:
    blt = pytest.importorskip("transformers.models.blt.modeling_blt")
    table = nn.Embedding(2 * 3 * 50, 8)
    spec = pe.NgramSpec.blt(heads=2, sizes=(3, 4, 6), rows=50)
    memory = pe.NgramEmbedding.from_pretrained(table.weight, spec, summed=True)
    ids = torch.randint(0, 260, (2, 12))

    class Zeros(nn.Module):
        def embed_tokens(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 8)

    wanted = blt.compute_hash_embeddings(ids, Zeros(), table, 2, [3, 4, 6], 50)
    torch.testing.assert_close(memory(ids), wanted)


@pytest.mark.parametrize("shards", [0, 3, 12])
def test_tables_of_qwen4_exp_in_files(shards: int, tmp_path: Path) -> None:
    table = torch.randn(64, 3)
    prefix = "model.layers.0.ple.ple_embedding.ngram_embedding"
    parts = {f"{prefix}.weight": table}
    if shards:
        parts = {f"{prefix}.shard_{i}.weight": part.clone() for i, part in enumerate(table.tensor_split(shards))}
    other = {"model.embed_tokens.weight": torch.randn(5, 3)}
    path = tmp_path / "model.safetensors"
    save_file({**parts, **other}, path)
    memory = pe.NgramEmbedding.from_file(path, SPEC)
    assert torch.equal(memory.weight, table)
    assert not memory.weight.requires_grad
    assert torch.equal(pe.NgramEmbedding.from_file(path, SPEC, tensor=prefix).weight, table)
    refused((lambda: pe.NgramEmbedding.from_file(path, SPEC, tensor="x"), ValueError, "tensor: expected a table, got 'x' for"))  # fmt: skip
    if shards:
        del parts[f"{prefix}.shard_1.weight"]
        save_file(parts, path)
        refused((lambda: pe.NgramEmbedding.from_file(path, SPEC), ValueError, "expected all shards of .* got none of number 1"))  # fmt: skip


@pytest.mark.parametrize("number", ["9999999999", "9" * 5000])
def test_the_number_of_a_shard_takes_no_memory(number: str, tmp_path: Path) -> None:
    names = [f"ngram_embedding.shard_{each}.weight" for each in ("0", number)]
    path = tmp_path / "model.safetensors"
    save_file({name: torch.randn(2, 3) for name in names}, path)
    tracemalloc.start()
    refused((lambda: pe.NgramEmbedding.from_file(path, SPEC), ValueError, "expected all shards of .* got none of number 1"))  # fmt: skip
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 8 << 20


def test_tables_of_engram_in_files(tmp_path: Path) -> None:
    codes, scales = torch.randn(64, 64).to(torch.float8_e4m3fn), torch.rand(64, 2) + 0.5
    path = tmp_path / "model.safetensors"
    names = [f"layers.{layer}.engram.embed" for layer in (1, 14)]
    codes_of = {f"{name}.weight": codes.clone() for name in names}
    save_file(codes_of | {f"{name}.scale": scales.clone() for name in names}, path)
    refused((lambda: pe.NgramEmbedding.from_file(path, SPEC), ValueError, "tensor: expected the name of one table of n-grams"))  # fmt: skip
    memory = pe.NgramEmbedding.from_file(path, SPEC, tensor=names[1])
    assert torch.equal(memory.weight, codes.float() * scales.repeat_interleave(32, 1))


def test_tables_of_longcat_in_files(tmp_path: Path) -> None:
    """One table for each head: the mean of projected rows is one product with joined weights."""
    spec = pe.NgramSpec.longcat(20, ngram_size=3, heads=6)
    tables = [nn.Embedding(rows, 2) for sizes in spec.moduli for rows in sizes]
    prefix, path = "model.ngram_embeddings", tmp_path / "model.safetensors"
    parts = {f"{prefix}.embedders.{i}.weight": table.weight for i, table in enumerate(tables)}
    words = {f"{prefix}.word_embeddings.weight": torch.randn(20, 24)}
    save_file({**parts, **words, f"{prefix}.post_projs.0.weight": torch.randn(24, 2)}, path)
    memory, ids = pe.NgramEmbedding.from_file(path, spec), make_ids(2, 9)
    weights = [torch.randn(24, 2) for _ in tables]
    rows = memory.row_ids(ids) - torch.tensor(sum(spec.offsets, ()))
    columns = zip(rows.unbind(-1), tables, weights, strict=True)
    expected = sum(nn.functional.linear(table(column), weight) for column, table, weight in columns)
    projected = nn.functional.linear(memory(ids), torch.cat(weights, 1))
    torch.testing.assert_close(projected, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pe.NgramEmbedding(SPEC, 6), "embedding_dim: expected a multiple of 4"),
        (lambda: pe.NgramEmbedding(SPEC, 8, gradient="sparse"), "gradient: expected 'dense' or"),
        (lambda: dataclasses.replace(SPEC, num_embeddings=59), "num_embeddings: expected 60 or"),
        (lambda: dataclasses.replace(SPEC, offsets=((0,), (1,))), "offsets: expected 4, as many"),
        (lambda: pe.NgramSpec((1, 2), ((0,),)), "moduli: expected 1 or more, got 0"),
        (lambda: pe.NgramSpec((1, 2), ()), r"moduli: expected \[1, heads\] numbers"),
        (lambda: pe.NgramSpec.qwen4_exp(50, 1, heads=0), "ngram_size, heads: expected at least"),
        (lambda: pe.NgramSpec.longcat(50, ngram_size=1), "ngram_size, heads: expected at least"),
        (lambda: pe.NgramSpec.engram(50, 1, (1,), 2), "layer: expected one of"),
        (lambda: pe.NgramEmbedding.from_pretrained(torch.zeros(63, 2), SPEC), r"weight: expected \[64, components\], got \[63, 2\]"),
        (lambda: pe.PerLayerEmbedding(5, 0, 2), "num_layers: expected 1 or more, got 0"),
    ],
)  # fmt: skip
def test_bad_options(make: Any, message: str) -> None:
    refused((make, ValueError, message))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_layer_rows_as_gemma(dtype: torch.dtype, device: torch.device) -> None:
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    theirs = gemma.Gemma3nTextScaledWordEmbedding(20, 3 * 16, 0, embed_scale=4.0).to(device, dtype)
    table = pe.PerLayerEmbedding(20, 3, 16, scale="sqrt_dim", device=device, dtype=dtype)
    table.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 20, (2, 5), device=device)
    assert torch.equal(table(ids), theirs(ids).reshape(2, 5, 3, 16))
    for layer in range(-3, 3):
        assert torch.equal(table.layer(ids, layer), table(ids)[:, :, layer])
    table.layer(ids, 1).sum().backward()
    assert bool((table.weight.grad != 0).any(0).view(3, 16)[1].all())
    assert not bool((table.weight.grad != 0).any(0).view(3, 16)[::2].any())
    refused((lambda: table.layer(ids, 3), IndexError, "index: expected -3 to 2, got 3"))


class Tokenizer:
    """As transformers' are called: a list of texts, of which one is a part of a character."""

    texts = ("Apple", " apple", "APPLE \n", "\u00c4pple", "ﬁg", "fig", " ", "\t\n ", "", "\ufffd", "a\ufffd", "\u0301", "e", "\ue000")  # fmt: skip

    def __len__(self) -> int:
        return len(self.texts)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return self.texts[ids[0]]

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token % 2}>"


def test_compressed_vocabulary_of_engram() -> None:
    """Case, accents, forms and white space are one; names tell parts of characters apart."""
    found = pe.NgramSpec.compressed_vocabulary(Tokenizer())
    #       Apple       fig   spaces "" <1><0> accent alone, e, U+E000 as a space
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 2]
    tokenizers = pytest.importorskip("tokenizers")
    words = {"the": 0, "The": 1, "\ufffd": 2, "thé": 3}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    assert pe.NgramSpec.compressed_vocabulary(fast).tolist() == [0, 0, 1, 0]
