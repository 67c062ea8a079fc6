# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of an X-VLA.

The checks cover everything that the graphs rely on. Sources: LeRobot 0.4.4 and 0.6.1,
policies/xvla/configuration_xvla.py, modeling_xvla.py and action_hub.py.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import MAX_SIZE, ConfigSection, read_section
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    COMMON_KEYS,
    IMAGES,
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
from edgellm_ros.builder.policies.statistics import Normalisation, normalization
from edgellm_ros.builder.policies.xvla.architecture import (
    HEAD,
    MODES,
    ActionMode,
    XVLAArchitecture,
)
from edgellm_ros.builder.policies.xvla.davit import FILL
from edgellm_ros.builder.policies.xvla.florence import read_text, read_tower
from edgellm_ros.builder.policies.xvla.steps import Steps
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import (
    TARGET,
    PaddedCameraConfig,
    StateConfig,
    TipSpaceConfig,
    XVLAConfig,
)

KEYS = COMMON_KEYS | {
    "action_mode", "chunk_size", "depth", "dim_time", "domain_feature_key", "dtype", "empty_cameras",
    "florence_config", "freeze_language_encoder", "freeze_vision_encoder", "hidden_size",
    "len_soft_prompts", "max_action_dim", "max_len_seq", "max_state_dim", "mlp_ratio", "n_action_steps",
    "num_denoising_steps", "num_domains", "num_heads", "num_image_views", "optimizer_betas",
    "optimizer_eps", "optimizer_grad_clip_norm", "optimizer_lr", "optimizer_soft_prompt_lr_scale",
    "optimizer_soft_prompt_warmup_lr_scale", "optimizer_weight_decay", "pad_language_to",
    "resize_imgs_with_padding", "scheduler_decay_lr", "scheduler_decay_steps", "scheduler_warmup_steps",
    "tokenizer_max_length", "tokenizer_name", "tokenizer_padding_side", "train_policy_transformer",
    "train_soft_prompts", "use_hetero_proj", "use_proprio",
}  # fmt: skip
MOST_VIEWS = 64
TARGET_MODES = "ee6d", "agibot_ee6d"  # whose actions begin with a point, two columns of a rotation, a gripper


def read_architecture(config: ConfigSection, weights: Weights, older: bool) -> XVLAArchitecture:
    """Read the sizes of all graphs; older: whether tensors are in Microsoft's layout.

    The domain and the padding token are not known yet.
    """
    _check_supported(config)
    florence = config.section("florence_config")
    tower = read_tower(florence.section("vision_config"), _image_size(config), weights, older)
    text = read_text(florence, weights)
    mode = _read_mode(config)
    width, heads = config.size("hidden_size", 1024), config.size("num_heads", 16)
    if width % heads:
        raise config.fail("num_heads", f"expected a divisor of hidden_size {width}")
    inner = width * config.number("mlp_ratio", 4.0)
    if not 1 <= inner <= MAX_SIZE:
        raise config.fail("mlp_ratio", f"{inner:g} values, expected from 1 to {MAX_SIZE}")
    depth, found = config.size("depth", 24), weights.list_length(f"{HEAD}.blocks")
    if depth != found:
        raise config.fail("depth", f"{weights.where.name} has {found} layers of {HEAD}.blocks")
    prompts = config.integer("len_soft_prompts", 32)
    if prompts < 0 or (not prompts and weights.has_module(f"{HEAD}.soft_prompt_hub")):
        raise config.fail("len_soft_prompts", f"{weights.where.name} has soft prompts, expected at least 1")
    architecture = XVLAArchitecture(
        tower=tower,
        text=text,
        views=_views(config),
        max_tokens=config.size("tokenizer_max_length", 64, text.positions),
        hidden_size=width,
        depth=depth,
        heads=heads,
        inner_size=int(inner),
        domains=config.size("num_domains", 30),
        domain=0,
        soft_prompts=prompts,
        time_size=config.size("dim_time", 32, MAX_SIZE),
        positions=config.size("max_len_seq", 512),
        own_projections=config.flag("use_hetero_proj", False),
        action_dim=mode.size,
        state_dim=config.size("max_state_dim", 32),
        grippers=mode.grippers,
        horizon=config.size("chunk_size", 32, MOST_ACTIONS),
    )
    _check_rows(config, architecture)
    return architecture


def _check_rows(config: ConfigSection, architecture: XVLAArchitecture) -> None:
    """Raise ValueError for sizes with which LeRobot cannot compute."""
    text, rows = architecture.text, architecture.horizon + architecture.prefix_rows
    if rows > architecture.positions:
        raise config.fail("max_len_seq", f"less than the {rows} rows of actions, images and task")
    if architecture.encoder_rows > text.positions:
        raise config.fail(
            "tokenizer_max_length",
            f"{architecture.encoder_rows} rows with those of an image, but the encoder has {text.positions} "
            "positions",
        )
    if architecture.time_size < 2:
        raise config.fail("dim_time", "expected at least 2")
    steps = config.size("n_action_steps", 32)
    if steps > architecture.horizon:
        raise config.fail("n_action_steps", f"expected at most chunk_size {architecture.horizon}")


def read_policy(
    checkpoint: Path,
    config: ConfigSection,
    architecture: XVLAArchitecture,
    steps: Steps,
    prompt: tuple[tuple[int, ...], tuple[int, ...]],
    normalisation: Normalisation,
) -> XVLAConfig:
    """Read the configuration for the runtime.

    prompt: tokens that the tokenizer puts before and after a text.
    """
    state_size = _state_size(config, architecture.state_dim, steps, normalisation)
    state = normalisation.vector(STATE, state_size, steps.renamed)
    return config.make(
        XVLAConfig,
        cameras=config.make(
            PaddedCameraConfig,
            names=camera_names(config, steps.renamed),
            image_size=architecture.tower.image_size,
            tokens=architecture.tower.tokens,
            fill=FILL,
            centred=False,
            filtered=False,
        ),
        state=config.make(StateConfig, **state, model_dim=architecture.state_dim),
        action_space=_read_actions(config, architecture, steps, normalisation),
        max_prompt_tokens=architecture.max_tokens,
        prompt_before=prompt[0],
        prompt_after=prompt[1],
        num_denoise_steps=config.size("num_denoising_steps", 10, MOST_STEPS),
    )


def _state_size(config: ConfigSection, most: int, steps: Steps, normalisation: Normalisation) -> int:
    """Read the number of values of the state.

    A policy that was trained from another one may still have that one's feature, since LeRobot takes any
    number of values. So the data set's counts, if there is one and nothing is normalised.
    """
    size, dataset = feature_size(config, "input_features", STATE, most), normalisation.dataset
    if dataset is None or normalization(config, "STATE") != "IDENTITY":
        return size
    features, name = read_section(dataset / "info.json").section("features"), steps.renamed.get(STATE, STATE)
    if not features.has(name) or not features.section(name).has("shape"):
        return size
    shape = features.section(name).integers("shape")
    if len(shape) != 1 or not 1 <= shape[0] <= most:
        raise features.section(name).fail("shape", f"expected [n], n from 1 to {most} (max_state_dim)")
    return shape[0]


def _read_actions(
    config: ConfigSection, architecture: XVLAArchitecture, steps: Steps, normalisation: Normalisation
) -> TipSpaceConfig:
    """Read names and normalisation of actions.

    The mode decides how many there are, whatever the feature says, as in LeRobot.
    """
    size, name = _read_mode(config).actions, config.text("action_mode").lower()
    shape = feature_size(config, "output_features", ACTION, MOST_ACTIONS)
    identity = normalization(config, "ACTION") == "IDENTITY"
    if not identity and (shape != size or steps.is_target):
        reason = f"normalised, but action_mode {name} has {TARGET if steps.is_target else size} actions"
        raise config.section("output_features").section(ACTION).fail("shape", reason)
    if steps.is_target and name not in TARGET_MODES:
        known = ", ".join(TARGET_MODES)
        raise config.fail("action_mode", f"a step of the processor makes targets, which needs one of {known}")
    action = normalisation.vector(ACTION, TARGET if steps.is_target else size, steps.renamed)
    return config.make(
        TipSpaceConfig,
        **action,
        dt=1 / dataset_fps(normalisation.dataset),
        horizon=architecture.horizon,
        relative=(False,) * len(action["names"]),
        model_dim=architecture.action_dim,
        is_target=steps.is_target,
    )


def _check_supported(config: ConfigSection) -> None:
    """Raise ValueError for an option of LeRobot that the graphs do not support."""
    check_keys(config, KEYS)
    check_features(config)
    config.one_of("n_obs_steps", [1], default=1)
    config.one_of("use_proprio", [True], default=True)
    config.one_of("dtype", ["float32", "bfloat16"], default="float32")
    config.one_of("domain_feature_key", [None])
    config.one_of("pad_language_to", ["max_length"], default="max_length")
    config.one_of("tokenizer_padding_side", ["right"], default="right")
    config.section("normalization_mapping").one_of("VISUAL", ["IDENTITY"], default="IDENTITY")
    features = config.section("input_features")
    for key in features.data:
        if features.section(key).text("type") == "VISUAL" and not key.startswith(IMAGES):
            raise features.fail(key, f"expected {IMAGES}...: the processor normalises no other images")


def _image_size(config: ConfigSection) -> int:
    """Read the side of images in pixels: that to which they are resized, or their own."""
    if config.has("resize_imgs_with_padding") and config.data["resize_imgs_with_padding"] is not None:
        sides = config.integers("resize_imgs_with_padding")
        if len(set(sides)) != 1 or len(sides) != 2 or not 1 <= sides[0] <= MOST_PIXELS:
            expected = f"expected a square with a side of at most {MOST_PIXELS} pixels"
            raise config.fail("resize_imgs_with_padding", expected)
        return sides[0]
    features = config.section("input_features")
    cameras = [key for key in features.data if features.section(key).text("type") == "VISUAL"]
    shapes = {features.section(key).integers("shape") for key in cameras}
    for key in cameras:
        shape = features.section(key).integers("shape")
        if len(shapes) > 1 or len(shape) != 3 or shape[1] != shape[2] or not 1 <= shape[1] <= MOST_PIXELS:
            raise features.section(key).fail(
                "shape", "expected squares of one size for all cameras, or resize_imgs_with_padding"
            )
    if not shapes:
        raise features.fail(f"{IMAGES}...", "expected at least one camera (type VISUAL)")
    return shapes.pop()[1]


def _views(config: ConfigSection) -> int:
    """Read the number of images as LeRobot counts them when it loads a policy.

    A saved policy has its empty cameras among the features, and they count once more.
    """
    features = config.section("input_features")
    cameras = sum(features.section(key).text("type") == "VISUAL" for key in features.data)
    empty = config.integer("empty_cameras", 0)
    given = 0
    if config.has("num_image_views") and config.data["num_image_views"] is not None:
        given = config.size("num_image_views", most=MOST_VIEWS)
    if not 0 <= empty <= MOST_VIEWS:
        raise config.fail("empty_cameras", f"expected from 0 to {MOST_VIEWS}")
    return max(given, cameras + empty)


def _read_mode(config: ConfigSection) -> ActionMode:
    """Read what the values of actions are, with sizes."""
    name = config.text("action_mode")
    if name.lower() not in MODES:
        raise config.fail("action_mode", f"supported: {', '.join(MODES)}")
    mode = MODES[name.lower()]
    if not mode.size:
        most = config.size("max_action_dim", 20, MOST_ACTIONS)
        return ActionMode(most, feature_size(config, "output_features", ACTION, most))
    states = config.size("max_state_dim", 32)
    if mode.states and states != mode.states:
        raise config.fail("max_state_dim", f"expected {mode.states} with action_mode {name}")
    if mode.grippers and states <= max(mode.grippers):
        raise config.fail("max_state_dim", f"expected more than {max(mode.grippers)} with action_mode {name}")
    return mode
