# SPDX-License-Identifier: Apache-2.0
"""Reads and checks `config.json` of a Qwen3-Omni thinker.

The checks cover everything that the graphs rely on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.families.qwen3_omni.processor import sound_processing
from edgellm_ros.builder.image_processing import resized_images
from edgellm_ros.builder.rope import read_position_limit, read_rope, rope_section
from edgellm_ros.engine_directory.config import LanguageModelConfig, RopeConfig
from edgellm_ros.multimodal.audio_config import AudioConfig
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig

MODEL_TYPE = "qwen3_omni_moe_thinker"


@dataclass(frozen=True)
class VisionArchitecture:
    """Vision tower."""

    config: Qwen3VisionConfig  # for the runtime; the graph uses all fields
    intermediate_size: int


@dataclass(frozen=True)
class AudioArchitecture:
    """Audio encoder."""

    config: AudioConfig  # for the runtime; the graph uses all fields
    downsample_hidden_size: int
    encoder_ffn_dim: int


def text_architecture(config: ConfigSection, num_deepstack_features: int) -> DecoderArchitecture:
    """Read `text_config`.

    ValueError for anything that the graph would compute differently.
    """
    text = config.section("text_config")
    _check_dense(text)
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
        rope=_text_rope(text, head_dim),
    )
    bias = text.flag("attention_bias", False)
    return DecoderArchitecture(
        runner=runner,
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps"),
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
    )


def _check_dense(text: ConfigSection) -> None:
    """Raise ValueError if a layer is a mixture of experts.

    Rule and defaults are those of the model code.
    """
    if not text.integer("num_experts", 128):
        return
    dense = text.integers("mlp_only_layers") if text.has("mlp_only_layers") else ()
    step = text.size("decoder_sparse_step", 1)
    layers = range(text.size("num_hidden_layers"))
    sparse = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
    if sparse:
        raise text.fail("num_experts", f"only dense layers are supported; layer {sparse[0]} has experts")


def _text_rope(text: ConfigSection, head_dim: int) -> RopeConfig:
    rope, plain = rope_section(text), read_rope(text, head_dim, default_theta=1e6)
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


def vision_architecture(config: ConfigSection, processor: ConfigSection) -> VisionArchitecture:
    """Read `vision_config`, and the image processor that belongs to it."""
    vision = config.section("vision_config")
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
    return VisionArchitecture(built, vision.size("intermediate_size"))


def audio_architecture(config: ConfigSection, processor: ConfigSection) -> AudioArchitecture:
    """Read `audio_config`, and the feature extractor that belongs to it."""
    audio = config.section("audio_config")
    audio.one_of("activation_function", ["gelu"], default="gelu")
    bins = audio.size("num_mel_bins")
    # The model code counts 13 tokens per chunk whatever n_window is, which is right for 50 only.
    window = audio.one_of("n_window", [50], default=50)
    built = audio.make(
        AudioConfig,
        d_model=audio.size("d_model"),
        encoder_layers=audio.size("encoder_layers"),
        encoder_attention_heads=audio.size("encoder_attention_heads"),
        output_dim=audio.size("output_dim"),
        n_window=window,
        n_window_infer=audio.size("n_window_infer", 800),
        num_mel_bins=bins,
        **sound_processing(processor, bins),
    )
    return AudioArchitecture(built, audio.size("downsample_hidden_size"), audio.size("encoder_ffn_dim"))
