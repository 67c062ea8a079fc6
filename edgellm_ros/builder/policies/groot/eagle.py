# SPDX-License-Identifier: Apache-2.0
"""Reads the backbone of GR00T N1.6, Eagle.

Eagle is a SigLIP 2 and, here, the first layers of a Qwen3.

Sources of the model: NVIDIA Isaac-GR00T, branch n1.6-release, gr00t/model/modules/eagle_backbone.py and
Eagle-Block2A-2B-v2 (modeling_eagle3_vl.py, modeling_siglip2.py, processing_eagle3_vl.py).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.image_processing import colours
from edgellm_ros.builder.families.qwen3 import read_decoder
from edgellm_ros.builder.policies.groot.architecture import Backbone
from edgellm_ros.builder.policies.groot.eagle_vision import EagleTower, build_eagle_vision
from edgellm_ros.builder.policies.groot.kept_layers import keep_layers
from edgellm_ros.builder.policies.siglip import SiglipLayers
from edgellm_ros.builder.weights.claimed_sizes import check_layers, check_no_more_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.multimodal.video_config import BICUBIC
from edgellm_ros.multimodal.vision_config import Siglip2VisionConfig

MODEL = "backbone.model"
TOWER, DECODER, CONNECTOR = (
    f"{MODEL}.{name}" for name in ("vision_model.vision_model", "language_model.model", "mlp1")
)
# Constants in the code of the processor: pixels of a token's side, tokens of an image.
SIDE, LEAST_TOKENS, MOST_TOKENS = 28, 4, 4096


def read_eagle(config: ConfigSection, vlm: Path, weights: Weights) -> Backbone:
    """Read sizes; config: GR00T's; vlm: the folder of its Eagle.

    ValueError, which names file, key and value, for a model that the graphs would compute differently.
    """
    section = read_section(vlm / "config.json")
    section.one_of("model_type", ["eagle_3_vl"])
    section.one_of("select_layer", [-1], default=-4)
    section.one_of("use_backbone_lora", [0], default=0)
    section.one_of("use_llm_lora", [0], default=0)
    text = section.section("text_config")
    text.one_of("architectures", [["Qwen3ForCausalLM"]])
    text.one_of("use_sliding_window", [False], default=False)
    decoder = read_decoder(keep_layers(config, text, weights, DECODER), DECODER)
    tower = _read_tower(section, vlm, weights, decoder.config.hidden_size)
    large = f"{TOWER}.encoder", CONNECTOR
    return Backbone(section.where, decoder, True, tower.config, partial(build_eagle_vision, tower), large)


def _read_tower(section: ConfigSection, vlm: Path, weights: Weights, out_size: int) -> EagleTower:
    """Read the vision tower, and how its processor makes the values of pixels."""
    vision, merge = section.section("vision_config"), _merge(section)
    vision.one_of("model_type", ["siglip2_vision_model"])
    vision.one_of("hidden_act", ["gelu_pytorch_tanh"], default="gelu_pytorch_tanh")
    for key in ("use_rope", "use_windows_attn"):
        vision.one_of(key, [False], default=True)
    modules, depth = f"{TOWER}.encoder.layers", vision.size("num_hidden_layers", 27)
    check_layers(vision, "num_hidden_layers", weights, modules, default=27)
    check_no_more_layers(vision, "num_hidden_layers", depth, weights, modules)
    patch, pixels = vision.size("patch_size", 14), SIDE**2
    if patch * merge != SIDE:
        raise vision.fail(
            "patch_size", f"with {merge} patches of a token's side, expected {SIDE} pixels together"
        )
    read_section(vlm / "processor_config.json").one_of("pixels_per_token", [pixels], default=pixels)
    processor = read_section(vlm / "preprocessor_config.json")
    processor.one_of("do_resize", [False], default=True)
    for step in ("do_rescale", "do_normalize"):
        processor.one_of(step, [True], default=True)
    built = vision.make(
        Siglip2VisionConfig,
        hidden_size=vision.size("hidden_size", 1152),
        num_heads=vision.size("num_attention_heads", 16),
        depth=depth,
        out_hidden_size=out_size,
        in_channels=vision.size("num_channels", 3),
        patch_size=patch,
        spatial_merge_size=merge,
        num_position_embeddings=vision.size("num_patches", 256),
        min_pixels=LEAST_TOKENS * pixels,
        max_pixels=MOST_TOKENS * pixels,
        resample=BICUBIC,
        rescale_factor=processor.number("rescale_factor", 1 / 255),
        image_mean=colours(processor, "image_mean"),
        image_std=colours(processor, "image_std"),
    )
    layers = SiglipLayers(
        hidden_size=built.hidden_size,
        intermediate_size=vision.size("intermediate_size", 4304),
        num_heads=built.num_heads,
        depth=built.depth,
        epsilon=vision.number("layer_norm_eps", 1e-6),
    )
    return EagleTower(built, layers, TOWER, CONNECTOR)


def _merge(section: ConfigSection) -> int:
    """Read the number of patches of a token's side."""
    ratio = section.number("downsample_ratio", 0.5)
    if not 0 < ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise section.fail("downsample_ratio", "expected 1 divided by a whole number")
    return int(1 / ratio)
