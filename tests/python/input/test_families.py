"""Compares InputEmbedding.from_huggingface with the models' code: outputs, gradients, padding."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.refusals import refused
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

ROWS, PADDING = 29, 1
SMALL: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
    "pad_token_id": PADDING,
}
OPT: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 16,
    "max_position_embeddings": 24,
}
FAIRSEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 24,
    "pad_token_id": PADDING,
    "dropout": 0.0,
    "encoder_layerdrop": 0.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SMALL),
    "roberta": ("Roberta", SMALL),
    "roberta-padding-0": ("Roberta", {**SMALL, "pad_token_id": 0}),
    "roberta-one-type": ("Roberta", {**SMALL, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", SMALL),
    "camembert": ("Camembert", SMALL),
    "electra": ("Electra", {**SMALL, "embedding_size": 16}),
    "electra-one-size": ("Electra", {**SMALL, "embedding_size": 32}),
    "albert": ("Albert", {**SMALL, "embedding_size": 16}),
    "distilbert": ("DistilBert", {"vocab_size": ROWS, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 24}),
    "gpt2": ("GPT2", {"vocab_size": ROWS, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 24}),
    "opt": ("OPT", {**OPT, "word_embed_proj_dim": 32}),
    "opt-projected": ("OPT", {**OPT, "word_embed_proj_dim": 16}),
    "m2m_100": ("M2M100", {**FAIRSEQ, "vocab_size": ROWS}),
    "m2m_100-unscaled": ("M2M100", {**FAIRSEQ, "vocab_size": ROWS, "scale_embedding": False}),
    "nllb-moe": ("NllbMoe", {**FAIRSEQ, "vocab_size": ROWS, "num_experts": 2}),
    "fsmt": ("FSMT", {**FAIRSEQ, "src_vocab_size": ROWS, "tgt_vocab_size": 31}),
}  # fmt: skip


def small(name: str) -> nn.Module:
    """A model in which all parameters are random, because initial ones and zeros hide mistakes."""
    torch.manual_seed(0)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    for module in model.modules():  # FSMT's sinusoids are a parameter
        if type(module).__name__ == "SinusoidalPositionalEmbedding":
            module.make_weight(*module.weight.shape, module.padding_idx)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Ids with padding before, after and between tokens, and their mask."""
    ids = torch.randint(2, ROWS, (4, 9), generator=torch.Generator().manual_seed(1))
    ids[0, 6:] = ids[1, :3] = ids[2, 4] = PADDING
    return ids, ids.ne(PADDING).long()


def theirs(model: Any, ids: Tensor | None, mask: Tensor, **options: Any) -> Tensor:
    """The input of the first block, or of the encoder's, in the family's own code."""
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        model = model.encoder
    taken: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        taken.append(args[0] if args else kwargs["hidden_states"])

    block = next(module for name, module in model.named_modules() if name.endswith(BLOCKS))
    with block.register_forward_pre_hook(take, with_kwargs=True):
        model(ids, attention_mask=mask, **options)
    # FSMT has the sequence first.
    return taken[0].transpose(0, 1) if family == "fsmt" else taken[0]


BLOCKS = ("layer.0", "layers.0", "h.0", "albert_layer_groups.0")


def ours(embed: pe.InputEmbedding, ids: Tensor, mask: Tensor) -> Tensor:
    return embed(ids, attention_mask=mask if embed.position_rule == "opt" else None)


def paired(embed: pe.InputEmbedding, model: Any) -> list[tuple[str, Tensor, Tensor]]:
    """Parameters paired with their sources."""
    named = {tuple(value.flatten()[:6].tolist()): value for value in model.parameters()}
    return [(name, value, named[tuple(value.flatten()[:6].tolist())]) for name, value in embed.named_parameters()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_of_padded_batches(name: str, training: bool) -> None:
    model = small(name).train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    embed = pe.InputEmbedding.from_huggingface(model)
    assert embed.training == training
    ids, mask = batch()
    expected, result = theirs(model, ids, mask), ours(embed, ids, mask)
    scale = float(expected.detach().abs().max())
    assert_close(result, expected, 2e-6 * max(1.0, scale))
    gradient = torch.randn_like(expected)
    expected.backward(gradient), result.backward(gradient)
    parameters = paired(embed, model)
    assert len(parameters) == len(list(embed.parameters()))
    for key, mine, other in parameters:
        assert mine.grad is not None, key
        assert other.grad is not None, key
        scale = float(other.grad.abs().max())
        assert_close(mine.grad, other.grad, 4e-6 * max(1.0, scale))


def test_gradients_of_padding_rows_are_those_of_the_family() -> None:
    ids, mask = batch()
    roberta = pe.InputEmbedding.from_huggingface(small("roberta"))
    roberta(ids).square().sum().backward()
    assert not roberta.position.weight.grad[PADDING].any()
    assert roberta.position.weight.grad[PADDING + 1].any()
    opt = pe.InputEmbedding.from_huggingface(small("opt"))
    opt(ids, attention_mask=mask).square().sum().backward()
    assert opt.position.weight.grad[1].any()


@pytest.mark.parametrize("name", ["roberta", "opt", "m2m_100"])
def test_decoding_with_a_cache_counts_on(name: str) -> None:
    embed = pe.InputEmbedding.from_huggingface(small(name)).eval()
    ids = torch.randint(2, ROWS, (2, 6))
    mask = torch.ones_like(ids)
    if name == "opt":  # left padding
        mask[1, :2] = 0
    whole = ours(embed, ids, mask)
    options = {"attention_mask": mask} if name == "opt" else {}
    step = embed(ids[:, 5:], offset=5, **options)
    assert torch.equal(step, whole[:, 5:])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "fsmt"])
def test_vectors_instead_of_ids(name: str) -> None:
    """FSMT alone scales them."""
    model = small(name).eval()
    embed = pe.InputEmbedding.from_huggingface(model)
    _, mask = batch()
    if embed.position_rule != "opt":
        mask = torch.ones_like(mask)
    width = embed.token.embedding_dim
    vectors = torch.randn(4, 9, width, generator=torch.Generator().manual_seed(2))
    mine, other = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    expected = theirs(model, None, mask, inputs_embeds=other)
    options = {"attention_mask": mask} if embed.position_rule == "opt" else {}
    result = embed(inputs_embeds=mine, **options)
    assert_close(result, expected, 4e-6)
    gradient = torch.randn_like(expected)
    expected.backward(gradient), result.backward(gradient)
    assert_close(mine.grad, other.grad, 4e-6)


def test_sinusoids_of_fairseq_follow_the_padding() -> None:
    embed = pe.InputEmbedding(ROWS, 8, positions="sinusoidal", padding_idx=-1, position_rule="roberta")
    assert embed.position.spec == pe.SinusoidalSpec(8, preset="fairseq", padding_idx=ROWS - 1)
    with_dropout = small("m2m_100")
    with_dropout.encoder.dropout = 0.25
    assert pe.InputEmbedding.from_huggingface(with_dropout).dropout == 0.25


def test_second_derivatives_leave_padding_out() -> None:
    embed = pe.InputEmbedding(
        ROWS, 8, max_positions=12, padding_idx=PADDING, position_rule="roberta", norm="layer"
    ).double()
    other = copy.deepcopy(embed)
    ids, _ = batch()
    positions = pe.functional.roberta_positions(ids, PADDING) + 2
    rows = nn.functional.embedding(positions, other.position.weight, padding_idx=PADDING)
    plain = other.norm(other.token(ids) + rows)
    penalties = []
    for module, output in ((embed, embed(ids)), (other, plain)):
        grads = torch.autograd.grad(output.pow(3).sum(), list(module.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        penalty.backward()
        penalties.append(penalty)
    assert_close(penalties[0], penalties[1], 1e-12 * float(penalties[1].detach()))
    for mine, theirs_ in zip(embed.parameters(), other.parameters(), strict=True):
        assert_close(mine.grad, theirs_.grad, 1e-10 * max(1.0, float(theirs_.grad.abs().max())))


def test_dropout_names_and_types_come_along() -> None:
    embed = pe.InputEmbedding.from_huggingface(small("roberta-one-type"))
    assert embed.dropout == 0.1
    assert embed.position.max_positions == 22
    assert embed.token.padding_idx == PADDING
    assert not pe.InputEmbedding.from_huggingface(small("electra-one-size")).projection
    albert = pe.InputEmbedding.from_huggingface(small("albert"))
    assert list(albert.state_dict())[-2:] == ["projection.weight", "projection.bias"]


def test_saved_models_and_models_with_a_head(tmp_path) -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**MODELS["gpt2"][1])).eval()
    ids, mask = batch()
    expected = theirs(model, ids, mask)
    assert_close(pe.InputEmbedding.from_huggingface(model)(ids), expected, 2e-6)
    model.base_model.save_pretrained(tmp_path)
    assert_close(pe.InputEmbedding.from_huggingface(tmp_path).eval()(ids), expected, 2e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_are_read_as_models_are(name: str, shards: int, tmp_path: Path) -> None:
    """The folder by the code of C++, the model by that of Python."""
    model = small(name).eval()
    total = sum(value.numel() * 4 for value in model.state_dict().values())
    model.save_pretrained(tmp_path, max_shard_size=total // shards + 1)
    by_folder = pe.InputEmbedding.from_huggingface(tmp_path)
    by_model = pe.InputEmbedding.from_huggingface(model)
    assert repr(by_folder) == repr(by_model)
    assert not by_folder.training
    ids, mask = batch()
    assert torch.equal(ours(by_folder, ids, mask), ours(by_model, ids, mask))
    for key, mine in by_folder.named_parameters():
        assert mine.requires_grad, key
        assert torch.equal(mine, by_model.get_parameter(key)), key


@pytest.mark.parametrize("name", MODELS)
def test_keys_that_a_file_lacks_have_the_values_of_the_class(name: str, tmp_path: Path) -> None:
    model = small(name).eval()
    model.save_pretrained(tmp_path)
    kind = type(model.config)
    file = tmp_path / "config.json"
    sizes = {key: value for key, value in MODELS[name][1].items() if key != "pad_token_id"}
    file.write_text(json.dumps({"model_type": kind.model_type}))
    embed = pe.InputEmbedding.from_huggingface(tmp_path)
    model.config = kind(**{key: value for key, value in sizes.items() if key != "dropout"})
    expected = pe.InputEmbedding.from_huggingface(type(model)(model.config))
    assert (embed.dropout, embed.token.padding_idx) == (expected.dropout, expected.token.padding_idx)
    assert embed.norm is None or embed.norm.eps == expected.norm.eps


def test_folders_are_read_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("bert").half().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert pe.InputEmbedding.from_huggingface(tmp_path).token.weight.dtype == torch.float16
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert", "position_embedding_type": "relative_key"}))
    refused((lambda: pe.InputEmbedding.from_huggingface(tmp_path), ValueError, "position_embedding_type: expected 'absolute', got 'rel"))  # fmt: skip


def test_other_families_are_refused() -> None:
    model = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=ROWS, d_model=8, num_layers=1, num_heads=1, d_kv=8, d_ff=8)
    )
    refused((lambda: pe.InputEmbedding.from_huggingface(model), ValueError, "opt, m2m_100, nllb-moe, fsmt, got 't5'"))  # fmt: skip


@pytest.mark.parametrize("other", [None, 3, nn.Linear(2, 2)], ids=["None", "3", "Linear"])
def test_what_is_no_model_is_refused(other: object) -> None:
    refused((lambda: pe.InputEmbedding.from_huggingface(other), TypeError, "model_or_path: expected a transformers model or its name"))  # fmt: skip


def test_opts_decoder_serves_as_well() -> None:
    model = small("opt").eval()
    ids, _ = batch()
    found, expected = map(pe.InputEmbedding.from_huggingface, (model.decoder, model))
    assert torch.equal(found(ids), expected(ids))


def test_the_mode_and_frozen_parameters_are_kept() -> None:
    model = small("bert").eval()
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    embed = pe.InputEmbedding.from_huggingface(model)
    assert not embed.training
    assert not embed.token.weight.requires_grad
    assert embed.norm.weight.requires_grad
    ids, _ = batch()
    embed(ids).sum().backward()
    assert embed.token.weight.grad is None
    shared = model.get_input_embeddings().weight.data_ptr()
    assert embed.token.weight.data_ptr() != shared


# ----------------------------------------------------------------------------- positions among padding


def test_positions_can_be_given_whatever_the_rule() -> None:
    embed = pe.InputEmbedding.from_huggingface(small("roberta")).eval()
    ids, _ = batch()
    positions = pe.functional.roberta_positions(ids, PADDING)
    assert torch.equal(embed(ids), embed(ids, positions=positions))


def test_opt_without_a_mask_counts_all() -> None:
    embed = pe.InputEmbedding.from_huggingface(small("opt")).eval()
    ids, mask = batch()
    assert torch.equal(embed(ids), embed(ids, attention_mask=torch.ones_like(mask)))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("position_rule: expected 'consecutive', 'roberta'", {"position_rule": "bert"}),
        ("padding_idx: expected an id", {"position_rule": "roberta"}),
        ("position_rule: expected 'consecutive' or 'roberta' without learned positions, got 'opt'", {"position_rule": "opt", "positions": "sinusoidal", "max_positions": None}),
        ("position_rule: expected 'consecutive' without positions, got 'roberta'", {"position_rule": "roberta", "positions": None, "max_positions": None}),
        ("max_positions: expected none without learned positions, got 5", {"positions": None}),
        ("token_dim: expected 0 or more, got -2", {"token_dim": -2}),
        ("output_dim: expected 0 or more, got -2", {"output_dim": -2}),
        ("output_dim: expected none beside", {"token_dim": 4, "output_dim": 4}),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(message: str, options: dict[str, Any]) -> None:
    for kind in (pe.InputEmbedding, pe.cpp.InputEmbedding):
        refused((lambda: kind(ROWS, 8, **{"max_positions": 5, **options}), ValueError, message))


def test_arguments_that_do_not_fit() -> None:
    ids, mask = batch()
    for kind in (pe.InputEmbedding, pe.cpp.InputEmbedding):
        bert = kind(ROWS, 8, max_positions=12)
        refused((lambda: bert(ids, attention_mask=mask), ValueError, "attention_mask: expected none unless"))  # fmt: skip
        opt = kind(ROWS, 8, max_positions=12, position_rule="opt")
        refused(
            (lambda: opt(ids, positions=torch.arange(9), attention_mask=mask), ValueError, "attention_mask: expected none unless"),
            (lambda: opt(ids, attention_mask=mask, offset=3), ValueError, "attention_mask: expected .* offset + seq 12, got"),
            (lambda: opt(ids, positions=torch.arange(9), offset=2), ValueError, "offset: expected 0 where positions are given"),
        )  # fmt: skip
    refused((lambda: pe.functional.input_embedding(ids, torch.zeros(ROWS, 8), torch.zeros(12, 8), position_padding_idx=0), ValueError, "position_padding_idx: expected -1"))  # fmt: skip
