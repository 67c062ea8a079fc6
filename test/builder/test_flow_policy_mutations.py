# SPDX-License-Identifier: Apache-2.0
"""Mutated folders of pi0, pi0.5, Diffusion Policy, GR00T and X-VLA.

Each is refused with one line, or answers as before. Of each kind of folder some mutations are checked, in
equal steps through all that there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.draws import draws
from fixtures.groot_checkpoint import ONE_ROBOT, write_groot, write_groot_of_lerobot
from fixtures.groot_n16_checkpoint import ONE_ROBOT_N16, write_groot_n16
from fixtures.mutated_policies import WEIGHTS, Whole, architecture, check
from fixtures.pi_checkpoint import write_openpi, write_pi
from fixtures.policy_folders import AFTER, BEFORE
from fixtures.policy_mutations import (
    Mutation,
    file_mutations,
    json_mutations,
    step_mutations,
    tensor_mutations,
    value_mutations,
    weight_mutations,
)
from fixtures.xvla_checkpoint import write_xvla

pytestmark = pytest.mark.slow
OF_WEIGHTS = draws(6, 12)  # mutations of weights, which take ten times as long as others
PI = {
    "chunk_size": (lambda model: model.config.action_space.horizon, 50),
    "action_horizon": (lambda model: model.config.action_space.horizon, 50),
    "num_inference_steps": (lambda model: model.config.num_denoise_steps, 10),
    "min_period": (lambda model: architecture(model).min_period, 4e-3),
    "max_period": (lambda model: architecture(model).max_period, 4.0),
    "max_state_dim": (lambda model: model.config.state.model_dim, 32),
}
DIFFUSION = {
    "n_action_steps": (lambda model: model.config.action_space.horizon, None),
    "n_groups": (lambda model: architecture(model).unet.groups, 8),
    "num_train_timesteps": (lambda model: model.config.schedule.train_steps, 100),
    "num_inference_steps": (lambda model: model.config.num_denoise_steps, 20),
    "clip_sample": (lambda model: model.config.schedule.clip is not None, True),
    "clip_sample_range": (lambda model: model.config.schedule.clip, 1.0),
}
GROOT = {
    "action_horizon": (lambda model: model.config.action_space.model_horizon, 40),
    "attend_text_every_n_blocks": (lambda model: architecture(model).text_every, 2),
    "num_inference_timesteps": (lambda model: model.config.num_denoise_steps, 4),
    "num_timestep_buckets": (lambda model: architecture(model).time_steps, 1000),
    "formalize_language": (lambda model: model.config.plain_words, True),
    "video_horizon": (lambda model: model.config.cameras.frames, 1),
    "new_embodiment": (lambda model: architecture(model).embodiment, None),
}
GROOT_N16 = GROOT | {"action_horizon": (GROOT["action_horizon"][0], 16)}
XVLA = {
    "chunk_size": (lambda model: model.config.action_space.horizon, 32),
    "num_heads": (lambda model: architecture(model).heads, 16),
    "num_denoising_steps": (lambda model: model.config.num_denoise_steps, 10),
    "num_image_views": (lambda model: architecture(model).views, 2),
    "empty_cameras": (lambda model: architecture(model).views - 2, 0),
    "domain_id": (lambda model: architecture(model).domain, 0),
}
# what a folder says that is data of the robot, or goes through the code of the policy's authors as it is
OPENPI_DATA = ("openpi.json: *", "*norm_stats.json: *")
DIFFUSION_DATA = ("config.json: crop_shape*", "config.json: beta_*")
GROOT_DATA = ("statistics.json: new_embodiment.*", "*.modality_keys*", "*: processor_kwargs.use_percentiles")
GROOT_DATA += ("*clip_outliers", "*use_albumentations", "*shortest_image_edge", "*crop_fraction")
GROOT_DATA += ("*letter_box_transform", "*video_modality_keys*", "*image_target_size.0")
XVLA_DATA = (
    "config.json: resize_imgs_with_padding*",
    "*vision_config.num_heads*",
    "*vision_config.num_groups*",
)
XVLA_DATA += ("*vision_config.patch_stride*", "*vision_config.patch_padding*", "*vision_config.window_size")
MANY, FEW = draws(100, 250), draws(45, 90)
# how a folder is written, settings and data of a Whole, and how many of its mutations are checked
POLICIES = {
    "pi0": (lambda folder: write_pi(folder, "pi0"), PI, (), FEW),
    "pi05": (write_pi, PI, (), FEW),
    "openpi": (write_openpi, PI, OPENPI_DATA, FEW),
    "diffusion": (write_diffusion, DIFFUSION, DIFFUSION_DATA, MANY),
    "groot": (lambda folder: write_groot(folder, shape=ONE_ROBOT), GROOT, GROOT_DATA, FEW),
    "groot_n16": (lambda folder: write_groot_n16(folder, shape=ONE_ROBOT_N16), GROOT_N16, GROOT_DATA, FEW),
    "groot_of_lerobot": (write_groot_of_lerobot, GROOT, GROOT_DATA, FEW),
    "xvla": (write_xvla, XVLA, XVLA_DATA, FEW),
}
OTHERS_FILES = "vlm", "train_config.json"  # of a model that has tests of its own, and of the training


@pytest.fixture(scope="module", params=list(POLICIES))
def mutated(request, tmp_path_factory) -> tuple[Whole, int]:
    """Return a folder, and how many of its mutations are checked."""
    write, settings, data, count = POLICIES[request.param]
    return Whole(write(tmp_path_factory.mktemp(request.param)), settings, data), count


def mutations(whole: Whole) -> Iterator[Mutation]:
    """Yield the mutations of a folder, but those of its weights."""
    folder = whole.folder
    for path in sorted(folder.rglob("*.json")):
        file = path.relative_to(folder).as_posix()
        if not file.startswith(OTHERS_FILES):
            yield from json_mutations(folder, file)
    for file in (BEFORE, AFTER):
        if (folder / file).is_file():
            yield from step_mutations(folder, file)
    for file in whole.statistics:
        yield from tensor_mutations(folder, file)
        yield from value_mutations(folder, file)
    yield from (each for each in file_mutations(folder) if not each.told.startswith(OTHERS_FILES))


def spread(found: Iterator[Mutation], count: int) -> list[Mutation]:
    """Return so many mutations, in equal steps."""
    every = list(found)
    return [every[i * len(every) // count] for i in range(min(count, len(every)))]


def test_a_mutated_folder_is_refused_or_the_same(mutated, tmp_path):
    whole, count = mutated
    refused, accepted = check(whole, spread(mutations(whole), count), tmp_path)
    assert refused > 0.4 * count
    assert accepted > 0.1 * count


def test_mutated_weights_are_refused(mutated, tmp_path):
    whole, _ = mutated
    found = weight_mutations(whole.folder, WEIGHTS)
    refused, accepted = check(whole, spread(found, OF_WEIGHTS), tmp_path)
    assert refused > 0.7 * OF_WEIGHTS
    assert accepted < 0.3 * OF_WEIGHTS
