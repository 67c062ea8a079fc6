# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configurations of Qwen3-VL's language model and vision tower.

Qwen3-Omni has the same. The checks cover everything that the graphs rely on.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.families.qwen3_vl.vision import MergerNames, VisionArchitecture
from edgellm_ros.builder.image_processing import resized_images
from edgellm_ros.builder.rope import read_position_limit, read_rope, rope_section
from edgellm_ros.engine_directory.config import LanguageModelConfig, RopeConfig
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig


def text_architecture(
    text: ConfigSection, prefix: str, num_deepstack_features: int, default_theta: float
) -> DecoderArchitecture:
    """Read the section of the language model, whose tensors' names begin with `prefix`.

    default_theta: the model code's, for checkpoints without `rope_theta`. ValueError for anything that the
    graph would compute differently.
    """
    text.one_of("hidden_act", ["silu"], default="silu")
    if text.has("sliding_window") and text.flag("use_sliding_window", True):
        raise text.fail("sliding_window", "only full attention (null) is supported")
    heads, layers = text.size("num_attention_heads"), text.size("num_hidden_layers")
    if num_deepstack_features > layers:
        raise text.fail(
            "num_hidden_layers", f"expected at least the {num_deepstack_features} deepstack features"
        )
    head_dim = text.size("head_dim", text.size("hidden_size") // heads)
    runner = text.make(
        LanguageModelConfig,
        hidden_size=text.size("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.size("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=read_position_limit(text)[0],
        reduced_vocab_size=0,
        num_deepstack_features=num_deepstack_features,
        rope=_text_rope(text, head_dim, default_theta),
    )
    bias = text.flag("attention_bias", False)
    return DecoderArchitecture(
        runner=runner,
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps"),
        prefix=prefix,
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
    )


def _text_rope(text: ConfigSection, head_dim: int, default_theta: float) -> RopeConfig:
    rope, plain = rope_section(text), read_rope(text, head_dim, default_theta)
    for key in ("mrope_interleaved", "interleaved"):
        rope.one_of(key, [True], default=True)  # the model code interleaves the axes whatever the key says
    given, default = rope.has("mrope_section"), _default_mrope_section(len(plain.frequencies))
    section = rope.integers("mrope_section") if given else default
    return rope.make(partial(dataclasses.replace, plain), mrope_section=section, mrope_interleaved=True)


def _default_mrope_section(pairs: int) -> tuple[int, int, int]:
    """Compute the section for checkpoints without `mrope_section`.

    It counts the frequency pairs of time, height and width. The model code's default is (24, 20, 20), of
    which a head with fewer or more pairs uses what fits: height takes pairs 1, 4, 7 ..., width 2, 5, 8 ...,
    time the others.
    """
    height, width = (len(range(offset, min(3 * 20, pairs), 3)) for offset in (1, 2))
    return pairs - height - width, height, width


def vision_architecture(
    vision: ConfigSection, processor: ConfigSection, prefix: str, names: MergerNames
) -> VisionArchitecture:
    """Read the section of the vision tower, and the image processor that belongs to it.

    prefix, names: of the tower's and the mergers' tensors.
    """
    vision.one_of("hidden_act", ["gelu_pytorch_tanh"])
    theta = 10000.0  # a constant in the model code before transformers 5
    if vision.has("rope_parameters"):
        rope = vision.section("rope_parameters")
        rope.one_of("rope_type", ["axial"], default="axial")
        theta = rope.number("rope_theta", theta)
    patch, frames, merge = (
        vision.size(f"{name}_size") for name in ("patch", "temporal_patch", "spatial_merge")
    )

    built = vision.make(
        Qwen3VisionConfig,
        hidden_size=vision.size("hidden_size"),
        num_heads=vision.size("num_heads"),
        depth=vision.size("depth"),
        out_hidden_size=vision.size("out_hidden_size"),
        in_channels=vision.size("in_channels", 3),
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=merge,
        num_position_embeddings=vision.size("num_position_embeddings"),
        deepstack_visual_indexes=vision.integers("deepstack_visual_indexes"),
        rope_theta=theta,
        **resized_images(processor, patch, frames, merge),
    )
    return VisionArchitecture(built, prefix, names, vision.size("intermediate_size"))
