# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's policies: SmolVLA."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.check import check, render_check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.builder.tensorrt.profiles import input_shapes, make_profiles
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
    """Copy a checkpoint without its weights, with changes of its configuration.

    Processors get the same way of normalisation.
    """
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "config.json").unlink()
    write_json(directory / "config.json", json.loads((checkpoint / "config.json").read_text()) | changes)
    if "normalization_mapping" in changes:
        for file, place in (("policy_preprocessor.json", 5), ("policy_postprocessor.json", 0)):
            with_step(directory, file, place, norm_map=changes["normalization_mapping"])
    return directory


def with_step(directory, file, place, name=None, **settings):
    """Change a step of a processor in a copied checkpoint.

    name: insert another step there.
    """
    processor = json.loads((directory / file).read_text())
    if name is not None:
        processor["steps"].insert(place, {"registry_name": name, "config": {}})
    processor["steps"][place]["config"] |= settings
    (directory / file).unlink()
    write_json(directory / file, processor)
    return directory


def test_the_engine_has_the_graphs_and_the_tokenizer_alone(engine):
    parts = ("action", "prefix", "visual")
    graphs = [f"{part}/model.onnx{end}" for part in parts for end in ("", ".data")]
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "config.json", "tokenizer.json"])


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


# `type` of LeRobot 0.6.1 (`register_subclass` in its policies)
LEROBOT = ["act", "diffusion", "eo1", "evo1", "fastwam", "gaussian_actor", "groot", "lingbot_va", "molmoact2"]
LEROBOT += ["multi_task_dit", "pi0", "pi05", "pi0_fast", "tdmpc", "vla_jepa", "vqbet", "wall_x", "xvla"]


@pytest.mark.parametrize("kind", LEROBOT)
@pytest.mark.parametrize("features", [{"output_features": {"action": {}}}, {}])
def test_a_known_policy_of_lerobot_is_refused_with_what_it_is(tmp_path, kind, features):
    write_json(tmp_path / "config.json", {"type": kind, **features})
    message = rf"config\.json: type '{kind}': supported: smolvla; this is .+; of policies, only SmolVLA is"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize(
    ("model_type", "title"),
    [
        ("openvla", "OpenVLA"),
        ("gr00t_n1_5", "GR00T N1.5"),
        ("gr00t_n1_7", "GR00T N1.7"),
        ("Gr00tN1d7", "GR00T N1.7"),
        ("wall-x", "WALL-X"),
        ("alpamayo1_5", "Alpamayo 1.5"),
        ("molmoact", "MolmoAct"),
    ],
)
def test_a_known_policy_of_others_is_refused_with_what_it_is(tmp_path, model_type, title):
    write_json(tmp_path / "config.json", {"model_type": model_type, "num_experts": 2})
    message = rf"config\.json: model_type '{model_type}': supported: .*; this is {title}, .* only SmolVLA is"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


def test_a_checkpoint_of_openpi_is_refused_with_what_it_is(tmp_path):
    write_json(tmp_path / "config.json", {"action_dim": 32, "paligemma_variant": "gemma_2b"})
    with pytest.raises(ValueError, match="paligemma_variant 'gemma_2b': a checkpoint of openpi; this is pi0"):
        plan_export(tmp_path, ExportOptions())


BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (BEFORE, "image_crop_resize_processor"),
        (BEFORE, "map_tensor_to_delta_action_dict"),
        (BEFORE, "unnormalizer_processor"),
        (AFTER, "map_delta_action_to_robot_action"),
        (AFTER, "my_own_step"),
    ],
)
def test_an_unknown_step_of_a_processor_is_refused_by_name(checkpoint, tmp_path, file, name):
    changed = with_step(copied(checkpoint, tmp_path), file, 1, name)
    with pytest.raises(ValueError, match=rf"{file}: steps\[1\] '{name}': not supported, and without it"):
        plan_export(changed, ExportOptions())


def test_a_step_of_a_class_is_refused_and_not_imported(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    processor = json.loads((tmp_path / AFTER).read_text())
    processor["steps"].append({"class": "os.path.Step", "config": {}})
    (tmp_path / AFTER).unlink()
    write_json(tmp_path / AFTER, processor)
    with pytest.raises(ValueError, match=rf"{AFTER}: steps\[2\] 'os\.path\.Step': not supported"):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize(
    ("file", "place", "name"),
    [(BEFORE, 2, "relative_actions_processor"), (AFTER, 1, "absolute_actions_processor")],
)
def test_relative_actions_are_refused_and_a_step_that_is_off_is_not(checkpoint, tmp_path, file, place, name):
    changed = with_step(copied(checkpoint, tmp_path), file, place, name, enabled=False)
    plan_export(changed, ExportOptions())
    with_step(changed, file, place, enabled=True)
    with pytest.raises(ValueError, match=rf"{file}: .*{name}\.config: enabled True: supported: False"):
        plan_export(changed, ExportOptions())


SETTINGS = [
    (BEFORE, 0, {"rename_map": ["a"]}, "rename_map .*expected an object"),
    (BEFORE, 0, {"rename_map": {"a": "b", "c": "b"}}, "rename_map: c 'b': 'a' gets this name too"),
    (BEFORE, 3, {"max_length": 12}, "max_length 12: supported: 24"),
    (BEFORE, 3, {"padding_side": "left"}, "padding_side 'left': supported: right"),
    (BEFORE, 3, {"task_key": "instruction"}, "task_key 'instruction': supported: task"),
    (BEFORE, 4, {"float_dtype": "bfloat16"}, "float_dtype 'bfloat16': supported: None, float32"),
    (BEFORE, 5, {"eps": 1e-6}, "eps 1e-06: supported: 1e-08"),
    (BEFORE, 5, {"norm_map": {"STATE": "MIN_MAX"}}, "norm_map: STATE 'MIN_MAX': supported: MEAN_STD"),
    (BEFORE, 5, {"norm_map": {"VISUAL": "MEAN_STD"}}, "norm_map: VISUAL 'MEAN_STD': supported: IDENTITY"),
    (BEFORE, 5, {"normalize_observation_keys": []}, r"normalize_observation_keys \[\]: supported: None"),
    (BEFORE, 5, {"features": {}}, "features: key 'observation.state' is missing"),
    (AFTER, 0, {"features": {}}, "features: key 'action' is missing"),
    (AFTER, 0, {"eps": 0}, "eps 0: supported: 1e-08"),
]


@pytest.mark.parametrize(("file", "place", "settings", "message"), SETTINGS)
def test_a_setting_of_a_step_that_would_change_actions_is_refused(
    checkpoint, tmp_path, file, place, settings, message
):
    changed = with_step(copied(checkpoint, tmp_path), file, place, **settings)
    with pytest.raises(ValueError, match=rf"{file}: steps\[{place}\] \w+\.config.*{message}"):
        plan_export(changed, ExportOptions())


@pytest.mark.parametrize(("first", "second"), [(0, 5), (2, 3)])
def test_steps_in_another_order_are_refused(checkpoint, tmp_path, first, second):
    copied(checkpoint, tmp_path)
    processor = json.loads((tmp_path / BEFORE).read_text())
    steps = processor["steps"]
    steps[first], steps[second] = steps[second], steps[first]
    (tmp_path / BEFORE).unlink()
    write_json(tmp_path / BEFORE, processor)
    with pytest.raises(ValueError, match=rf"{BEFORE}: steps\[\d\] \w+: twice, or after \w+; supported"):
        plan_export(tmp_path, ExportOptions())


def test_a_task_without_a_line_break_is_refused(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    processor = json.loads((tmp_path / BEFORE).read_text())
    del processor["steps"][2]
    (tmp_path / BEFORE).unlink()
    write_json(tmp_path / BEFORE, processor)
    with pytest.raises(ValueError, match="no step smolvla_new_line_processor"):
        plan_export(tmp_path, ExportOptions())


def test_cameras_have_the_robot_s_names_of_a_rename_map(checkpoint, tmp_path):
    """Names that are not renamed, and the order of `input_features`, stay."""
    renames = {"observation.images.front": "observation.images.wrist", "pose": "observation.state"}
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    info = {"fps": 30, "features": {"pose": {"names": ["x", "y", "z"]}}}
    write_json(dataset / "info.json", info)
    write_json(dataset / "stats.json", {"pose": {"mean": [1.0, 2, 3], "std": [1.0, 1, 1]}})
    (tmp_path / "policy").mkdir()
    changed = with_step(copied(checkpoint, tmp_path / "policy"), BEFORE, 0, rename_map=renames)
    policy = plan_export(changed, ExportOptions(dataset=dataset)).config.policy
    assert policy.cameras.names == ("top", "front")
    assert policy.state.names == ("x", "y", "z")
    assert policy.state.offset == (1.0, 2.0, 3.0)


def test_two_cameras_of_one_name_are_refused(checkpoint, tmp_path):
    renames = {"observation.images.top": "observation.images.wrist"}
    changed = with_step(copied(checkpoint, tmp_path), BEFORE, 0, rename_map=renames)
    with pytest.raises(ValueError, match="names must be different"):
        plan_export(changed, ExportOptions())


def test_an_adapter_of_a_policy_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="use_peft True: supported: False"):
        plan_export(copied(checkpoint, tmp_path, use_peft=True), ExportOptions())


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
