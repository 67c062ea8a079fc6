# SPDX-License-Identifier: Apache-2.0
"""Exports of GR00T N1.7 in LeRobot's layout."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.groot_checkpoint import ROBOT, write_groot_of_lerobot
from fixtures.policy_folders import AFTER, BEFORE, change_json
from fixtures.tiny_checkpoint import write_json

PACK, ENCODE, DECODE = 2, 3, 0  # places of steps


@pytest.fixture(scope="module")
def by_key(tmp_path_factory):
    return write_groot_of_lerobot(tmp_path_factory.mktemp("by_key"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    return write_groot_of_lerobot(tmp_path_factory.mktemp("vectors"), by_key=False)


def planned(checkpoint, **options):
    return plan_export(checkpoint, ExportOptions(**options))


def test_statistics_of_vectors_are_those_of_the_state_files(vectors):
    policy = planned(vectors).config.policy
    stored = load_file(vectors / f"policy_preprocessor_step_{PACK}_groot_n1_7_pack_inputs_v1.safetensors")
    np.testing.assert_array_equal(np.float32(policy.state.offset), stored["observation.state.min"])
    space = policy.action_space
    ends = np.float32(space.offset) + 2 * np.float32(space.scale)
    np.testing.assert_allclose(ends, stored["action.max"], rtol=1e-6)
    assert (policy.embodiment, space.horizon, space.names[0]) == (ROBOT, 5, "action_0")
    assert policy.cameras.names == ("front", "wrist")


def test_a_data_set_names_the_values_of_vectors(vectors, by_key, tmp_path):
    names = ["a", "b", "c", "d"]
    features = {"action": {"names": names}, "observation.state": {"names": names}}
    write_json(tmp_path / "info.json", {"fps": 10, "features": features})
    assert planned(vectors, dataset=tmp_path).config.policy.state.names == tuple(names)
    named = planned(by_key, dataset=tmp_path).config.policy.action_space
    assert (named.names[-1], named.dt) == ("gripper", pytest.approx(0.1))


def test_weights_are_read_from_the_longer_names(by_key):
    plan = planned(by_key)
    assert [each.name for each in plan.unread] == ["_groot_model.backbone.model.model.language_model.norm.*"]


def test_the_steps_of_the_flow_may_be_those_of_the_policy(by_key, tmp_path):
    copy = shutil.copytree(by_key, tmp_path / "copy")
    assert planned(copy).config.policy.num_denoise_steps == 4
    change_json(copy / "config.json", lambda data: data.update(num_inference_timesteps=8))
    assert planned(copy).config.policy.num_denoise_steps == 8


def step(file, place, name=None, **settings):
    def change(data):
        if name is not None:
            data["steps"].insert(place, {"registry_name": name, "config": {}})
        data["steps"][place]["config"].update(settings)

    return file, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (step(BEFORE, PACK, normalize_min_max=False), "normalize_min_max False: supported: True"),
        (step(BEFORE, PACK, video_horizon=0), "video_horizon 0: expected at least 1"),
        (step(BEFORE, PACK, video_stride=2), "video_stride 2: not a key of LeRobot"),
        (("config.json", lambda data: data.update(state_noise=0.1)), "state_noise 0.1: not a key of LeRobot"),
        (step(BEFORE, PACK, max_state_dim=9), "max_state_dim 9: supported: 14"),
        (
            step(BEFORE, PACK, embodiment_mapping={}),
            f"embodiment_tag '{ROBOT}': expected one of embodiment_m",
        ),
        (step(BEFORE, PACK, raw_stats={}), "raw_stats: expected that of the step groot_n1_7_pack_inputs_v1"),
        (
            step(BEFORE, PACK, video_modality_keys="top"),
            "video_modality_keys 'top': expected a list of names",
        ),
        (step(BEFORE, ENCODE, image_target_size=None), "image_target_size None: expected a list of integers"),
        (
            step(BEFORE, 1, "shuffle"),
            r"steps\[1\] 'shuffle': not supported, and without it actions would be wr",
        ),
        (
            step(BEFORE, 1, "relative_actions_processor", enabled=True),
            "'relative_actions_processor': not supp",
        ),
        (
            step(AFTER, DECODE, action_decode_transform="libero"),
            "action_decode_transform 'libero': supported",
        ),
        (step(AFTER, 1, "groot_action_unpack_unnormalize_v2"), "expected one step .* or .*, found 2"),
        (("config.json", lambda data: data.update(n_obs_steps=2)), "n_obs_steps 2: supported: 1"),
        (
            ("base/config.json", lambda data: data.update(model_type="x")),
            "model_type 'x': supported: Gr00tN1d7",
        ),
    ],
)
def test_what_the_engine_would_compute_differently_is_refused(by_key, tmp_path, change, message):
    copy = shutil.copytree(by_key, tmp_path / "copy")
    change_json(copy / change[0], change[1])
    with pytest.raises(ValueError, match=message) as caught:
        planned(copy)
    assert len(str(caught.value).splitlines()) == 1


def test_vectors_need_their_statistics(vectors, tmp_path):
    copy = shutil.copytree(vectors, tmp_path / "copy")
    change_json(copy / AFTER, lambda data: data["steps"][DECODE].pop("state_file"))
    with pytest.raises(ValueError, match="'state_file' is missing: no statistics of action"):
        planned(copy)


def test_another_embodiment_than_that_of_the_checkpoint_is_refused(by_key):
    with pytest.raises(ValueError, match=f"--embodiment 'gr1': the checkpoint is for {ROBOT}"):
        planned(by_key, embodiment="gr1")


def test_a_missing_base_is_told_with_where_to_get_it(by_key, tmp_path):
    copy = shutil.copytree(by_key, tmp_path / "copy")
    shutil.rmtree(copy / "base")
    with pytest.raises(FileNotFoundError, match=r"hf download nvidia/GR00T-N1.7-3B config.json --local-dir"):
        planned(copy)
