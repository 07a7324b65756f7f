"""Tests of positions of images, videos and audio, beside transformers' own."""

import dataclasses
import random

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from published import rope_index
from support.refusals import refused

# Transformers computes Qwen3-Omni's positions in float32, sum by sum; posembed rounds once.
TOLERANCE = 1e-6
PROMPTS = 6  # of three samples each, for every model


@pytest.mark.parametrize("model_type", rope_index.CLASSES)
def test_equals_transformers(model_type: str) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    model = rope_index.model_of(model_type)
    rule = pe.positions.MropeRule.from_huggingface(model.config)
    if model_type in ("ernie4_5_vl_moe", "paddleocr_vl"):  # which are trained otherwise
        assert rule.time_advances
        rule = dataclasses.replace(rule, time_advances=False)
    for seed in range(PROMPTS):
        writer = rope_index.Writer(rule, model, random.Random(seed))
        prompt = writer.write(batch=3)
        wanted, wanted_delta = rope_index.expected(model_type, model, prompt, rule)
        positions, delta = pe.positions.mrope(
            prompt.ids,
            rule=rule,
            image_grids=rope_index.tensor_of(prompt.images),
            video_grids=rope_index.tensor_of(prompt.videos),
            seconds_per_grid=rope_index.tensor_of(prompt.seconds, torch.float32)
            if rule.time != "index" and model_type != "paddleocr_vl"
            else None,
            audio_lengths=rope_index.tensor_of(prompt.audios),
            attention_mask=prompt.mask,
        )
        assert positions.dtype == wanted.dtype
        assert torch.allclose(positions, wanted, rtol=TOLERANCE, atol=0), (seed, prompt)
        if model_type != "glm_image":  # which returns 0, and keeps positions for its generation
            assert torch.allclose(delta, wanted_delta, rtol=TOLERANCE, atol=1e-4), (seed, prompt)


def trained_positions(
    ids: list[int], items: list[tuple[int, int, int, float]], placeholders: set[int]
) -> tuple[torch.Tensor, int]:
    """The numbering that models were trained with: text goes on after the largest number so far.

    As vLLM counts (get_mrope_input_positions of ernie45_vl.py, paddleocr_vl.py and qwen2_vl.py),
    and ERNIE's own processor. ``items`` are tokens along time, height and width, and positions
    between two frames.
    """
    columns: list[tuple[int, int, int]] = []
    place, left = 0, iter(items)
    while place < len(ids):
        largest = max((max(column) for column in columns), default=-1)
        if ids[place] not in placeholders:
            columns.append((largest + 1,) * 3)
            place += 1
            continue
        frames, height, width, seconds = next(left)
        for index in range(frames * height * width):
            frame, cell = divmod(index, height * width)
            offsets = (int(frame * seconds), *divmod(cell, width))
            columns.append(tuple(largest + 1 + each for each in offsets))  # type: ignore[arg-type]
        place += frames * height * width
    largest = max(max(column) for column in columns)
    return torch.tensor(columns).T, largest + 1 - len(ids)


TRAINED = {
    "ernie4_5_vl_moe": {"model_type": "ernie4_5_vl_moe", "vision_config": {"temporal_merge_size": 2}},
    "paddleocr_vl": {"model_type": "paddleocr_vl", "vision_config": {"tokens_per_second": 2}},
    "qwen2_vl_trained": None,
    "qwen2_5_vl_trained": None,
}


@pytest.mark.parametrize("name", TRAINED)
def test_text_after_videos_is_numbered_as_in_training(name: str) -> None:
    config, draw = TRAINED[name], random.Random(0)
    rule = pe.positions.rules()[name]
    assert rule.time_advances
    if config is not None:
        rule = pe.positions.MropeRule.from_huggingface(config)
        assert rule.time_advances
    plain, differing = dataclasses.replace(rule, time_advances=False), 0
    for _ in range(100):
        ids, items, grids, seconds = [5], [], {True: [], False: []}, []
        for _ in range(draw.randint(1, 4)):
            is_video, merge = draw.random() < 0.6, rule.spatial_merge
            frames = draw.randint(1, 8) if is_video else 1
            height, width = draw.randint(1, 3), draw.randint(1, 3)
            of_time = frames * rule.temporal_merge if is_video else 1
            grids[is_video].append([of_time, height * merge, width * merge])
            speed = 1.0
            if is_video and rule.time != "index":
                seconds.append(draw.choice([0.5, 1.0, 2.0]))
                speed = seconds[-1] * rule.positions_per_second
            items.append((frames, height, width, speed))
            token = rule.video_token if is_video else rule.image_token
            ids += [token] * (frames * height * width) + [7] * draw.randint(1, 3)  # type: ignore[list-item]
        options = {
            "image_grids": rope_index.tensor_of(grids[False]),
            "video_grids": rope_index.tensor_of(grids[True]),
            "seconds_per_grid": torch.tensor(seconds) if seconds else None,
        }
        tokens = torch.tensor([ids])
        found, delta = pe.positions.mrope(tokens, rule=rule, **options)
        wanted = trained_positions(ids, items, {rule.image_token, rule.video_token})  # type: ignore[arg-type]
        assert torch.equal(found[:, 0], wanted[0])
        assert delta.item() == wanted[1]
        differing += not torch.equal(found, pe.positions.mrope(tokens, rule=plain, **options)[0])
    assert differing > 10  # of transformers' numbering


def image_prompt(tokens: int = 6, text: int = 2) -> torch.Tensor:
    return torch.tensor([[1] * text + [151655] * tokens + [2] * text])


GRIDS = torch.tensor([[1, 4, 6]])


def test_an_image_between_text() -> None:
    positions, delta = pe.positions.mrope(image_prompt(), rule="qwen2_vl", image_grids=GRIDS)
    assert positions[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta.tolist() == [[-3]]


def test_generation_goes_on_by_delta() -> None:
    """A longer prompt has the positions that delta gives to its last tokens."""
    ids = image_prompt(text=5)
    whole, _ = pe.positions.mrope(ids, rule="qwen3_vl", image_grids=GRIDS)
    _, delta = pe.positions.mrope(ids[:, :-3], rule="qwen3_vl", image_grids=GRIDS)
    expected = torch.arange(ids.shape[1] - 3, ids.shape[1]) + delta
    assert torch.equal(whole[:, :, -3:], expected.expand(3, -1, -1))


def test_items_side_by_side() -> None:
    """Placeholders without text between belong to items by their grids."""
    ids, grids = image_prompt(tokens=10, text=1), torch.tensor([[1, 4, 6], [1, 4, 4]])
    positions, _ = pe.positions.mrope(ids, rule="qwen2_vl", image_grids=grids)
    assert positions[2, 0].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, 4, 5, 6]
    assert positions[0, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 6]


@pytest.mark.parametrize("time", ["interval", "elapsed", "exact"])
def test_times_are_rounded_as_models_do(time: str) -> None:
    seconds, frames = torch.tensor([0.04]), torch.arange(8)
    rule = pe.MropeRule(video_token=7, spatial_merge=1, time=time, positions_per_second=25)
    positions, _ = pe.positions.mrope(
        torch.full((1, 8), 7), rule=rule, video_grids=torch.tensor([[8, 1, 1]]), seconds_per_grid=seconds
    )
    elapsed = frames * seconds * 25
    expected = {"interval": (frames * (seconds * 25)).long(), "elapsed": elapsed.long()}
    assert not torch.equal(*expected.values())
    assert torch.equal(positions[0, 0], {**expected, "exact": elapsed}[time])


def test_given_types_replace_ids() -> None:
    ids = image_prompt()
    types = ids.eq(151655).long()
    expected = pe.positions.mrope(ids, rule="qwen2_vl", image_grids=GRIDS)
    result = pe.positions.mrope(torch.zeros_like(ids), rule="qwen2_vl", image_grids=GRIDS, token_types=types)
    assert all(map(torch.equal, result, expected))


def test_text_alone_and_no_tokens() -> None:
    for rule in pe.positions.rules().values():
        if rule.canvas:  # its name alone has no ids
            refused((lambda: pe.positions.mrope(torch.ones(2, 4, dtype=torch.int32), rule=rule), ValueError, "rule: expected one with the ids of its canvas"))  # fmt: skip
            rule = dataclasses.replace(rule, canvas=range(90, 95))
        positions, delta = pe.positions.mrope(torch.ones(2, 4, dtype=torch.int32), rule=rule)
        assert torch.equal(positions, torch.arange(4).expand_as(positions).to(positions.dtype))
        assert delta.tolist() == [[0], [0]]
        positions, delta = pe.positions.mrope(torch.ones(2, 0, dtype=torch.int64), rule=rule)
        assert positions.shape[1:] == (2, 0)
        assert delta.tolist() == [[0], [0]]


VIDEO = {"video_grids": torch.tensor([[2, 4, 4]]), "seconds_per_grid": torch.ones(1)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image_grids": None}, ValueError, "image_grids: expected 6 tokens, .* got 0"),
        ({"image_grids": torch.tensor([[1, 4, 4]])}, ValueError, "image_grids: expected 6 tokens, the placeholders of images in ids, got 4"),
        ({"image_grids": torch.cat([GRIDS, torch.tensor([[2**32, 2**33, 2]])])}, ValueError, "image_grids: expected fewer than 2^53 tokens"),  # 6, by products that wrap
        ({"image_grids": GRIDS[0]}, ValueError, r"image_grids: expected \[items, 3\]"),
        ({"image_grids": GRIDS.float()}, TypeError, "image_grids: expected int32 or int64"),
        ({"image_grids": torch.tensor([[1, 1, 6]])}, ValueError, "image_grids: expected a token or more"),
        ({"ids": torch.tensor([[151655] * 3 + [5] + [151655] * 3])}, ValueError, "image_grids: .*number 0 of the images side by side, .*token 4 of sample 0"),
        ({"video_grids": GRIDS}, ValueError, "video_grids: expected 0 tokens"),
        (VIDEO, ValueError, "seconds_per_grid: expected none"),
        ({**VIDEO, "rule": "qwen2_5_vl"}, ValueError, "video_grids: expected 0 tokens"),
        ({"rule": "qwen2_5_vl", "seconds_per_grid": torch.ones(2)}, ValueError, "seconds_per_grid: expected a number for each video"),
        ({"rule": "qwen2_5_vl", **VIDEO, "seconds_per_grid": torch.tensor([float("nan")])}, ValueError, "seconds_per_grid: expected finite numbers of at least 0, got nan"),
        ({"token_types": torch.full((1, 10), 4)}, ValueError, "token_types: expected 0 to 3, got 4"),
        ({"attention_mask": torch.ones(1, 3)}, TypeError, "attention_mask: expected bool or"),
        ({"attention_mask": torch.ones(1, 3).bool()}, ValueError, "attention_mask: expected the shape of ids"),
        ({"ids": torch.ones(3).long()}, ValueError, r"ids: expected \[batch, seq\]"),
        ({"ids": torch.ones(1, 3)}, TypeError, "ids: expected int32 or int64"),
        ({"rule": "llama"}, ValueError, "rule: expected one of .*'qwen2_vl'.*, got 'llama'"),
        ({"rule": "qwen2_5_omni", "audio_lengths": torch.tensor([40])}, ValueError, "audio_lengths: expected 0 tokens, the placeholders of audios in ids, got 10"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"ids": image_prompt(), "rule": "qwen2_vl", "image_grids": GRIDS, **change}
    refused((lambda: pe.positions.mrope(arguments.pop("ids"), **arguments), error, message))


def prompts(token: int, images: int, tokens: int, text: int) -> list[torch.Tensor]:
    """Ids, grids and mask: a sample with images, and one without."""
    row = ([1] * text + [token] * tokens) * images
    ids = torch.tensor([[*row, 0, 0], [0, 0] + [2] * len(row)])
    return [ids, GRIDS.repeat(images, 1), ids.ne(0)]


def test_compiled() -> None:
    """One graph serves all lengths and numbers of images; the rotation refuses misfits."""

    def run(ids: torch.Tensor, grids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        found = pe.positions.mrope(ids, rule="qwen2_vl", image_grids=grids, attention_mask=mask)
        return list(found)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for images, text in ((5, 3), (4, 5)):
        given = prompts(151655, images, 6, text)
        assert all(map(torch.equal, compiled(*given), run(*given)))
    ids, grids, mask = prompts(151655, 3, 6, 3)
    positions, delta = compiled(ids, grids.repeat(2, 1), mask)
    assert counter.frame_count == 1
    rope = pe.RotaryEmbedding(16, sections=pe.Sections((2, 3, 3)))
    for misfit in (positions, (ids.shape[1] + delta).expand(3, 2, ids.shape[1])):
        refused((lambda: rope(torch.ones(*ids.shape, 1, 16), positions=misfit), IndexError, "positions: expected"))  # fmt: skip


class Hunyuan(torch.nn.Module):
    def forward(self, ids: torch.Tensor, grids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rule = "hunyuan_vl"
        return pe.positions.mrope(ids, rule=rule, image_grids=grids, attention_mask=mask)[0]


def test_exported() -> None:
    auto, token = torch.export.Dim.AUTO, pe.positions.rules()["hunyuan_vl"].image_token
    shapes = ({0: auto, 1: auto}, {0: auto}, {0: auto, 1: auto})
    given = prompts(token, 3, 10, 3)  # two rows of a token more than columns, and margins
    program = torch.export.export(Hunyuan(), tuple(given), dynamic_shapes=shapes)
    other = prompts(token, 4, 10, 5)
    assert torch.equal(program.module()(*other), Hunyuan()(*other))


def test_copies_at_once() -> None:
    given = torch.stack(prompts(151655, 3, 6, 3)[:1] * 2)
    grids = GRIDS.repeat(3, 1)

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(pe.positions.mrope(ids, rule="qwen3_omni_moe", image_grids=grids))

    expected = run(given[0])
    for result, wanted in zip(torch.func.vmap(run)(given), expected, strict=True):
        assert torch.equal(result, torch.stack([wanted, wanted]))
    given[1, 0, -3] = 9  # one placeholder less
    positions, delta = torch.func.vmap(run)(given)
    assert torch.equal(positions[0], expected[0])
    assert bool(positions[1].isnan().all())
    assert bool(delta[1].isnan().all())


def test_rules_are_texts_and_objects() -> None:
    for name, rule in pe.positions.rules().items():
        assert pe.positions.MropeRule.from_json(rule.to_json()) == rule
        assert pe.positions.MropeRule.from_json(name) == rule
    refused(
        (lambda: pe.positions.MropeRule(spatial_merge=0), ValueError, "spatial_merge: expected 1 or more"),
        (lambda: pe.positions.MropeRule(time="seconds"), ValueError, "time: expected 'index', 'interval', 'elapsed' or"),
        (lambda: pe.positions.MropeRule.from_json('{"merge": 2}'), ValueError, "MropeRule: unknown key 'merge'; known are: image_token"),
        (lambda: pe.positions.MropeRule.from_json('{"axes": 3.5}'), ValueError, "MropeRule: axes: expected a whole number, got 3.5"),
    )  # fmt: skip


def test_numbers_of_a_configuration() -> None:
    vision = {"spatial_merge_size": 3}
    thinker = {
        "audio_token_id": 9,
        "vision_config": vision,
        "position_id_per_seconds": 7,
        "audio_config": {"n_window": 30},
    }
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    rule = pe.positions.MropeRule.from_huggingface(config)
    assert rule.spatial_merge == 3
    assert (rule.audio_token, rule.positions_per_second, rule.audio_chunk) == (9, 7.0, 60)
    refused(
        (lambda: pe.positions.MropeRule.from_huggingface({"model_type": "qwen2_vl", "image_token_id": "<image>"}), ValueError, "image_token_id: expected a number"),
        (lambda: pe.positions.MropeRule.from_huggingface({"model_type": "llama"}), ValueError, "model_type: expected 'cohere_compass', .* or 'qwen4_exp', got 'llama'"),
    )  # fmt: skip


def test_rows_of_hy_v4_vl() -> None:
    """The numbers in its get_rope_index of transformers 5.24: two frames of 2 rows of 3 tokens."""
    config = {"model_type": "hy_v4_vl", "video_token_id": 7, "vision_config": {"spatial_merge_size": 2}}  # fmt: skip
    rule = pe.positions.MropeRule.from_huggingface(config)
    assert pe.describe(config)["mrope"]["separate_frames"] is True
    ids = torch.tensor([[7] * 12 + [1]])
    found, _ = pe.positions.mrope(ids, rule=rule, video_grids=torch.tensor([[2, 4, 4 + 2]]))
    expected = [
        [0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 6],
        [0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4, 6],
        [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6],
    ]
    assert found[:, 0].tolist() == expected
    with pytest.raises(ValueError, match="video_grids"):  # not widened
        pe.positions.mrope(ids, rule=rule, video_grids=torch.tensor([[2, 4, 4]]))
