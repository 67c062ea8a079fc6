# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of a pi0 or pi0.5 that LeRobot saved.

The checks cover everything that the graphs rely on. The numbers of heads are those of Gemma and SigLIP in all
variants that the model's code knows; other sizes are those of the tensors.

Sources: LeRobot 0.4.4 and 0.6.1, configuration_pi0.py, configuration_pi05.py and modeling_pi05.py.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import plain_frequencies
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    COMMON_KEYS,
    MOST_ACTIONS,
    MOST_STEPS,
    STATE,
    camera_names,
    check_features,
    check_keys,
    dataset_fps,
    feature_size,
)
from edgellm_ros.builder.policies.pi.architecture import (
    EMBEDDING,
    EXPERT,
    HEADS,
    KV_HEADS,
    MODEL,
    TEXT,
    TOWER,
    TOWER_EPSILON,
    TOWER_HEADS,
    PiArchitecture,
)
from edgellm_ros.builder.policies.pi.tensors import matrix_shape
from edgellm_ros.builder.policies.pi.version import OLD, LeRobotVersion
from edgellm_ros.builder.policies.processors import (
    PI0_NEW_LINE,
    STATE_PROMPT,
    check_steps,
    relative_actions,
    relative_enabled,
)
from edgellm_ros.builder.policies.rope import ROPE_THETA
from edgellm_ros.builder.policies.siglip import SiglipTower
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import (
    AffineSpaceConfig,
    PaddedCameraConfig,
    Pi0Config,
    Pi05Config,
    StateConfig,
)
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig

VARIANTS = ["gemma_2b", "gemma_300m"]
KEYS = COMMON_KEYS | {
    "action_expert_variant", "action_feature_names", "chunk_size", "compile_mode", "compile_model",
    "dtype", "empty_cameras", "freeze_vision_encoder", "gradient_checkpointing", "image_resolution",
    "max_action_dim", "max_period", "max_state_dim", "min_period", "n_action_steps",
    "num_inference_steps", "optimizer_betas", "optimizer_eps", "optimizer_grad_clip_norm",
    "optimizer_lr", "optimizer_weight_decay", "paligemma_variant", "relative_exclude_joints",
    "rtc_config", "scheduler_decay_lr", "scheduler_decay_steps", "scheduler_warmup_steps",
    "time_sampling_beta_alpha", "time_sampling_beta_beta", "time_sampling_offset",
    "time_sampling_scale", "tokenizer_max_length", "train_expert_only", "use_relative_actions",
}  # fmt: skip
MAX_POSITIONS = 8192  # of Gemma
MOST_VALUES = 4096  # of a state in words
OLD_STATE_DIM = 32  # values that LeRobot 0.4 writes into a prompt
OLD_FILL, FILL = -3.0, -1.0  # LeRobot 0.4 fills up with -1 before it turns 0 to 1 into -1 to 1


def read_architecture(config: ConfigSection, weights: Weights) -> PiArchitecture:
    """Read the sizes of all graphs; weights: with canonical names."""
    _check_supported(config)
    adaptive = config.text("type") == "pi05"
    vocabulary, hidden = matrix_shape(weights, EMBEDDING)
    layers = weights.list_length(f"{TEXT}.layers")
    if not layers or weights.list_length(f"{EXPERT}.layers") != layers:
        count = weights.list_length(f"{EXPERT}.layers")
        raise ValueError(
            f"{weights.where}: {layers} layers of {TEXT} and {count} of {EXPERT}, expected equally many"
        )
    head_dim, _ = matrix_shape(weights, f"{TEXT}.layers.0.self_attn.k_proj.weight")
    if head_dim % 2:
        raise ValueError(f"{weights.where}: heads of {head_dim} values, expected an even number")
    expert_hidden, _ = matrix_shape(weights, f"{MODEL}.action_in_proj.weight")
    if expert_hidden % 2:
        raise ValueError(f"{weights.where}: an expert of width {expert_hidden}, expected an even number")
    tower = _read_tower(config, weights)
    architecture = PiArchitecture(
        llm=_language_model(config, vocabulary, hidden, layers, head_dim),
        intermediate_size=matrix_shape(weights, f"{TEXT}.layers.0.mlp.gate_proj.weight")[0],
        tower=tower,
        expert_hidden_size=expert_hidden,
        expert_intermediate_size=matrix_shape(weights, f"{EXPERT}.layers.0.mlp.gate_proj.weight")[0],
        adaptive=adaptive,
        state_dim=config.size("max_state_dim", 32, MOST_VALUES),
        action_dim=config.size("max_action_dim", 32),
        horizon=config.size("chunk_size", 50, MOST_ACTIONS),
        max_prefix_rows=len(camera_names(config)) * tower.side**2 + config.size("tokenizer_max_length"),
        min_period=config.number("min_period", 4e-3),
        max_period=config.number("max_period", 4.0),
    )
    if not 0 < architecture.min_period < architecture.max_period:
        limit = f"max_period {architecture.max_period}"
        raise config.fail("min_period", f"expected more than 0 and less than {limit}")
    if architecture.max_prefix_rows + architecture.horizon > MAX_POSITIONS:
        rows = architecture.max_prefix_rows
        raise config.fail("chunk_size", f"with {rows} rows before it, expected at most {MAX_POSITIONS} rows")
    return architecture


def read_policy(
    checkpoint: Path,
    config: ConfigSection,
    architecture: PiArchitecture,
    weights: Weights,
    prompt: tuple[tuple[int, ...], tuple[int, ...]],
    sources: tuple[Path | None, LeRobotVersion],
) -> Pi0Config | Pi05Config:
    """Read the configuration for the runtime.

    prompt: tokens that the tokenizer puts before and after a text; sources: the data set, and which LeRobot
    the policy was trained with.
    """
    (dataset, version), adaptive = sources, architecture.adaptive
    state_size = feature_size(
        config, "input_features", STATE, MOST_VALUES if adaptive else architecture.state_dim
    )
    action_size = feature_size(config, "output_features", ACTION, architecture.action_dim)
    renamed = check_steps(checkpoint, config, STATE_PROMPT if adaptive else PI0_NEW_LINE)
    if config.flag("use_relative_actions", default=False) != relative_enabled(checkpoint):
        raise config.fail("use_relative_actions", "expected as `enabled` of relative_actions_processor")
    normalisation = Normalisation(checkpoint, config, weights, dataset)
    state = normalisation.vector(STATE, state_size, renamed)
    action = normalisation.vector(ACTION, action_size, renamed)
    old = version == OLD
    if old and adaptive:
        config.one_of("max_state_dim", [OLD_STATE_DIM], default=OLD_STATE_DIM)
    common = {
        "cameras": config.make(
            PaddedCameraConfig,
            names=camera_names(config, renamed),
            image_size=architecture.tower.image_size,
            tokens=architecture.tower.side**2,
            fill=OLD_FILL if old else FILL,
            centred=True,
            filtered=False,
        ),
        "state": config.make(StateConfig, **state, model_dim=max(state_size, architecture.state_dim)),
        "action_space": config.make(
            AffineSpaceConfig,
            **action,
            dt=1 / dataset_fps(dataset),
            horizon=architecture.horizon,
            relative=relative_actions(checkpoint, action_size),
            model_dim=architecture.action_dim,
        ),
        "max_prompt_tokens": config.size("tokenizer_max_length"),
        "prompt_before": prompt[0],
        "prompt_after": prompt[1],
        "num_denoise_steps": config.size("num_inference_steps", 10, MOST_STEPS),
        "cleaned": False,
    }
    if not adaptive:
        return config.make(Pi0Config, **common)
    values = max(state_size, OLD_STATE_DIM) if old else state_size
    return config.make(Pi05Config, **common, prompted_values=values)


def _check_supported(config: ConfigSection) -> None:
    """Raise ValueError for an option of LeRobot that the graphs do not support."""
    check_keys(config, KEYS)
    check_features(config)
    config.one_of("n_obs_steps", [1], default=1)
    for name in ("paligemma_variant", "action_expert_variant"):
        config.one_of(name, VARIANTS, default=VARIANTS[0])
    normalised = config.section("normalization_mapping")
    normalised.one_of("VISUAL", ["IDENTITY"], default="IDENTITY")


def _language_model(
    config: ConfigSection, vocabulary: int, hidden: int, layers: int, head_dim: int
) -> LanguageModelConfig:
    rope = config.make(
        RopeConfig,
        theta=ROPE_THETA,
        frequencies=tuple(plain_frequencies(ROPE_THETA, head_dim).tolist()),
        attention_scaling=1.0,
        mrope_section=(),
        mrope_interleaved=False,
    )
    return config.make(
        LanguageModelConfig,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=MAX_POSITIONS,
        reduced_vocab_size=0,
        num_deepstack_features=0,
        rope=rope,
    )


def _read_tower(config: ConfigSection, weights: Weights) -> SiglipTower:
    kernel = weights.shape(f"{TOWER}.embeddings.patch_embedding.weight")
    if len(kernel) != 4 or kernel[2] != kernel[3] or kernel[0] % TOWER_HEADS:
        expected = f"expected [n,3,patch,patch], n a multiple of {TOWER_HEADS}"
        raise ValueError(f"{weights.where}: the patch embedding has shape {list(kernel)}: {expected}")
    hidden, _, patch, _ = kernel
    sides = config.integers("image_resolution") if config.has("image_resolution") else (224, 224)
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < patch or sides[0] % patch:
        expected = f"expected a square with a side of a multiple of {patch} pixels"
        raise config.fail("image_resolution", expected)
    return SiglipTower(
        hidden_size=hidden,
        intermediate_size=matrix_shape(weights, f"{TOWER}.encoder.layers.0.mlp.fc1.weight")[0],
        num_heads=TOWER_HEADS,
        depth=weights.list_length(f"{TOWER}.encoder.layers"),
        epsilon=TOWER_EPSILON,
        patch_size=patch,
        position_side=sides[0] // patch,
        image_size=sides[0],
    )
