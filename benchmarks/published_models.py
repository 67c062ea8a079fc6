# SPDX-License-Identifier: Apache-2.0
"""Configurations of published models that have a vision tower or recurrent layers.

Source of the numbers: the models' public `config.json` and `preprocessor_config.json`. Names and shapes of
the tensors are those of the model class in transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from benchmarks.model_shapes import ModelShape, parse_shape

VISION_MODULES = ("visual.", "vision_tower.", "multi_modal_projector.")
FP32 = 4  # bytes of a value of the recurrent state

Config = dict[str, Any]


@dataclass(frozen=True)
class PublishedModel:
    """A published model by its configuration."""

    config: Config  # `config.json`
    processor: Config | None = None  # `preprocessor_config.json`; None = text only
    image_text: str = ""  # an image in the chat template

    @property
    def text(self) -> Config:
        """Return the section of the language model."""
        return self.config.get("text_config", self.config)

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def vocab_size(self) -> int:
        return self.text["vocab_size"]

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights; a table that is used twice is listed once."""
        import torch

        with torch.device("meta"):
            model = make_model(self)
        return {name: tuple(weight.shape) for name, weight in model.named_parameters()}

    @property
    def parameters(self) -> int:
        """Return the number of weights; a table that is used twice counts once."""
        return sum(map(prod, self.tensors.values()))

    @property
    def parameters_per_step(self) -> int:
        """Return the number of weights that one decode step reads.

        Weights of the vision tower are not among them, and the embedding table only if it is the last matrix
        too.
        """
        tied = not any("lm_head" in name for name in self.tensors)
        table = 0 if tied else self.vocab_size * self.text["hidden_size"]
        language = [
            shape for name, shape in self.tensors.items() if not any(part in name for part in VISION_MODULES)
        ]
        return sum(map(prod, language)) - table

    @property
    def cache_values_per_token(self) -> int:
        """Return the number of values per token in the KV cache."""
        text, head_dim = self.text, self.text["hidden_size"] // self.text["num_attention_heads"]
        head_dim = text.get("head_dim", text.get("attention_head_dim", head_dim))
        return 2 * self._layers("full_attention") * text["num_key_value_heads"] * head_dim

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's recurrent state, fp32 in every precision."""
        text = self.text
        if "ssm_state_size" in text:
            inner = text["mamba_num_heads"] * text["mamba_head_dim"]
            channels = inner + 2 * text["n_groups"] * text["ssm_state_size"]
            state, kernel = inner * text["ssm_state_size"], text["conv_kernel"]
        elif "linear_num_value_heads" in text:
            keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
            values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
            channels, kernel = 2 * keys + values, text["linear_conv_kernel_dim"]
            state = values * text["linear_key_head_dim"]
        else:
            return 0
        return self._layers("recurrent") * FP32 * (state + channels * (kernel - 1))

    def _layers(self, kind: str) -> int:
        """Count the layers of a kind: "full_attention" or "recurrent"."""
        text = self.text
        if "hybrid_override_pattern" in text:
            return text["hybrid_override_pattern"].count("*" if kind == "full_attention" else "M")
        if "full_attention_interval" in text:
            full = text["num_hidden_layers"] // text["full_attention_interval"]
            return full if kind == "full_attention" else text["num_hidden_layers"] - full
        return text["num_hidden_layers"] if kind == "full_attention" else 0

    def with_changes(self, changes: dict[str, int]) -> PublishedModel:
        """Replace numbers of the language model or of the vision tower.

        Numbers of the vision tower have names such as "vision.depth".
        """
        config = copy.deepcopy(self.config)
        for key, value in changes.items():
            vision, _, name = key.rpartition(".")
            section = config["vision_config"] if vision == "vision" else config.get("text_config", config)
            section[name] = value
        return PublishedModel(config, self.processor, self.image_text)

    @property
    def numbers(self) -> list[str]:
        """Names that `with_changes` takes."""
        names = [key for key, value in self.text.items() if type(value) is int]
        tower = self.config.get("vision_config", {})
        return names + [f"vision.{key}" for key, value in tower.items() if type(value) is int]


def make_model(model: PublishedModel, **options: Any) -> Any:
    """Make the model class with new random weights.

    options: as of transformers' `from_config`.
    """
    import transformers

    kind = transformers.AutoModelForImageTextToText if model.processor else transformers.AutoModelForCausalLM
    config = copy.deepcopy(model.config)
    return kind.from_config(transformers.AutoConfig.for_model(config.pop("model_type"), **config), **options)


def _qwen_text(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        **others,
    }


def _patches(size: int, limits: tuple[int, int], mean: float | None, kind: str) -> Config:
    """Make an image processor of patches; mean: of every channel, None = CLIP's."""
    clip = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    means, deviations = clip if mean is None else ([mean] * 3, [mean] * 3)
    return {
        "image_processor_type": kind,
        "patch_size": size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": limits[0], "longest_edge": limits[1]},
        "image_mean": means,
        "image_std": deviations,
    }


QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_TOKENS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655}


def _qwen3_vl(text: Config, vision: Config, tied: bool) -> PublishedModel:
    tower = {
        "model_type": "qwen3_vl",
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_scaling": rope,
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": tower | vision,
        **QWEN_TOKENS,
        "video_token_id": 151656,
    }
    processor = _patches(16, (65536, 16777216), 0.5, "Qwen2VLImageProcessorFast")
    return PublishedModel(config, processor, QWEN_IMAGE)


def _qwen25_vl(text: Config, tied: bool) -> PublishedModel:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        **text,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        **QWEN_TOKENS,
        "video_token_id": 151656,
    }
    processor = _patches(14, (3136, 12845056), None, "Qwen2VLImageProcessor")
    return PublishedModel(config, processor, QWEN_IMAGE)


def _internvl(text: Config) -> PublishedModel:
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            **text,
        },
        "vision_config": {
            "model_type": "internvl_vision",
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": 1024,
            "image_size": [448, 448],
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-6,
            "layer_scale_init_value": 0.1,
            "norm_type": "layer_norm",
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 24,
            "patch_size": [14, 14],
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
    }
    processor = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "size": {"height": 448, "width": 448},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return PublishedModel(config, processor, "<IMG_CONTEXT>\n")


def _qwen35(
    sizes: tuple[int, ...], value_heads: int, vision: tuple[int, int, int, int], tied: bool
) -> PublishedModel:
    hidden, inner, layers, heads, kv_heads = sizes
    depth, width, vision_inner, vision_heads = vision
    text = _qwen_text(hidden, inner, layers, heads, kv_heads)
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
    rope |= {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": text
        | {
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "rope_parameters": rope,
            "tie_word_embeddings": tied,
        },
        "vision_config": {
            "model_type": "qwen3_5",
            "deepstack_visual_indexes": [],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "intermediate_size": vision_inner,
            "num_heads": vision_heads,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    }
    processor = _patches(16, (65536, 16777216), 0.5, "Qwen2VLImageProcessorFast")
    return PublishedModel(config, processor, QWEN_IMAGE)


def _nemotron_h(hidden: int, inner: int, pattern: str, mamba: tuple[int, int], heads: int) -> PublishedModel:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": mamba[0],
        "mamba_head_dim": mamba[1],
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    }
    return PublishedModel(config)


SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
SMALL_TOWER["deepstack_visual_indexes"] = [5, 11, 17]
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
LARGE_TOWER["deepstack_visual_indexes"] = [8, 16, 24]
MODELS = {
    "qwen3-vl-2b": _qwen3_vl(_qwen_text(2048, 6144, 28, 16, 8), SMALL_TOWER, tied=True),
    "qwen3-vl-4b": _qwen3_vl(_qwen_text(2560, 9728, 36, 32, 8), SMALL_TOWER, tied=True),
    "qwen3-vl-8b": _qwen3_vl(_qwen_text(4096, 12288, 36, 32, 8), LARGE_TOWER, tied=False),
    "qwen2.5-vl-3b": _qwen25_vl(_qwen_text(2048, 11008, 36, 16, 2), tied=True),
    "qwen2.5-vl-7b": _qwen25_vl(_qwen_text(3584, 18944, 28, 28, 4, vocab_size=152064), tied=False),
    "internvl3-1b": _internvl(_qwen_text(896, 4864, 24, 14, 2, vocab_size=151674)),
    "internvl3-2b": _internvl(_qwen_text(1536, 8960, 28, 12, 2, vocab_size=151674)),
    "internvl3-8b": _internvl(_qwen_text(3584, 18944, 28, 28, 4, vocab_size=151674)),
    "qwen3.5-0.8b": _qwen35((1024, 3584, 24, 8, 2), 16, (12, 768, 3072, 12), tied=True),
    "qwen3.5-4b": _qwen35((2560, 9216, 32, 16, 4), 32, (24, 1024, 4096, 16), tied=True),
    "qwen3.5-9b": _qwen35((4096, 12288, 32, 16, 4), 32, (27, 1152, 4304, 16), tied=False),
    "nemotron-nano-4b": _nemotron_h(
        3136, 12544, "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", (96, 80), heads=40
    ),
    "nemotron-nano-9b": _nemotron_h(
        4480, 15680, "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", (128, 80), heads=40
    ),
}


def parse_model(text: str) -> PublishedModel:
    """Parse a name of `MODELS` with optional changes of numbers.

    Example: "qwen3-vl-2b,num_hidden_layers=2,vision.depth=4". ValueError for an unknown name or key, or a
    value that is not a number.
    """
    name, *changes = text.split(",")
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}, expected one of {', '.join(MODELS)}")
    values: dict[str, int] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in MODELS[name].numbers or not value.isdecimal():
            raise ValueError(
                f"expected KEY=NUMBER with a key of {', '.join(MODELS[name].numbers)}, got {change!r}"
            )
        values[key] = int(value)
    return MODELS[name].with_changes(values)


def parse_any(text: str) -> ModelShape | PublishedModel:
    """Parse a name of `MODELS` or `SHAPES` with changes of numbers. ValueError."""
    return parse_model(text) if text.split(",")[0] in MODELS else parse_shape(text)
