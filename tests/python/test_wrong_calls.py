"""Calls that people make out of habit, and the facts that each message must name.

A row is the call as one writes it, and the facts: pieces of the message, in any order.
"""

import os
import tempfile
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from posembed.glue import other_names

R, S, L = pe.RotaryEmbedding, pe.SinusoidalPositionalEmbedding, pe.LearnedPositionalEmbedding
I, T, A = pe.InputEmbedding, pe.TokenEmbedding, pe.ALiBi  # noqa: E741
B, N, Bag, F = pe.RelativePositionBias, pe.RotarySpec, pe.TokenBag, pe.functional
CONFIG = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, "num_attention_heads": 8, "num_key_value_heads": 2}


class Given:
    """What the calls use, by the names that stand in the rows."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.q, self.k = torch.randn(2, 10, 8, 64), torch.randn(2, 10, 2, 64)
        self.rope = R(64)
        self.ids, self.x = torch.randint(100, (2, 10)), torch.randn(2, 10, 64)
        self.embed = I(100, 64, max_positions=32, num_types=2)
        self.token, self.bag, self.alibi = T(100, 64), Bag(100, 64), A(8)
        self.learned, self.waves, self.bias = L(32, 64), S(64), B(8)
        self.scores, self.pos = torch.zeros(2, 8, 10, 10), torch.arange(10)
        np.arange(200).tofile(os.path.join(folder, "ids.bin"))
        np.save(os.path.join(folder, "floats.npy"), np.arange(9.0))
        np.save(os.path.join(folder, "square.npy"), np.ones((3, 3), dtype=np.int64))
        np.save(os.path.join(folder, "ids.npy"), np.arange(9))


# fmt: off
WRONG = """
pe.RoPE | posembed.RotaryEmbedding
pe.Rope(64) | posembed.RotaryEmbedding
pe.Rotary(64) | posembed.RotaryEmbedding
pe.RotaryPositionalEmbedding(64) | posembed.RotaryEmbedding
pe.RotaryPositionEmbedding(64) | posembed.RotaryEmbedding
pe.LlamaRotaryEmbedding | posembed.RotaryEmbedding
pe.precompute_freqs_cis(64, 10) | posembed.RotaryEmbedding
pe.apply_rotary_pos_emb(q, k) | posembed.functional.rotary_tables
pe.apply_rotary_emb(q, k) | posembed.functional.rotary_tables
pe.rotate_half(q) | posembed.functional.rotary_tables
pe.Alibi(8) | posembed.ALiBi
pe.ALIBI(8) | posembed.ALiBi
pe.build_alibi_tensor | posembed.ALiBi
pe.get_alibi_slopes(8) | posembed.functional.alibi_slopes
pe.PositionalEncoding(64) | posembed.SinusoidalPositionalEmbedding
pe.SinusoidalEmbedding(64) | posembed.SinusoidalPositionalEmbedding
pe.SinusoidalPositionalEncoding(64) | posembed.SinusoidalPositionalEmbedding
pe.LearnedPositionEmbedding(9, 64) | posembed.LearnedPositionalEmbedding
pe.PositionEmbedding(9, 64) | posembed.LearnedPositionalEmbedding
pe.Embedding(9, 64) | posembed.TokenEmbedding
pe.EmbeddingBag(9, 64) | posembed.TokenBag
pe.BertEmbeddings | posembed.InputEmbedding
pe.T5RelativePositionBias(8) | posembed.RelativePositionBias
pe.YaRN | posembed.YarnScaling
pe.RopeConfig | posembed.RotarySpec
R(64, 2048) | head_dim | 2048 | no maximum
R(64, 10000.0) | head_dim | 10000.0 | base=
R(64, "bhsd") | head_dim | 'bhsd' | layout
R(dim=64) | 'dim' | did you mean head_dim?
R(64, theta=1e4) | 'theta' | did you mean base?
R(64, rope_theta=1e4) | 'rope_theta' | did you mean base?
R(64, cosine=4) | RotaryEmbedding: no option 'cosine'. It has head_dim,
R(64, max_len=2048) | 'max_len' | no maximum
R(64, max_seq_len=2048) | 'max_seq_len' | no maximum
R(64, max_position_embeddings=2048) | no maximum
R(d_model=512) | 'd_model' | head_dim | d_model // num_heads
R(hidden_size=512) | 'hidden_size' | head_dim | num_attention_heads
R(64, rope_scaling=None) | 'rope_scaling' | did you mean scaling?
R(64, is_neox_style=True) | 'is_neox_style' | did you mean interleaved?
R(64, num_heads=8) | 'num_heads' | did you mean heads?
R(64, num_key_value_heads=2) | did you mean key_heads?
R(64, n_kv_heads=2) | did you mean key_heads?
R(64, qkv_format="bshd") | did you mean layout?
R(64, learnable=True) | did you mean learned_frequencies?
R(64, mrope_section=(8, 12, 12)) | did you mean sections?
R(64, layout="BHSD") | layout: expected | 'bhsd' | 'BHSD'
R(64, scaling=2.0) | scaling: expected | pe.LinearScaling(factor=2.0)
R(64, scaling="linear") | pe.LinearScaling(factor=…)
R(64, scaling="dynamic") | pe.DynamicNtkScaling(factor=…, original_max_positions=…)
R(64, scaling="unheard of") | pe.YarnScaling(factor, original_max_positions)
R(64, scaling={"rope_type": "linear", "factor": 2.0}) | pe.LinearScaling(factor=2.0)
R(64, scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}) | pe.YarnScaling(factor=4.0, original_max_positions=4096)
R(64, scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}) | pe.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
R(True) | head_dim: expected a whole number, got True
R(64, base=True) | base: expected a number, got True
R(64, base=10**400) | base: expected a number, got 1000
rope(q, k, offset=2**70) | offset: expected an int, got an int of more than 64 bits
T(100, 64, padding_idx=True) | padding_idx: expected a whole number, got True
R(64, base="ten") | base: expected | 'ten'
R(64, base=0.5) | base: expected | 0.5
R(64, base=float("nan")) | base: expected | nan
R(64, sections=(8, 12, 12)) | sections | pe.Sections((8, 12, 12))
R(64, sections=pe.Sections((8, 8, 8))) | sections | 32 | 24
R(N(64), base=5e5) | base | RotarySpec
R(N(64), spec=N(64)) | head_dim | both
R() | head_dim | neither
R({"head_dim": 64}) | head_dim | {'head_dim': 64}
N(64, theta=1e4) | RotarySpec | 'theta' | did you mean base?
N(64, 1e4) | RotarySpec | head_dim | 10000.0
N(64, rotary_pct=0.5) | did you mean rotary_dim?
N.from_preset("llama") | name | 'llama' | from_huggingface
N.from_preset("fluks") | name | 'fluks' | flux
N(64).explain("131072") | seq_len | '131072'
N(64).explain(1.5) | seq_len | 1.5
N(64).explain(0) | seq_len | positive | 0
N(64).diff(rope) | other | RotarySpec | RotaryEmbedding | spec
N(64).diff({"head_dim": 64}) | other | RotarySpec | dict
N(64).resolve("99") | seq_len | '99'
pe.YarnScaling(8192, 4.5) | original_max_positions | 4.5
pe.DynamicNtkScaling(4096, 2) | DynamicNtkScaling.factor | original_max_positions
pe.Llama3Scaling(8192, 1, 4, 8) | Llama3Scaling.factor | original_max_positions
pe.YarnScaling(4.0) | original_max_positions
pe.YarnScaling(4.0, original_max_position_embeddings=4096) | did you mean original_max_positions?
pe.LinearScaling(scale_factor=2.0) | did you mean factor?
pe.NtkScaling("four") | factor | 'four'
R(64, scaling=pe.LinearScaling(0)) | LinearScaling.factor | 0
R(64, scaling=pe.Llama3Scaling(8.0, 4.0, 1.0, 8192)) | high_freq_factor | low_freq_factor
rope(q, k, pos=pos) | 'pos' | did you mean positions?
rope(q, k, cache_position=pos) | 'cache_position' | did you mean positions?
rope(q=q, k=k) | 'q' | did you mean query?
rope(query_states=q) | 'query_states' | did you mean query?
rope(q, xk=k) | 'xk' | did you mean key?
rope(q, k, start_pos=3) | 'start_pos' | did you mean offset?
rope(q, k, past_key_values_length=3) | did you mean offset?
rope(q, k, seqlen_offset=3) | did you mean offset?
rope(q, k, layout="bhsd") | 'layout' | option of the module
rope(q, k, unsqueeze_dim=1) | layout=
rope(q, k, attention_mask=pos) | 'attention_mask' | padding
rope(q, k, cos=q, sin=q) | functional.rotary_tables
rope(q, k, cu_seq_lens=pos) | did you mean cu_seqlens?
rope(q, k, pos, 3) | query, key, positions | 3 | offset=
rope(q, k, torch.randn(2, 10, 2, 64)) | positions | [2, 10, 2, 64]
rope(q, k, pos.bool()) | positions | bool
rope(q, k, torch.full((10,), float("nan"))) | positions | nan | index 0
rope(q, k, pos / 0.0) | positions | finite | index 0
rope(q, k, offset="3") | offset | int | str
rope(q, k, offset=None) | offset | int | None
rope(q, k, inverse="no") | inverse | bool | str
rope(None, q) | query | Tensor | none
rope(q, k.to_sparse()) | key | strides
F.rotary(q, spec=N(64), layout=None) | layout | str | None
F.sinusoidal_shift_matrix("3", spec=pe.SinusoidalSpec(4)) | distance | float | str
pe.permute_rotary_weight([1], 1, to="interleaved") | weight | Tensor | list
rope(q, k, offset=torch.tensor([1, 2, 3])) | offset | [3] | batch 2
R(64, scaling=pe.DynamicNtkScaling(2.0, 4))(q, k, pos * float("nan"), seq_len=12) | positions | finite | nan
waves(x[:1], offset=1.5, cu_seqlens=torch.tensor([0, 10])) | offset | float
S(64, layout="sbd")(x, offset=1.5) | offset | float
rope(q, k, offset=pos[:2].half()) | offset | float16 | 2049
F.rotary(q, k, spec=N(64), layout="x", offset=pos[:2]) | layout | 'x'
alibi.attention(*[q.transpose(1, 2)] * 3, backend="flex", attention_mask=pos) | attention_mask | none | 'flex'
alibi.attention(*[q.transpose(1, 2)] * 3, backend="flash", query_offset=3) | query_offset | none | 'flash'
alibi.attention(*[q.transpose(1, 2)] * 3, backend="flex", sample_slopes=torch.ones(3, 8)) | sample_slopes | batch 2 | [3, 8]
rope(q, k, seq_len=torch.tensor([10, 10])) | seq_len | none | [2]
R(64, scaling=pe.DynamicNtkScaling(2.0, 4))(q, k, seq_len=12, offset=3) | seq_len | at least 13 | 12
R(64, scaling=pe.DynamicNtkScaling(2.0, 4))(q, k, pos + 5, seq_len=12) | seq_len | at least 15 | 12
R(64, scaling=pe.DynamicNtkScaling(2.0, 4)).rotate_(q, k, seq_len=4) | seq_len | at least 10 | 4
rope.rotate_(q, k, seq_len=10) | seq_len | none | 10
R.from_config(CONFIG, head_count=8) | 'head_count'
R.from_config("meta-llama/Llama-3.1-8B") | AutoConfig
R.from_config({**CONFIG, "model_type": "mymodel"}) | model_type | mymodel
R.from_config({**CONFIG, "rope_scaling": {"rope_type": "yarm", "factor": 2.0}}) | rope_type | yarm
rope(q.numpy()) | query | numpy | torch.from_numpy
rope(None) | query | None
S(64, 512) | embedding_dim | 512 | no maximum
S(64, max_len=512) | 'max_len' | no maximum
S(d_model=64) | 'd_model' | did you mean embedding_dim?
S(64, batch_first=False) | 'batch_first' | did you mean layout?
S(64, temperature=1e4) | did you mean base?
S(64, flip_sin_to_cos=True) | did you mean cos_first?
waves(torch.randn(2, 10, 32)) | x | 64 | 32
waves(x, position_ids=pos) | 'position_ids' | did you mean positions?
waves(x, pos, 3) | x, positions | 3 | offset=
waves(x, 3) | positions | int
waves([1.0]) | x | Tensor | list
waves(x, offset=0.5) | offset | int
waves(x, timesteps=pos) | positions
waves(hidden_states=x) | 'hidden_states' | did you mean x?
L(n_positions=9, n_embd=64) | did you mean max_positions?
L(9, d_model=64) | did you mean embedding_dim?
L(9, 64, 2) | max_positions, embedding_dim | 2
learned(ids) | x | float32 | int64
learned(x, [0, 1, 2]) | positions | Tensor | list
learned(x, past_length=3) | 'past_length' | did you mean offset?
learned(x[0]) | x | [10, 64]
embed(ids, ids * 0) | ids | positions= | types=
embed(ids, None, ids * 0) | types=
embed(ids, segment_ids=ids * 0) | 'segment_ids' | did you mean types?
embed(ids, mask=ids) | 'mask' | did you mean attention_mask?
embed(tokens=ids) | 'tokens' | did you mean ids?
embed(ids, input_ids=ids) | input_ids | ids
embed(ids, positions=pos, position_ids=pos) | position_ids | positions
embed(ids, types=ids, token_type_ids=ids) | token_type_ids | types
embed(ids, attention_mask=ids) | attention_mask | position_rule
I(vocab_size=100, hidden_size=64) | 'vocab_size' | did you mean num_embeddings?
I(100, hidden_size=64) | 'hidden_size' | did you mean embedding_dim?
I(100, 64, 512) | num_embeddings, embedding_dim | 512 | max_positions=
I(100, 64, n_positions=32) | did you mean max_positions?
I(100, 64, max_positions=32, type_vocab_size=2) | did you mean num_types?
I(100, 64, max_positions=32, layer_norm_eps=1e-5) | did you mean eps?
I(100, 64, max_positions=32, hidden_dropout_prob=0.1) | did you mean dropout?
I(100, 64, max_positions=32, norm="LayerNorm") | norm | 'layer' | 'LayerNorm'
I(100, 64, positions="rope") | positions | 'learned' | 'rope'
F.input_embedding(ids, token.weight, eps=1e-5) | eps | norm
T(vocab_size=100, embedding_dim=64) | 'vocab_size' | did you mean num_embeddings?
T(100, d_model=64) | did you mean embedding_dim?
T(100, 64, pad_token_id=0) | did you mean padding_idx?
T(100, 64, sparse=True, gradient="dense") | gradient | 'rows' | sparse=True | 'dense'
T(100, 64, gradient="sparse") | gradient | 'sparse'
T(100, 64, scale="sqrt") | scale | 'sqrt'
T("100", 64) | num_embeddings | '100'
token(input_ids=ids) | 'input_ids' | did you mean ids?
token([1, 2]) | ids | list | torch.tensor
token(2) | ids | Tensor | int
token(ids.to_sparse()) | ids | strides
bag([[1, 2]]) | ids | Tensor | list
embed([[1]]) | ids | Tensor | list
Bag(vocab_size=9, embed_dim=4) | did you mean num_embeddings?
bag(indices=ids.flatten()) | 'indices' | did you mean ids?
bag(input=ids.flatten()) | 'input' | did you mean ids?
A(heads=8) | 'heads' | did you mean num_heads?
A(num_attention_heads=8) | did you mean num_heads?
A(8, alibi_bias_max=8) | did you mean max_bias?
A(8, is_causal=False) | did you mean causal?
A(8, 2048) | num_heads | 2048
A(8.5) | num_heads | 8.5
alibi(q_len=10) | 'q_len' | did you mean query_length?
alibi(10, position_ids=pos) | 'position_ids' | did you mean query_positions?
alibi(10, start_pos=3) | did you mean query_offset?
alibi(scores) | query_length | int | Tensor
alibi(4.0) | query_length | int | float
alibi(4, dtype="half") | dtype | torch.dtype | str
alibi.add_([1.0]) | scores | Tensor | list
alibi(10, attention_mask=torch.zeros(10)) | attention_mask | float32
alibi.add_(scores, casual=True) | ALiBi.add_: no argument 'casual'
alibi.softmax(scores, mask=pos) | ALiBi.softmax: no argument 'mask'; did you mean attention_mask?
alibi.attention(q, q, q, scales=1.0) | ALiBi.attention: no argument 'scales'; did you mean scale?
alibi.attention([1.0], q, q) | query | Tensor | list
pe.RelativeLogits(5, 64).add_(scores, q, mask=pos) | RelativeLogits.add_: no argument 'mask'
pe.RelativeLogits(5, 64)([1.0]) | query | Tensor | list
Bag.from_file(folder, key="a") | TokenBag.from_file: no argument 'key'
T.from_file(folder, learn=True) | TokenEmbedding.from_file | 'learn'
B(8, relative_attention_num_buckets=32) | did you mean num_buckets?
B(n_heads=8) | did you mean num_heads?
bias(qlen=10) | did you mean query_length?
bias(4.0) | query_length | int | float
pe.data.windows(folder + "/ids.bin", length=8) | dtype | int64 | every second
pe.data.open_ids(folder + "/ids.bin") | dtype | int64
pe.data.WindowDataset(folder + "/ids.bin", length=8) | dtype | int64
pe.data.windows(folder + "/floats.npy", length=2) | float64 | int64
pe.data.windows(folder + "/square.npy", length=2) | [3, 3]
pe.data.windows(folder + "/ids.npy", length=2, dtype=torch.int32) | dtype | int64 | int32
pe.data.windows([1, 2, 3], length=2) | ids | list | torch.tensor
pe.data.windows(pos, length=2.5) | length | 2.5
pe.plot.losses({"rope": [5.0, 4.0]}) | curves | 'rope' | steps | [5.0, 4.0]
pe.plot.losses({"rope": [5.0, 4.0, 3.0]}) | curves | 'rope' | steps
pe.plot.losses({"rope": ([1, 2, 3], [5.0, 4.0])}) | curves | 3 steps | 2 losses
pe.plot.grid(pe.positions.grid(2, 3, 4)) | positions | 2 frames
pe.analysis.float32_error(N(64), 0) | length | positive | 0
R(64, base="10000") | base | number | '10000'
A(8, max_bias="8") | max_bias | number | '8'
N.from_preset(5) | name | str | int
N.from_json(5) | spec | str | int
pe.NgramEmbedding(100, 64) | spec | NgramSpec | int
pe.MropeRule("qwen2_vl") | nothing by position | 'qwen2_vl'
pe.decompose(rope) | program | ExportedProgram | RotaryEmbedding | torch.export.export
pe.set_cache_limit("1") | bytes | '1'
pe.patch(5) | model | torch.nn.Module | int
pe.optim.in_backward(token, 5) | optimizer | posembed.optim | int
pe.optim.Adam(token.parameters(), betas=0.9) | betas | numbers | 0.9
pe.optim.Adam(token.parameters(), betas=(0.9,)) | betas | two numbers | (0.9,)
pe.optim.Adam(token.parameters(), betas=("0.9", 0.99)) | betas | number | '0.9'
T(100, 64, max_norm="1") | max_norm | number | '1'
T(100, 64, max_norm=-1.0) | max_norm | at least 0 | -1
T(100, 64, max_norm=1.0, norm_type=float("nan")) | norm_type | nan
T.from_pretrained(x[0], freeze="no") | freeze | True or False | 'no'
T.from_pretrained(x[0], freeze=None) | freeze | True or False | None
Bag.from_pretrained(x[0], freeze="no") | freeze | True or False | 'no'
Bag.from_pretrained(pos[:, None]) | embeddings | float32 | int64
L.from_pretrained(x[0], grid=(2, 5), freeze="no") | freeze | True or False | 'no'
L.from_pretrained([[1.0]], grid=(1, 1)) | embeddings | Tensor | list
pe.PerLayerEmbedding.from_pretrained(x[0], freeze="no", num_layers=2) | freeze | True or False | 'no'
pe.PerLayerEmbedding.from_pretrained(x, num_layers=2) | embeddings | [2, 10, 64]
pe.NgramEmbedding.from_pretrained([[1.0]], pe.NgramSpec.qwen4_exp(100, 1)) | weight | Tensor | list
T.from_file(folder + "/ids.npy", freeze="no") | freeze | True or False | 'no'
token.select(5) | rows | whole numbers | 5
token.prefetch([1]) | ids | Tensor | list
token.quantize("int8", block=True) | block | whole number | True
pe.QuantizedTable(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 8), block_columns=True) | block_columns | whole number | True
token.quantize("int8", block=0) | block | positive | 0
pe.RelativeLogits(33, 8, scale="1") | scale | number | '1'
pe.RelativeLogits(33.0, 8) | num_buckets | whole number | 33.0
R(64, learned_frequencies=True, frequency_sizes=8) | frequency_sizes | whole numbers | 8
pe.positions.grid(1, 2, 3, scale="2") | scale | number | '2'
pe.positions.grid(1, 2, 3, scale=True) | scale | number | True
pe.FourierFeatures(bands=(3,)) | bands | (n, rate) | (3,)
pe.FourierFeatures(random=8) | random | (axes, n, scale, seed) | 8
I(100, 64, max_positions=9, padding_idx=1, position_rule="opt")(ids, attention_mask=[[1]]) | attention_mask | Tensor | list
"""
# fmt: on
ROWS = [tuple(row.split(" | ")) for row in WRONG.strip().splitlines()]


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        yield {**globals(), **vars(Given(folder))}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_message_names_the_facts(row: tuple[str, ...], given: dict[str, Any]) -> None:
    call, *facts = row
    with pytest.raises((AttributeError, IndexError, TypeError, ValueError, OSError)) as caught:
        eval(call, given)
    message = str(caught.value)
    missing = [fact for fact in facts if fact not in message]
    assert not missing, message
    assert len(message) < 700
    assert "\n" not in message


def test_every_name_that_is_answered_with_exists() -> None:
    tables = other_names.tables()
    for name in (*tables["names"], *tables["scalings"]):
        found: Any = pe
        for part in name.split("."):
            found = getattr(found, part)
