# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's configuration says about its networks, checked for all that the graphs rely on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.diffusion.config import ActionConfig, ActionSpaceConfig, TrajectoryHistoryConfig
from edgellm_ros.engine_directory.config import LanguageModelConfig, RopeConfig
from edgellm_ros.engine_directory.schema import from_dict, read_json
from edgellm_ros.multimodal.config import AudioConfig, VisionConfig

MODEL_TYPE = "qwen3_omni_moe_thinker"
EXPERT_MODEL_TYPE = "edgellm_flow_expert"
BICUBIC = 3  # PIL's code


@dataclass(frozen=True)
class TextArchitecture:
    """The thinker's language model: what the runtime must know (`runner`) and what only the graph needs."""

    runner: LanguageModelConfig
    intermediate_size: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool


@dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower: what the runtime must know (`config`) and what only the graph needs."""

    config: VisionConfig
    intermediate_size: int


@dataclass(frozen=True)
class AudioArchitecture:
    """The audio encoder: what the runtime must know (`config`) and what only the graph needs."""

    config: AudioConfig
    downsample_hidden_size: int
    encoder_ffn_dim: int


@dataclass(frozen=True)
class ExpertArchitecture:
    """The action expert's `config.json`, key by key. The time features' periods are in flow time (0 to 1)."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    time_embedding_dim: int
    time_min_period: float
    time_max_period: float
    num_denoise_steps: int
    action_space: ActionSpaceConfig
    trajectory_history: TrajectoryHistoryConfig
    history_token_id: int
    future_start_token_id: int

    def __post_init__(self) -> None:
        if self.model_type != EXPERT_MODEL_TYPE:
            raise ValueError(f"model_type {self.model_type!r}: supported: {EXPERT_MODEL_TYPE}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.time_embedding_dim < 2 or self.time_embedding_dim % 2:
            raise ValueError(f"time_embedding_dim must be even, got {self.time_embedding_dim}")
        if not 0 < self.time_min_period < self.time_max_period:
            raise ValueError(
                f"periods must be positive and rising, got time_min_period {self.time_min_period}, "
                f"time_max_period {self.time_max_period}"
            )

    @property
    def config(self) -> ActionConfig:
        """The part that the runtime must know."""
        return ActionConfig(
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_denoise_steps=self.num_denoise_steps,
            future_start_token_id=self.future_start_token_id,
            history_token_id=self.history_token_id,
            action_space=self.action_space,
            trajectory_history=self.trajectory_history,
        )


def read_thinker_config(checkpoint: Path) -> ConfigSection:
    """`config.json` of a checkpoint whose architecture we can build. ValueError names what is supported."""
    path = checkpoint / "config.json"
    config = ConfigSection(read_json(path), str(path))
    config.one_of("model_type", [MODEL_TYPE])
    return config


def text_architecture(config: ConfigSection, num_deepstack_features: int) -> TextArchitecture:
    """The `text_config` of a thinker. ValueError for whatever our graph would compute differently."""
    text = config.section("text_config")
    if text.integer("num_experts", 128):  # the model code's default
        raise text.fail("num_experts", "only dense checkpoints (num_experts 0) are supported")
    text.one_of("hidden_act", ["silu"], default="silu")
    if text.has("sliding_window") and text.flag("use_sliding_window", True):
        raise text.fail("sliding_window", "only full attention (null) is supported")
    heads, layers = text.size("num_attention_heads"), text.size("num_hidden_layers")
    if num_deepstack_features >= layers:
        raise text.fail(
            "num_hidden_layers", f"expected more than the {num_deepstack_features} deepstack features"
        )
    runner = text.make(
        LanguageModelConfig,
        hidden_size=text.size("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.size("num_key_value_heads"),
        head_dim=text.size("head_dim", text.size("hidden_size") // heads),
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=text.size("max_position_embeddings"),
        reduced_vocab_size=0,
        num_deepstack_features=num_deepstack_features,
        rope=_text_rope(text),
    )
    return TextArchitecture(
        runner=runner,
        intermediate_size=text.size("intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        attention_bias=text.flag("attention_bias", False),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
    )


def _text_rope(text: ConfigSection) -> RopeConfig:
    """RoPE as transformers 5 writes it (`rope_parameters`), or as before (`rope_scaling`, `rope_theta`)."""
    rope = text.section("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    rope.one_of("rope_type", ["default"], default="default")
    return rope.make(
        RopeConfig,
        theta=(rope if rope.has("rope_theta") else text).number("rope_theta"),
        mrope_section=rope.integers("mrope_section"),
        mrope_interleaved=rope.flag("mrope_interleaved", rope.flag("interleaved", True)),
    )


def vision_architecture(config: ConfigSection, processor: ConfigSection) -> VisionArchitecture:
    """The `vision_config` of a thinker, and the image processor that belongs to it."""
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

    processor.one_of("image_processor_type", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
    for step in ("do_resize", "do_rescale", "do_normalize"):
        processor.one_of(step, [True], default=True)
    for key, needed in (("patch_size", patch), ("temporal_patch_size", frames), ("merge_size", merge)):
        processor.one_of(key, [needed])
    if processor.has("size"):
        limits = processor.section("size")
        low, high = limits.size("shortest_edge"), limits.size("longest_edge")
    else:
        low, high = processor.size("min_pixels"), processor.size("max_pixels")
    built = vision.make(
        VisionConfig,
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
        min_pixels=low,
        max_pixels=high,
        resample=processor.one_of("resample", [BICUBIC], default=BICUBIC),
        rescale_factor=processor.number("rescale_factor", 1 / 255),
        image_mean=processor.numbers("image_mean"),
        image_std=processor.numbers("image_std"),
    )
    return VisionArchitecture(built, vision.size("intermediate_size"))


def audio_architecture(config: ConfigSection, processor: ConfigSection) -> AudioArchitecture:
    """The `audio_config` of a thinker, and the feature extractor that belongs to it."""
    audio = config.section("audio_config")
    audio.one_of("activation_function", ["gelu"], default="gelu")
    bins = audio.size("num_mel_bins")
    # The model code counts 13 tokens per chunk whatever n_window is, which is right for 50 only.
    window = audio.one_of("n_window", [50], default=50)

    processor.one_of("feature_extractor_type", ["WhisperFeatureExtractor"])
    processor.one_of("feature_size", [bins])
    processor.one_of("dither", [0], default=0)
    built = audio.make(
        AudioConfig,
        d_model=audio.size("d_model"),
        encoder_layers=audio.size("encoder_layers"),
        encoder_attention_heads=audio.size("encoder_attention_heads"),
        output_dim=audio.size("output_dim"),
        n_window=window,
        n_window_infer=audio.size("n_window_infer", 800),
        num_mel_bins=bins,
        sampling_rate=processor.one_of("sampling_rate", [16000], default=16000),
        n_fft=processor.size("n_fft", 400),
        hop_length=processor.size("hop_length", 160),
    )
    return AudioArchitecture(built, audio.size("downsample_hidden_size"), audio.size("encoder_ffn_dim"))


def expert_architecture(path: Path, text: TextArchitecture) -> ExpertArchitecture:
    """`action_expert/config.json`: every key must be known, and fit the model whose cache it reads."""
    data = read_json(path)
    data.pop("architectures", None)
    expert = from_dict(ExpertArchitecture, data, str(path))
    runner = text.runner
    for name, found, needed in (
        ("rope_theta", expert.rope_theta, runner.rope.theta),
        ("num_hidden_layers", expert.num_hidden_layers, runner.num_hidden_layers),
        ("num_key_value_heads", expert.num_key_value_heads, runner.num_key_value_heads),
        ("head_dim", expert.head_dim, runner.head_dim),
    ):
        if found != needed:
            raise ValueError(
                f"{path}: {name} {found}: the language model, whose KV cache the expert reads, has {needed}"
            )
    tokens = expert.trajectory_history
    last = max(
        expert.history_token_id, expert.future_start_token_id, tokens.first_token_id + tokens.num_tokens - 1
    )
    if last >= runner.vocab_size:
        raise ValueError(f"{path}: token id {last} is outside the vocabulary of {runner.vocab_size}")
    return expert
