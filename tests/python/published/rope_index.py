"""transformers' own numbering of images, videos and audio, and random prompts for it.

Each model's ``get_rope_index`` runs on an instance without parameters.
"""

import dataclasses
import importlib
import random
from typing import Any

import posembed as pe
import torch
from torch import Tensor

# Model type -> the class with get_rope_index; its module is that of the model type.
CLASSES = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "qwen4_exp": "Qwen4ExpModel",
    "qwen2_5_omni": "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm46v": "Glm46VModel",
    "glm_ocr": "GlmOcrModel",
    "glm_image": "GlmImageModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel",
    "paddleocr_vl": "PaddleOCRVLModel",
    "cohere_compass": "CohereCompassModel",
    "cosmos3_edge": "Cosmos3EdgeModel",
    "cosmos3_omni": "Cosmos3OmniModel",
    "hunyuan_vl": "HunYuanVLModel",
    "minicpmv4_7": "MiniCPMV4_7Model",
}
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
# Markers, as Qwen2.5-Omni's checkpoint has them.
VISION_START, VISION_END, AUDIO_START, AUDIO_END = 151652, 151653, 151647, 151648


def model_of(model_type: str) -> Any:
    """A model that can number tokens, with its configuration."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    model = object.__new__(getattr(module, CLASSES[model_type]))
    if model_type in OMNI:
        configs = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
        name = "Qwen2_5OmniThinkerConfig" if "2_5" in model_type else "Qwen3OmniMoeThinkerConfig"
        config = getattr(configs, name)()
        config.vision_start_token_id, config.vision_end_token_id = VISION_START, VISION_END
        config.audio_start_token_id, config.audio_end_token_id = AUDIO_START, AUDIO_END
        model.__dict__["spatial_merge_size"] = config.vision_config.spatial_merge_size
    else:
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[model_type]()
    if model_type == "hunyuan_vl":
        config.text_config.rope_parameters = {"mrope_section": [16, 16, 16, 16]}
    if model_type == "minicpmv4_7":
        names = ("image_start", "image_end", "slice_start", "slice_end", "newline")
        for number, name in enumerate(names):
            setattr(config, f"{name}_id", 200 + number)
        config.image_token_id, config.video_token_id = 210, 211
    model.__dict__["config"] = config
    return model


@dataclasses.dataclass
class Prompt:
    """One batch: rows of ids, what is in them, and what only some models take."""

    ids: Tensor = dataclasses.field(default_factory=Tensor)
    mask: Tensor = dataclasses.field(default_factory=Tensor)
    images: list[list[int]] = dataclasses.field(default_factory=list)
    videos: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    audios: list[int] = dataclasses.field(default_factory=list)
    sounding: bool = False


class Writer:
    """Writes prompts of one model: random text, images, videos and audio."""

    def __init__(self, rule: pe.positions.MropeRule, model: Any, draw: random.Random) -> None:
        self.rule, self.model, self.draw = rule, model, draw
        self.start = getattr(model.config, "image_start_token_id", VISION_START)
        self.end = getattr(model.config, "image_end_token_id", VISION_END)
        self.prompt = Prompt()
        self.row: list[int] = []

    def text(self, least: int = 0) -> None:
        self.row += [self.draw.randint(1000, 9999) for _ in range(self.draw.randint(least, 6))]

    def sizes(self) -> tuple[int, int]:
        return self.draw.randint(1, 4), self.draw.randint(1, 4)

    def image(self) -> None:
        (height, width), merge = self.sizes(), self.rule.spatial_merge
        self.prompt.images.append([1, height * merge, width * merge])
        count = height * (width + self.rule.pages) + 2 * self.rule.margin
        self.row += [self.start, *[self.rule.image_token] * count, self.end]

    def video(self) -> None:
        (height, width), merge = self.sizes(), self.rule.spatial_merge
        frames = self.draw.randint(1, 5)
        grid = [frames * self.rule.temporal_merge, height * merge, width * merge]
        self.prompt.videos.append(grid)
        self.prompt.seconds.append(self.draw.choice([1.0, 0.5, 2.0, 0.04, 1 / 3, 0.7]))
        if not self.rule.separate_frames:
            tokens = [self.rule.video_token] * (frames * height * width)
            self.row += [VISION_START, *tokens, VISION_END]
            return
        token = self.rule.image_token if self.rule.video_start else self.rule.video_token
        self.row += [self.rule.video_start or VISION_START]
        for _ in range(frames):  # times stand between frames
            self.row += [VISION_START, *[token] * (height * width), VISION_END]
            self.text(least=1)
        self.row += [self.rule.video_end or VISION_END]

    def audio_tokens(self, frames: int) -> int:
        if not self.rule.audio_chunk:
            return ((frames - 1) // 2 + 1 - 2) // 2 + 1
        rest = ((frames % self.rule.audio_chunk) - 1) // 2 + 1
        return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + frames // self.rule.audio_chunk * 13

    def audio(self) -> None:
        self.prompt.audios.append(self.draw.randint(5, 500))
        tokens = [self.rule.audio_token] * self.audio_tokens(self.prompt.audios[-1])
        self.row += [AUDIO_START, *tokens, AUDIO_END]

    def sounding_video(self) -> None:
        """A video with its audio, in the order that the model takes them to have."""
        before = len(self.row)
        self.video()
        del self.row[before:]
        self.prompt.audios.append(self.draw.randint(5, 500))
        grid, seconds = self.prompt.videos[-1], self.prompt.seconds[-1]
        per_frame = grid[1] * grid[2] // self.rule.spatial_merge**2
        times = torch.arange(grid[0]) * torch.tensor(seconds) * self.rule.positions_per_second
        times = times if self.rule.time == "exact" else times.long()
        video = times.repeat_interleave(per_frame)
        audio = torch.arange(self.audio_tokens(self.prompt.audios[-1]))
        if self.rule.time == "exact":  # token by token, the video first
            order = (torch.cat([video, audio]).argsort(stable=True) >= len(video)).tolist()
        else:  # in chunks of two seconds
            size = int(self.rule.positions_per_second * 2)
            chunks = [self.model.get_chunked_index(kind, size, 0) for kind in (video, audio)]
            order = []
            for number in range(max(map(len, chunks))):
                for sounds, of_kind in enumerate(chunks):
                    if number < len(of_kind):
                        begin, end = of_kind[number]
                        order += [bool(sounds)] * (end - begin)
        kinds_of = {False: self.rule.video_token, True: self.rule.audio_token}
        tokens = [kinds_of[sounds] for sounds in order]
        self.row += [VISION_START, AUDIO_START, *tokens, AUDIO_END, VISION_END]

    def crop(self, start: int, end: int, token: int, height: int, width: int) -> None:
        grids = self.prompt.images if token == self.rule.image_token else self.prompt.videos
        grids.append([height * self.rule.spatial_merge, width * self.rule.spatial_merge])
        self.row += [start, *[token] * (height * width), end]

    def canvas(self) -> None:
        """MiniCPM-V's pictures and clips, some with slices."""
        image_start, image_end, slice_start, slice_end, newline = self.rule.canvas
        token = self.draw.choice([self.rule.image_token, self.rule.video_token])
        for _ in range(self.draw.randint(1, 3)):
            self.crop(image_start, image_end, token, *self.sizes())
            rows, columns = self.draw.choice([(0, 0), (1, 2), (2, 1), (2, 2), (2, 3)])
            (height, width), short = self.sizes(), self.draw.randint(0, 1)
            for row in range(rows):
                self.row += [newline] * self.draw.randint(1, 2) if row else []
                for _ in range(columns):
                    sizes = (max(1, height - short), width)
                    self.crop(slice_start, slice_end, token, *sizes)
            if self.draw.random() < 0.3:
                self.text(least=1)

    def write(self, batch: int) -> Prompt:
        prompt = self.prompt
        parts = [self.image] if self.rule.image_token else []
        if self.rule.video_token or self.rule.video_start:
            parts.append(self.video)
        if self.rule.audio_token:
            parts.append(self.audio)
            prompt.sounding = self.draw.random() < 0.5
            if prompt.sounding:  # transformers takes videos with audio, or without, not both
                parts[1] = self.sounding_video
        if self.rule.canvas:
            parts = [self.canvas]
        rows = []
        for _ in range(batch):
            self.row = []
            self.text(least=1)
            for _ in range(self.draw.randint(0, 4)):
                self.draw.choice(parts)()
                self.text()
            rows.append(self.row)
        if not prompt.images and not prompt.videos:  # which get_rope_index needs
            self.row = rows[-1]
            parts[0]()
        longest = max(map(len, rows))
        left = self.draw.random() < 0.5
        padded = [(row, [0] * (longest - len(row))) for row in rows]
        prompt.ids = torch.tensor([pad + row if left else row + pad for row, pad in padded])
        prompt.mask = prompt.ids.ne(0).long()
        return prompt


def types_of(prompt: Prompt, rule: pe.positions.MropeRule) -> Tensor:
    """mm_token_type_ids, as processors make them."""
    types = torch.zeros_like(prompt.ids)
    for kind, token in enumerate((rule.image_token, rule.video_token, rule.audio_token), 1):
        if token is not None:
            types[prompt.ids == token] = kind
    if rule.video_start is not None:
        starts = (prompt.ids == rule.video_start).cumsum(1)
        inside = starts > (prompt.ids == rule.video_end).cumsum(1)
        types[(types == 1) & inside] = 2
    return types


def tensor_of(grids: list[Any], dtype: torch.dtype = torch.int64) -> Tensor | None:
    return torch.tensor(grids, dtype=dtype) if grids else None


def expected(model_type: str, model: Any, prompt: Prompt, rule: pe.positions.MropeRule) -> tuple[Tensor, Tensor]:
    """What transformers computes."""
    options: dict[str, Any] = {
        "image_grid_thw": tensor_of(prompt.images),
        "video_grid_thw": tensor_of(prompt.videos),
        "attention_mask": prompt.mask,
    }
    if model_type in OMNI:
        options |= {
            "use_audio_in_video": prompt.sounding,
            "audio_seqlens": tensor_of(prompt.audios),
            "second_per_grids": tensor_of(prompt.seconds, torch.float32),
        }
        return model.get_rope_index(prompt.ids, **options)
    if model_type in ("glm_image", "hunyuan_vl"):
        options.pop("video_grid_thw")
    if model_type == "glm_image":
        options["images_per_sample"] = prompt.ids.eq(model.config.image_start_token_id).sum(1)
        return model.get_rope_index(prompt.ids, **options)
    if model_type == "minicpmv4_7":
        grids = ("image_grid_thw", "target_sizes"), ("video_grid_thw", "target_sizes_videos")
        options |= {theirs: options.pop(ours) for ours, theirs in grids}
    if model_type == "qwen2_5_vl":
        options["second_per_grid_ts"] = tensor_of(prompt.seconds, torch.float32)
    return model.get_rope_index(prompt.ids, mm_token_type_ids=types_of(prompt, rule), **options)
