# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of a Diffusion Policy.

The checks cover everything that the graphs rely on. Source: LeRobot 0.4.4, configuration_diffusion.py.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.diffusion.architecture import (
    DiffusionArchitecture,
    EncoderShape,
    UNetShape,
)
from edgellm_ros.builder.policies.diffusion.unet import LAST_GROUPS
from edgellm_ros.builder.policies.lerobot import (
    COMMON_KEYS,
    MOST_ACTIONS,
    MOST_PIXELS,
    STATE,
    camera_names,
    check_keys,
)
from edgellm_ros.builder.policies.observations import (
    ImageSpace,
    VectorReader,
    read_images,
    read_sizes,
)
from edgellm_ros.builder.policies.processors import check_steps
from edgellm_ros.builder.policies.resnet import RESNETS, SEQUENCE, ResNet
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.diffusion_policy_config import SCHEDULES, DiffusionConfig, NoiseScheduleConfig
from edgellm_ros.diffusion.policy_config import FixedCameraConfig

MOST_OBSERVATIONS = 64
KEYS = COMMON_KEYS | {
    "beta_end", "beta_schedule", "beta_start", "clip_sample", "clip_sample_range", "compile_mode",
    "compile_model", "crop_is_random", "crop_ratio", "crop_shape", "diffusion_step_embed_dim",
    "do_mask_loss_for_padding", "down_dims", "drop_n_last_frames", "gradient_checkpointing", "horizon",
    "kernel_size", "n_action_steps", "n_groups", "noise_scheduler_type", "num_inference_steps",
    "num_train_timesteps", "optimizer_betas", "optimizer_eps", "optimizer_lr", "optimizer_weight_decay",
    "prediction_type", "pretrained_backbone_weights", "resize_shape", "scheduler_name",
    "scheduler_warmup_steps", "spatial_softmax_num_keypoints", "use_film_scale_modulation",
    "use_group_norm", "use_separate_rgb_encoder_per_camera", "vision_backbone",
}  # fmt: skip
# Their defaults changed from one version of LeRobot to another.
REQUIRED = ("horizon", "n_action_steps", "use_group_norm", "use_separate_rgb_encoder_per_camera")
COMPILED = "unet._orig_mod"  # the U-Net of a policy with compile_model


def read_architecture(checkpoint: Path, config: ConfigSection, weights: Weights) -> DiffusionArchitecture:
    """Read the sizes of the graphs, and the normalisation of images.

    ValueError, which names file, key and value, for a checkpoint that the graphs would compute differently.
    """
    check_keys(config, KEYS)
    config.require(REQUIRED)
    if "crop_shape" not in config.data:  # it may be null
        raise ValueError(f"{config.where}: key 'crop_shape' is missing")
    sizes = read_sizes(config)
    if not sizes.state:
        raise config.section("input_features").fail(STATE, "expected the robot's state")
    images = read_images(checkpoint, config, weights)
    for image in images:
        if (image.height, image.width) != (images[0].height, images[0].width):
            found = f"{image.height}x{image.width} besides {images[0].height}x{images[0].width}"
            raise config.fail("input_features", f"expected images of one size, found {found}")
    observations = config.size("n_obs_steps", 2)
    if observations > MOST_OBSERVATIONS:
        raise config.fail("n_obs_steps", f"expected at most {MOST_OBSERVATIONS}")
    compiled = any(name.startswith(f"diffusion.{COMPILED}.") for name in weights.tensors)
    return DiffusionArchitecture(
        encoder=_read_encoder(config, images[0]),
        unet=_read_unet(config),
        images=images,
        observations=observations,
        state_dim=sizes.state,
        environment_dim=sizes.environment,
        horizon=_read_horizon(config),
        action_dim=sizes.action,
        unet_name=COMPILED if compiled else "unet",
    )


def read_policy(
    checkpoint: Path,
    config: ConfigSection,
    architecture: DiffusionArchitecture,
    weights: Weights,
    dataset: Path | None,
) -> DiffusionConfig:
    """Read the configuration for the runtime."""
    renamed = check_steps(checkpoint, config)
    vectors = VectorReader(checkpoint, config, weights, dataset, renamed, read_sizes(config))
    executed, left = config.size("n_action_steps"), architecture.horizon - architecture.observations + 1
    if executed > left:
        raise config.fail("n_action_steps", f"expected at most {left} (horizon - n_obs_steps + 1)")
    schedule = _read_schedule(config)
    given = config.given("num_inference_steps")
    steps = config.size("num_inference_steps") if given else schedule.train_steps
    if steps > schedule.train_steps:
        expected = f"expected at most {schedule.train_steps} (num_train_timesteps)"
        raise config.fail("num_inference_steps", expected)
    return config.make(
        DiffusionConfig,
        cameras=config.make(
            FixedCameraConfig,
            names=camera_names(config, renamed),
            heights=tuple(image.height for image in architecture.images),
            widths=tuple(image.width for image in architecture.images),
        ),
        state=vectors.state(),
        action_space=vectors.action_space(executed),
        num_observations=architecture.observations,
        model_horizon=architecture.horizon,
        num_denoise_steps=steps,
        schedule=schedule,
    )


def _read_encoder(config: ConfigSection, image: ImageSpace) -> EncoderShape:
    blocks, bottleneck = RESNETS[config.one_of("vision_backbone", sorted(RESNETS), default="resnet18")]
    resized = _size(config, "resize_shape") or (image.height, image.width)
    ratio = config.number("crop_ratio", 1.0)
    if not 0 < ratio <= 1:
        raise config.fail("crop_ratio", "expected more than 0, at most 1")
    if config.given("resize_shape"):  # the saved crop_shape is what follows from the ratio, if it is below 1
        cut = (int(resized[0] * ratio), int(resized[1] * ratio)) if ratio < 1 else resized
    else:
        cut = _size(config, "crop_shape") or resized
    if min(cut) < 1:
        raise config.fail("crop_ratio", f"leaves no pixel of resize_shape {list(resized)}")
    if cut[0] > resized[0] or cut[1] > resized[1]:
        raise config.fail("crop_shape", f"expected at most {list(resized)}, the size of the images")
    return EncoderShape(
        resnet=ResNet(
            blocks, bottleneck, group_norm=config.flag("use_group_norm", default=True), names=SEQUENCE
        ),
        keypoints=config.size("spatial_softmax_num_keypoints", 32),
        resized=resized,
        cut=cut,
        of_each_camera=config.flag("use_separate_rgb_encoder_per_camera", default=False),
    )


def _read_unet(config: ConfigSection) -> UNetShape:
    widths, groups = _widths(config), config.size("n_groups", 8)
    for width in widths:
        if width % groups:
            raise config.fail("down_dims", f"expected multiples of n_groups {groups}")
    if widths[0] % LAST_GROUPS:
        raise config.fail("down_dims", f"expected a multiple of {LAST_GROUPS} as the first one")
    kernel, time_width = config.size("kernel_size", 5), config.size("diffusion_step_embed_dim", 128)
    if kernel % 2 == 0:
        raise config.fail("kernel_size", "expected an odd number")
    if time_width % 2 or time_width < 4:
        raise config.fail("diffusion_step_embed_dim", "expected an even number of at least 4")
    scales = config.flag("use_film_scale_modulation", default=True)
    return UNetShape(widths, kernel, groups, time_width, scales)


def _widths(config: ConfigSection) -> tuple[int, ...]:
    if not config.has("down_dims"):
        return (512, 1024, 2048)
    widths = config.integers("down_dims")
    if not widths or min(widths) < 1:
        raise config.fail("down_dims", "expected at least one number, all of at least 1")
    return widths


def _read_horizon(config: ConfigSection) -> int:
    """Read the actions of the U-Net, which must be divisible as LeRobot requires."""
    horizon, divisor = config.size("horizon", most=MOST_ACTIONS), 2 ** len(_widths(config))
    if horizon % divisor:
        raise config.fail("horizon", f"expected a multiple of {divisor} (2 for each of down_dims)")
    return horizon


def _read_schedule(config: ConfigSection) -> NoiseScheduleConfig:
    clips = config.flag("clip_sample", default=True)
    return config.make(
        NoiseScheduleConfig,
        sampler=config.one_of("noise_scheduler_type", SCHEDULES["sampler"], default="DDPM"),
        train_steps=config.size("num_train_timesteps", 100),
        beta_schedule=config.one_of("beta_schedule", SCHEDULES["beta_schedule"], default="squaredcos_cap_v2"),
        beta_start=config.number("beta_start", 0.0001),
        beta_end=config.number("beta_end", 0.02),
        prediction=config.one_of("prediction_type", SCHEDULES["prediction"], default="epsilon"),
        clip=config.number("clip_sample_range", 1.0) if clips else None,
    )


def _size(config: ConfigSection, key: str) -> tuple[int, int] | None:
    """Read (height, width) in pixels; None if the key is missing or null."""
    if not config.given(key):
        return None
    sizes = config.integers(key)
    if len(sizes) != 2 or not all(1 <= size <= MOST_PIXELS for size in sizes):
        raise config.fail(key, f"expected [height, width], from 1 to {MOST_PIXELS}")
    return sizes[0], sizes[1]
