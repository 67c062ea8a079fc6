# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configurations of Qwen3-VL.

The configurations are those of its language model and vision tower. Qwen3-Omni has the same, Qwen3.5 the same
vision tower. The checks cover everything that the graphs rely on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.image_processing import resized_images
from edgellm_ros.builder.config.rope import read_rope, rope_section
from edgellm_ros.builder.config.text_model import read_head_dim, read_language_model, read_norm
from edgellm_ros.builder.families.qwen3_vl.vision import MergerNames, VisionArchitecture
from edgellm_ros.builder.model.decoder import Decoder, SwiGLU, attention_layers
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.multimodal.video_config import VideoConfig
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig

MROPE_SECTION = 24, 20, 20  # for checkpoints without `mrope_section`


@dataclass(frozen=True)
class TextDefaults:
    """The model code's values for keys that a checkpoint leaves out."""

    rope_theta: float
    num_key_value_heads: int
    head_dim: int | None  # None = hidden_size / num_attention_heads


def read_decoder(
    text: ConfigSection, prefix: str, num_deepstack_features: int, defaults: TextDefaults
) -> Decoder:
    """Read the section of the language model.

    prefix: what the names of its tensors begin with. ValueError for anything that the graph would compute
    differently.
    """
    if text.has("sliding_window") and text.flag("use_sliding_window", True):
        raise text.fail("sliding_window", "only full attention (null) is supported")
    head_dim, bias = read_head_dim(text, defaults.head_dim), text.flag("attention_bias", False)
    rope = interleaved_mrope(text, read_rope(text, head_dim, defaults.rope_theta), MROPE_SECTION)
    llm = read_language_model(text, head_dim, rope, defaults.num_key_value_heads, num_deepstack_features)
    layers = attention_layers(
        (None,) * llm.num_hidden_layers,
        SwiGLU(text.size("intermediate_size")),
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
    )
    return Decoder(config=llm, layers=layers, norm=read_norm(text), prefix=prefix)


def interleaved_mrope(text: ConfigSection, plain: RopeConfig, default: tuple[int, int, int]) -> RopeConfig:
    """Read `mrope_section` of a text section whose RoPE is `plain` without it.

    The section counts the frequency pairs of time, height and width, which alternate. `default`: the model
    code's, for checkpoints without the key.
    """
    rope = rope_section(text)
    for key in ("mrope_interleaved", "interleaved"):
        rope.one_of(key, [True], default=True)  # the model code interleaves the axes whatever the key says
    given, fitting = rope.has("mrope_section"), _fitting_section(default, len(plain.frequencies))
    section = rope.integers("mrope_section") if given else fitting
    return rope.make(partial(dataclasses.replace, plain), mrope_section=section, mrope_interleaved=True)


def _fitting_section(section: tuple[int, int, int], pairs: int) -> tuple[int, int, int]:
    """Fit `mrope_section` to a head with `pairs` rotary pairs.

    Height takes pairs 1, 4, 7 ..., width 2, 5, 8 ..., up to their numbers; time takes the others.
    """
    height, width = (len(range(axis, min(3 * section[axis], pairs), 3)) for axis in (1, 2))
    return pairs - height - width, height, width


def vision_architecture(
    vision: ConfigSection,
    processor: ConfigSection,
    prefix: str,
    names: MergerNames,
    video: VideoConfig | None = None,
) -> VisionArchitecture:
    """Read the section of the vision tower, and its image processor.

    prefix, names: of the tower's and the mergers' tensors. video: of a tower that takes videos.
    """
    vision.one_of("hidden_act", ["gelu_pytorch_tanh"])
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
        deepstack_visual_indexes=_deepstack_indexes(vision, names),
        rope_theta=axial_theta(vision),
        video=video,
        **resized_images(processor, patch, frames, merge),
    )
    return VisionArchitecture(built, prefix, names, vision.size("intermediate_size"))


def _deepstack_indexes(vision: ConfigSection, names: MergerNames) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    if names.deepstack is not None:
        return vision.integers(key)
    vision.one_of(key, [[], None])
    return ()


def axial_theta(vision: ConfigSection) -> float:
    """Read theta of the tower's RoPE.

    Theta is a constant in the model code before transformers 5.
    """
    if not vision.has("rope_parameters"):
        return 10000.0
    rope = vision.section("rope_parameters")
    rope.one_of("rope_type", ["axial"], default="axial")
    return rope.number("rope_theta", 10000.0)
