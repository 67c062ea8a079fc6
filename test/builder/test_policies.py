# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's policies: SmolVLA."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.export_check import check, render_check
from edgellm_ros.builder.export_plan import ExportOptions, plan_export
from edgellm_ros.builder.inspection import inspect, render
from edgellm_ros.builder.profiles import input_shapes, make_profiles
from edgellm_ros.engine_directory.config import EngineConfig
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


def copied(checkpoint, directory, **changes):
    """Copy a checkpoint without its weights, with changes of its configuration."""
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "config.json").unlink()
    write_json(directory / "config.json", json.loads((checkpoint / "config.json").read_text()) | changes)
    return directory


def test_the_engine_has_the_graphs_and_the_tokenizer_alone(engine):
    parts = ("action", "prefix", "visual")
    graphs = [f"{part}/model.onnx{end}" for part in parts for end in ("", ".data")]
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "config.json", "tokenizer.json"])


def test_the_configuration_tells_cameras_state_and_actions(engine, checkpoint):
    policy, stored = EngineConfig.load(engine).policy, load_file(
        checkpoint / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
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


def test_a_data_set_gives_names_rate_and_statistics(checkpoint, tmp_path):
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
    assert policy.action_space.offset == (1, 2, 3, 4)
    assert policy.action_space.scale == (0.5, 1, 2, 4)
    before = plan_export(checkpoint, ExportOptions()).config.policy
    assert policy.state.offset == before.state.offset  # stats.json has none of the state


def test_statistics_in_buffers_of_an_older_policy_are_read(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    stats = load_file(checkpoint / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    for name in ("policy_preprocessor.json", "policy_postprocessor.json", "model.safetensors"):
        (tmp_path / name).unlink()
    weights = load_file(checkpoint / "model.safetensors")
    for key, buffer in (
        ("observation.state", "normalize_inputs.buffer_observation_state"),
        ("action", "unnormalize_outputs.buffer_action"),
    ):
        weights |= {f"{buffer}.{name}": stats[f"{key}.{name}"] for name in ("mean", "std")}
    save_file(weights, tmp_path / "model.safetensors")
    expected, found = (
        plan_export(folder, ExportOptions()).config.policy for folder in (checkpoint, tmp_path)
    )
    assert (found.state, found.action_space) == (expected.state, expected.action_space)


def test_ranges_become_offset_and_scale(checkpoint, tmp_path):
    ways = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "MIN_MAX"}
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_json(folder / "info.json", {"fps": 30, "features": {}})
    low, high = [-1.0, 0, 2, 3], [1.0, 4, 2, 7]
    write_json(
        folder / "stats.json",
        {"action": {"min": low, "max": high}, "observation.state": {"q01": [0.0, 1, 2], "q99": [2.0, 2, 8]}},
    )
    (tmp_path / "policy").mkdir()
    changed = copied(checkpoint, tmp_path / "policy", normalization_mapping=ways)
    policy = plan_export(changed, ExportOptions(dataset=folder)).config.policy
    assert policy.state.offset == (1.0, 1.5, 5.0)
    assert policy.state.scale == (1.0, 0.5, 3.0)
    assert policy.action_space.offset == pytest.approx((0.0, 2.0, 2.0, 5.0))
    assert policy.action_space.scale == pytest.approx((1.0, 2.0, 5e-9, 2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "pi0"}, r"config.json: type 'pi0': supported: smolvla"),
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
    ],
)
def test_policies_that_the_graphs_would_compute_differently_are_refused(
    checkpoint, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        plan_export(copied(checkpoint, tmp_path, **changes), ExportOptions())


def test_a_missing_language_model_is_an_error_with_the_way_to_get_it(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    (tmp_path / "vlm").unlink()
    message = (
        "HuggingFaceTB/SmolVLM2-500M-Video-Instruct/config.json not found: .* hf download .* --local-dir "
        ".*/vlm, or name their folder"
    )
    with pytest.raises(FileNotFoundError, match=message):
        plan_export(tmp_path, ExportOptions())
    assert plan_export(tmp_path, ExportOptions(vlm=checkpoint / "vlm")).family == "smolvla"


def test_missing_statistics_are_an_error_that_names_the_places(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    (tmp_path / "policy_postprocessor.json").unlink()
    message = r"no statistics of action in .*policy_postprocessor.json, .*buffer_action\.\*\).*--dataset"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"max_lora_rank": 8}, {"kv_cache": "fp8"}])
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
    assert "weights of prefix" in render(inspect(engine))


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
