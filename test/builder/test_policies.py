# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's policies: SmolVLA."""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.builder.config.known_policies import SUPPORTED
from edgellm_ros.builder.exporter.check import check, render_check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.builder.tensorrt.profiles import input_shapes, make_profiles
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.policy_folders import BEFORE, copied, with_step
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, STATE, write_smolvla
from fixtures.tiny_checkpoint import write_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_smolvla(tmp_path_factory.mktemp("smolvla"))


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


def test_the_engine_has_the_graphs_and_the_tokenizer_alone(engine):
    parts = ("action", "prefix", "visual")
    graphs = [f"{part}/model.onnx{end}" for part in parts for end in ("", ".data")]
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "visual/model.cuda.onnx", "config.json", "tokenizer.json"])


def test_the_configuration_tells_cameras_state_and_actions(engine, checkpoint):
    policy, stored = (
        EngineConfig.load(engine).policy,
        load_file(checkpoint / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"),
    )
    assert policy.cameras.names == tuple(CAMERAS)
    assert policy.cameras.tokens == 4  # 8 x 8 patches, 4 x 4 of them a token
    assert policy.state.names == tuple(f"state_{i}" for i in range(STATE))
    np.testing.assert_array_equal(np.float32(policy.state.offset), stored["observation.state.mean"])
    np.testing.assert_allclose(np.float32(policy.state.scale), stored["observation.state.std"], atol=1e-7)
    space = policy.action_space
    assert (space.names, space.dt, space.horizon) == (
        tuple(f"action_{i}" for i in range(ACTIONS)), pytest.approx(1 / 30), HORIZON,
    )  # fmt: skip
    np.testing.assert_array_equal(np.float32(space.scale), stored["action.std"])
    assert policy.max_prefix_rows == 2 * 4 + 24 + 1


def test_a_data_set_gives_names_and_rate(checkpoint, tmp_path):
    info = {
        "fps": 10,
        "features": {
            "observation.state": {"names": {"motors": ["x", "y", "z"]}},
            "action": {"names": ["x", "y", "z", "gripper"]},
        },
    }
    write_json(tmp_path / "info.json", info)
    values = {"mean": [1.0, 2, 3, 4], "std": [0.5, 1, 2, 4], "count": [7]}
    write_json(tmp_path / "stats.json", {"action": values})
    policy = plan_export(checkpoint, ExportOptions(dataset=tmp_path)).config.policy
    assert policy.state.names == ("x", "y", "z")
    assert policy.action_space.names == ("x", "y", "z", "gripper")
    assert policy.action_space.dt == pytest.approx(0.1)
    before = plan_export(checkpoint, ExportOptions()).config.policy
    assert policy.action_space.offset == before.action_space.offset  # those of the policy count
    assert policy.state.offset == before.state.offset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"type": "tdmpc"},
            r"config.json: type 'tdmpc': supported: act, diffusion, groot, pi0, pi05, smolvla",
        ),
        ({"add_image_special_tokens": True}, "add_image_special_tokens True: supported: False"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha True: supported: False"),
        ({"n_obs_steps": 2}, "n_obs_steps 2: supported: 1"),
        ({"num_expert_layers": 1}, "num_expert_layers 1: supported: a layer for each of the 3"),
        ({"num_vlm_layers": 4}, "num_hidden_layers 4: the last layer in model.safetensors is"),
        ({"resize_imgs_with_padding": [64, 32]}, r"resize_imgs_with_padding \[64, 32\]: expected a square"),
        ({"resize_imgs_with_padding": [48, 48]}, "expected a square with a side of a multiple of 32 pixels"),
        ({"max_action_dim": 3}, r"action: shape \[4\]: expected \[n\], n from 1 to 3"),
        ({"normalization_mapping": {"STATE": "CLIPPED"}}, "STATE 'CLIPPED': supported: MEAN_STD, IDENTITY"),
        ({"normalization_mapping": {"ACTION": "MIN_MAX"}}, "MIN_MAX needs min of 4 values, found none"),
        ({"input_features": {}}, "expected at least one camera"),
        ({"norm_actions_twice": True}, "norm_actions_twice True: not a key of LeRobot 0.3 to 0.6"),
        ({"normalization_mapping": {"STATES": "MIN_MAX"}}, "STATES 'MIN_MAX': not a key of LeRobot"),
    ],
)
def test_policies_that_the_graphs_would_compute_differently_are_refused(
    checkpoint, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        plan_export(copied(checkpoint, tmp_path, **changes), ExportOptions())


def test_an_option_of_a_newer_lerobot_that_is_off_is_no_error(checkpoint, tmp_path):
    changed = copied(checkpoint, tmp_path, a_new_option=False, another=None)
    old, new = (plan_export(folder, ExportOptions()).config for folder in (checkpoint, changed))
    assert new == old


# `type` of LeRobot 0.4.4 to 0.6.1 (`register_subclass` in its policies and rewards)
LEROBOT = ["eo1", "evo1", "fastwam", "gaussian_actor", "lingbot_va", "molmoact2"]
LEROBOT += ["multi_task_dit", "pi0_fast", "tdmpc", "vla_jepa", "vqbet", "wall_x"]
LEROBOT += ["sac", "reward_classifier", "sarm", "robometer", "topreward"]


@pytest.mark.parametrize("kind", LEROBOT)
@pytest.mark.parametrize("features", [{"output_features": {"action": {}}}, {}])
def test_a_known_policy_of_lerobot_is_refused_with_what_it_is(tmp_path, kind, features):
    write_json(tmp_path / "config.json", {"type": kind, **features})
    known = "supported: act, diffusion, groot, pi0, pi05, smolvla, xvla"
    message = rf"config\.json: type '{kind}': {known}; this is .+; of policies, {SUPPORTED} are"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize(
    ("model_type", "title"),
    [
        ("openvla", "OpenVLA"),
        ("gr00t_n1_5", "GR00T N1.5"),
        ("Gr00tN1d5", "GR00T N1.5"),
        ("wall-x", "WALL-X"),
        ("molmoact", "MolmoAct"),
        ("xvla", "X-VLA"),
    ],
)
def test_a_known_policy_of_others_is_refused_with_what_it_is(tmp_path, model_type, title):
    write_json(tmp_path / "config.json", {"model_type": model_type, "num_experts": 2})
    message = rf"config\.json: model_type '{model_type}': supported: .*; this is {title}, .* {SUPPORTED} are"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


def test_cameras_have_the_robot_s_names_of_a_rename_map(checkpoint, tmp_path):
    """Names that are not renamed, and the order of `input_features`, stay."""
    renames = {"observation.images.front": "observation.images.wrist", "pose": "observation.state"}
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    info = {"fps": 30, "features": {"pose": {"names": ["x", "y", "z"]}}}
    write_json(dataset / "info.json", info)
    (tmp_path / "policy").mkdir()
    changed = with_step(copied(checkpoint, tmp_path / "policy"), BEFORE, 0, rename_map=renames)
    policy = plan_export(changed, ExportOptions(dataset=dataset)).config.policy
    assert policy.cameras.names == ("top", "front")
    assert policy.state.names == ("x", "y", "z")


def test_two_cameras_of_one_name_are_refused(checkpoint, tmp_path):
    renames = {"observation.images.top": "observation.images.wrist"}
    changed = with_step(copied(checkpoint, tmp_path), BEFORE, 0, rename_map=renames)
    with pytest.raises(ValueError, match="names must be different"):
        plan_export(changed, ExportOptions())


def test_the_current_folder_is_not_taken_for_a_language_model(checkpoint, tmp_path, monkeypatch):
    (copied(checkpoint, tmp_path, vlm_model_name="") / "vlm").unlink()
    monkeypatch.chdir(checkpoint / "vlm")
    with pytest.raises(FileNotFoundError, match=r"vlm/config.json not found: .* model: name their folder"):
        plan_export(tmp_path, ExportOptions())


def test_a_missing_language_model_is_an_error_with_the_way_to_get_it(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    (tmp_path / "vlm").unlink()
    message = (
        "vlm/config.json not found: .* hf download HuggingFaceTB/SmolVLM2-500M-Video-Instruct .* --local-dir "
        ".*/vlm, or name their folder"
    )
    with pytest.raises(FileNotFoundError, match=message):
        plan_export(tmp_path, ExportOptions())
    assert plan_export(tmp_path, ExportOptions(vlm=checkpoint / "vlm")).family == "smolvla"


@pytest.mark.parametrize("option", [{"max_lora_rank": 8}, {"kv_cache": "fp8"}])
def test_options_of_language_models_are_refused(checkpoint, option):
    with pytest.raises(ValueError, match=f"a policy, but {next(iter(option))} is for language models"):
        plan_export(checkpoint, ExportOptions(**option))


def test_folders_of_a_policy_are_refused_for_a_language_model(tiny_checkpoint):
    with pytest.raises(ValueError, match="--dataset is for policies such as SmolVLA"):
        plan_export(tiny_checkpoint, ExportOptions(dataset="meta"))


def test_the_check_has_the_sizes_of_the_export(checkpoint, engine):
    report = check(checkpoint)
    sizes = {path: (engine / path).stat().st_size for path in report.files}
    assert report.files == sizes
    assert report.memory == inspect(engine).memory
    assert "cameras     top, wrist: 4 rows each, from 64x64 px" in render_check(report)
    shown = render(inspect(engine))
    assert "weights of prefix" in shown
    assert re.search("units +of actions: those of the checkpoint, not stated", shown)


def test_profiles_cover_all_inputs(engine):
    config = EngineConfig.load(engine)
    profiles = make_profiles(config)
    for part in inspect(engine).parts:
        shapes = {
            binding.name: input_shapes(binding.name, binding.shape, profiles[part.name][0])
            for binding in part.inputs
        }
        assert all(low <= high for low, _, high in shapes.values())
    assert shapes["context_key_0"][2][2] == config.policy.max_prefix_rows


def test_half_precision_halves_the_weights(checkpoint):
    full, half = (check(checkpoint, ExportOptions(precision=precision)) for precision in ("fp32", "fp16"))
    assert half.memory.weights < 0.55 * full.memory.weights
