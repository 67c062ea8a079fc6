# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of a SmolVLA, and that of its SmolVLM.

The checks cover everything that the graphs rely on. Sources: LeRobot 0.4.4, configuration_smolvla.py and
smolvlm_with_expert.py; transformers, configuration_smolvlm.py.
"""

from __future__ import annotations

import math
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import MAX_SIZE, ConfigSection
from edgellm_ros.builder.config.rope import plain_frequencies
from edgellm_ros.builder.config.text_model import read_head_dim, read_language_model
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    COMMON_KEYS,
    MOST_ACTIONS,
    MOST_PIXELS,
    MOST_STEPS,
    STATE,
    camera_names,
    check_features,
    check_keys,
    dataset_fps,
    feature_size,
)
from edgellm_ros.builder.policies.processors import NEW_LINE, check_steps, relative_actions
from edgellm_ros.builder.policies.rope import ROPE_THETA
from edgellm_ros.builder.policies.smolvla.architecture import (
    EXPERT,
    VLM,
    SmolVLAArchitecture,
    TowerArchitecture,
)
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.claimed_sizes import check_dimensions, check_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import (
    AffineSpaceConfig,
    PaddedCameraConfig,
    SmolVLAConfig,
    StateConfig,
)
from edgellm_ros.engine_directory.rope_config import RopeConfig

KEYS = COMMON_KEYS | {
    "adapt_to_pi_aloha", "add_image_special_tokens", "attention_mode", "chunk_size", "compile_mode",
    "compile_model", "empty_cameras", "expert_width_multiplier", "freeze_vision_encoder",
    "load_vlm_weights", "max_action_dim", "max_period", "max_state_dim", "min_period", "n_action_steps",
    "num_expert_layers", "num_steps", "num_vlm_layers", "optimizer_betas", "optimizer_eps",
    "optimizer_grad_clip_norm", "optimizer_lr", "optimizer_weight_decay", "pad_language_to",
    "prefix_length", "resize_imgs_with_padding", "rtc_config", "scheduler_decay_lr",
    "scheduler_decay_steps", "scheduler_warmup_steps", "self_attn_every_n_layers",
    "tokenizer_max_length", "train_expert_only", "train_state_proj", "use_cache",
    "use_delta_joint_actions_aloha", "vlm_model_name",
}  # fmt: skip
MOST_TOKENS = 65536  # of a task


def read_architecture(config: ConfigSection, vlm: ConfigSection, weights: Weights) -> SmolVLAArchitecture:
    """Read the sizes of all graphs; config: LeRobot's, vlm: SmolVLM's."""
    _check_supported(config)
    vlm.one_of("model_type", ["smolvlm", "idefics3"])
    text = vlm.section("text_config")
    text.one_of("model_type", ["llama"])
    text.one_of("attention_bias", [False], default=False)
    text.one_of("mlp_bias", [False], default=False)
    check_dimensions(text, weights)
    layers, first = text.size("num_hidden_layers"), config.integer("num_vlm_layers", 16)
    layers = min(first, layers) if first > 0 else layers
    text = ConfigSection({**text.data, "num_hidden_layers": layers}, text.where)
    check_layers(text, "num_hidden_layers", weights, f"{VLM}.text_model.layers")
    head_dim = read_head_dim(text)
    frequencies = tuple(plain_frequencies(ROPE_THETA, head_dim).tolist())
    rope = text.make(
        RopeConfig,
        theta=ROPE_THETA,
        frequencies=frequencies,
        attention_scaling=1.0,
        mrope_section=(),
        mrope_interleaved=False,
    )
    llm = read_language_model(text, head_dim, rope)
    expert_layers = config.integer("num_expert_layers", -1)
    if expert_layers > 0 and expert_layers != layers:
        raise config.fail("num_expert_layers", f"supported: a layer for each of the {layers} of the SmolVLM")
    if weights.list_length(f"{EXPERT}.layers") < layers:
        raise config.fail("num_vlm_layers", f"{weights.where.name} has fewer layers of {EXPERT}.layers")
    width = _expert_width(config, llm.hidden_size)
    tower = _read_tower(config, vlm, weights)
    images = len(camera_names(config)) * tower.tokens
    architecture = SmolVLAArchitecture(
        llm=llm,
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps", 1e-5),
        tower=tower,
        expert_hidden_size=width,
        expert_intermediate_size=_expert_intermediate_size(width),
        self_attention=_self_attention(config, layers),
        state_dim=config.size("max_state_dim", 32),
        action_dim=config.size("max_action_dim", 32),
        horizon=config.size("chunk_size", 50, MOST_ACTIONS),
        max_prefix_rows=images + config.size("tokenizer_max_length", 48, MOST_TOKENS) + 1,
        min_period=config.number("min_period", 4e-3),
        max_period=config.number("max_period", 4.0),
    )
    if not 0 < architecture.min_period < architecture.max_period:
        limit = f"max_period {architecture.max_period}"
        raise config.fail("min_period", f"expected more than 0 and less than {limit}")
    if not math.isfinite(architecture.max_period / architecture.min_period):
        raise config.fail("max_period", f"expected a finite multiple of min_period {architecture.min_period}")
    return architecture


def read_policy(
    checkpoint: Path,
    config: ConfigSection,
    architecture: SmolVLAArchitecture,
    weights: Weights,
    prompt: tuple[tuple[int, ...], tuple[int, ...]],
    dataset: Path | None,
) -> SmolVLAConfig:
    """Read the configuration for the runtime.

    prompt: tokens that the tokenizer puts before and after a text.
    """
    state_size = feature_size(config, "input_features", STATE, architecture.state_dim)
    action_size = feature_size(config, "output_features", ACTION, architecture.action_dim)
    renamed = check_steps(checkpoint, config, NEW_LINE)
    normalisation = Normalisation(checkpoint, config, weights, dataset)
    state = normalisation.vector(STATE, state_size, renamed)
    action = normalisation.vector(ACTION, action_size, renamed)
    return config.make(
        SmolVLAConfig,
        cameras=config.make(
            PaddedCameraConfig,
            names=camera_names(config, renamed),
            image_size=architecture.tower.image_size,
            tokens=architecture.tower.tokens,
            fill=-1.0,
            centred=False,
            filtered=False,
        ),
        state=config.make(StateConfig, **state, model_dim=architecture.state_dim),
        action_space=config.make(
            AffineSpaceConfig,
            **action,
            dt=1 / dataset_fps(dataset),
            horizon=architecture.horizon,
            relative=relative_actions(checkpoint, action_size),
            model_dim=architecture.action_dim,
        ),
        max_prompt_tokens=config.size("tokenizer_max_length", 48),
        prompt_before=prompt[0],
        prompt_after=prompt[1],
        num_denoise_steps=config.size("num_steps", 10, MOST_STEPS),
    )


def _check_supported(config: ConfigSection) -> None:
    """Raise ValueError for an option of LeRobot that the graphs do not support."""
    check_keys(config, KEYS)
    check_features(config)
    config.one_of("n_obs_steps", [1], default=1)
    config.one_of("add_image_special_tokens", [False], default=False)
    config.one_of("adapt_to_pi_aloha", [False], default=False)
    config.one_of("use_delta_joint_actions_aloha", [False], default=False)
    normalised = config.section("normalization_mapping")
    normalised.one_of("VISUAL", ["IDENTITY"], default="IDENTITY")


def _self_attention(config: ConfigSection, layers: int) -> tuple[bool, ...]:
    """Read in which layers actions attend to each other."""
    if "cross" not in config.text("attention_mode"):
        return (True,) * layers
    every = config.integer("self_attn_every_n_layers", 2)
    return tuple(every > 0 and i % every == 0 for i in range(layers))


def _expert_width(config: ConfigSection, hidden_size: int) -> int:
    """Read the width of the expert: a part of that of the SmolVLM."""
    width = hidden_size * config.number("expert_width_multiplier", 0.75)
    if not 2 <= width <= MAX_SIZE or int(width) % 2:
        raise config.fail("expert_width_multiplier", f"a width of {width:g}, expected an even number")
    return int(width)


def _expert_intermediate_size(hidden_size: int) -> int:
    """Compute the width of the expert's feed-forward block.

    The width is 8/3 of the expert's size, in steps of 256.
    """
    return 256 * -(-int(4 * int(2 * hidden_size / 3)) // 256)


def _read_tower(config: ConfigSection, vlm: ConfigSection, weights: Weights) -> TowerArchitecture:
    vision = vlm.section("vision_config")
    vision.one_of("hidden_act", ["gelu_pytorch_tanh"], default="gelu_pytorch_tanh")
    vision.one_of("num_channels", [3], default=3)
    layers = f"{VLM}.vision_model.encoder.layers"
    check_layers(vision, "num_hidden_layers", weights, layers, default=12)
    patch, merge = vision.size("patch_size", 32), vlm.size("scale_factor", 2)
    own = vision.size("image_size", 224)
    sides, factor = config.integers("resize_imgs_with_padding"), patch * merge
    if len(set(sides)) != 1 or len(sides) != 2 or not factor <= sides[0] <= MOST_PIXELS or sides[0] % factor:
        expected = f"expected a square with a side of a multiple of {factor} pixels, at most {MOST_PIXELS}"
        raise config.fail("resize_imgs_with_padding", expected)
    hidden, heads = vision.size("hidden_size", 1152), vision.size("num_attention_heads", 16)
    if hidden % heads:
        raise vision.fail("num_attention_heads", f"expected a divisor of hidden_size {hidden}")
    return TowerArchitecture(
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size", 3072),
        num_heads=heads,
        depth=vision.size("num_hidden_layers", 12),
        epsilon=vision.number("layer_norm_eps", 1e-6),
        patch_size=patch,
        position_side=own // patch,
        image_size=sides[0],
        merge=merge,
    )
