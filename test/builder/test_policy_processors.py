# SPDX-License-Identifier: Apache-2.0
"""Processors that LeRobot saves beside a policy: their steps and settings."""

from __future__ import annotations

import json

import pytest

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.policy_folders import AFTER, BEFORE, change_json, copied, with_relative_actions, with_step
from fixtures.smolvla_checkpoint import write_smolvla


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_smolvla(tmp_path_factory.mktemp("smolvla"))


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
    change_json(
        tmp_path / AFTER, lambda processor: processor["steps"].append({"class": "os.path.Step", "config": {}})
    )
    with pytest.raises(ValueError, match=rf"{AFTER}: steps\[2\] 'os\.path\.Step': not supported"):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize(
    ("settings", "relative"),
    [
        ({}, (True, True, True, False)),
        ({"exclude_joints": []}, (True, True, True, True)),
        ({"action_names": None}, (True, True, True, True)),
        ({"enabled": (False, False)}, (False, False, False, False)),
    ],
)
def test_actions_are_relative_but_for_excluded_names(tmp_path, settings, relative):
    checkpoint = write_smolvla(tmp_path / "checkpoint", state=4)
    own = {"exclude_joints": ["Gripper", "x"], "action_names": ["pan", "lift", "elbow", "left_GRIPPER.pos"]}
    changed = with_relative_actions(checkpoint, **(own | settings))
    assert plan_export(changed, ExportOptions()).config.policy.action_space.relative == relative


@pytest.mark.parametrize(
    "names", [["pan"], ["lift", "elbow", "gripper"], ["pan", "lift", "elbow", "gripper", "x"]]
)
def test_names_of_another_number_than_actions_are_refused(tmp_path, names):
    """LeRobot would take another value for the gripper."""
    checkpoint = write_smolvla(tmp_path / "checkpoint", state=4)
    changed = with_relative_actions(checkpoint, exclude_joints=["gripper"], action_names=names)
    with pytest.raises(ValueError, match=r"action_names \[.*\]: expected a name for each of 4 values"):
        plan_export(changed, ExportOptions())


@pytest.mark.parametrize(
    ("enabled", "message"),
    [
        ((True, False), "relative_actions_processor is enabled, absolute_actions_processor is not"),
        ((False, True), "absolute_actions_processor is enabled, relative_actions_processor is not"),
        (("yes", True), "relative_actions_processor.config: enabled 'yes': expected true or false"),
        ((True, True), "relative actions need as many values of the state, got 3"),
    ],
)
def test_relative_actions_that_nothing_undoes_are_refused(checkpoint, tmp_path, enabled, message):
    with pytest.raises(ValueError, match=message):
        plan_export(with_relative_actions(copied(checkpoint, tmp_path), enabled), ExportOptions())


SETTINGS = [
    (BEFORE, 0, {"rename_map": ["a"]}, "rename_map .*expected an object"),
    (BEFORE, 0, {"rename_map": {"a": "b", "c": "b"}}, "rename_map: c 'b': 'a' gets this name too"),
    (BEFORE, 3, {"max_length": 12}, "max_length 12: supported: 24"),
    (BEFORE, 3, {"padding_side": "left"}, "padding_side 'left': supported: right"),
    (BEFORE, 3, {"task_key": "instruction"}, "task_key 'instruction': supported: task"),
    (BEFORE, 4, {"float_dtype": "bfloat16"}, "float_dtype 'bfloat16': supported: None, float32"),
    (BEFORE, 3, {"padding": "left"}, "padding 'left': supported: longest, max_length"),
    (BEFORE, 3, {"tokenizer_name": "a/other"}, "tokenizer_name 'a/other': expected 'SmolVLM2-500M-Video"),
    (BEFORE, 5, {"clip": 3}, "clip 3: not a key of LeRobot 0.3 to 0.6"),
    (BEFORE, 1, {"batch": 2}, "batch 2: not a key of LeRobot 0.3 to 0.6"),
    (BEFORE, 5, {"norm_map": None}, "key 'norm_map' is missing, but config.json normalises"),
    (BEFORE, 5, {"norm_map": {"STATE": "MIN_MAX"}}, "norm_map: STATE 'MIN_MAX': supported: MEAN_STD"),
    (BEFORE, 5, {"norm_map": {"VISUAL": "MEAN_STD"}}, "norm_map: VISUAL 'MEAN_STD': supported: IDENTITY"),
    (BEFORE, 5, {"normalize_observation_keys": "all"}, "keys 'all': expected a list of names"),
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

    def swap(processor):
        steps = processor["steps"]
        steps[first], steps[second] = steps[second], steps[first]

    change_json(tmp_path / BEFORE, swap)
    with pytest.raises(ValueError, match=rf"{BEFORE}: steps\[\d\] \w+: twice, or after \w+; supported"):
        plan_export(tmp_path, ExportOptions())


def test_a_task_without_a_line_break_is_refused(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    change_json(tmp_path / BEFORE, lambda processor: processor["steps"].pop(2))
    with pytest.raises(ValueError, match="no step smolvla_new_line_processor"):
        plan_export(tmp_path, ExportOptions())


def of_lerobot_0_6(config, file, steps):
    """Write the steps of a SmolVLA as LeRobot 0.6.1 does."""
    features = config["input_features"] | config["output_features"]
    tokenizer = {"max_length": 24, "task_key": "task", "padding_side": "right", "padding": "longest"}
    tokenizer |= {"truncation": True, "tokenizer_name": config["vlm_model_name"]}
    normaliser = {"eps": 1e-08, "features": features, "norm_map": config["normalization_mapping"]}
    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    names = {
        BEFORE: [
            ("rename_observations_processor", {"rename_map": {}}),
            ("to_batch_processor", {}),
            ("relative_actions_processor", relative),
            ("smolvla_new_line_processor", {}),
            ("tokenizer_processor", tokenizer),
            ("device_processor", {"device": "cuda", "float_dtype": None}),
            ("normalizer_processor", normaliser),
        ],
        AFTER: [
            ("unnormalizer_processor", normaliser | {"features": config["output_features"]}),
            ("absolute_actions_processor", {"enabled": False}),
            ("device_processor", {"device": "cpu", "float_dtype": None}),
        ],
    }[file]
    states = {step["registry_name"]: step["state_file"] for step in steps if "state_file" in step}
    entries = [{"registry_name": name, "config": settings} for name, settings in names]
    for entry in entries:
        if entry["registry_name"] in states:
            entry["state_file"] = states[entry["registry_name"]]
    return entries


def test_a_smolvla_of_lerobot_0_6_is_read_as_one_of_0_4(checkpoint, tmp_path):
    copied(checkpoint, tmp_path, rtc_config=None, compile_model=False, compile_mode="max-autotune")
    config = json.loads((tmp_path / "config.json").read_text())
    for file in (BEFORE, AFTER):

        def replace(processor, file=file):
            processor["steps"] = of_lerobot_0_6(config, file, processor["steps"])

        change_json(tmp_path / file, replace)
    new, old = (plan_export(folder, ExportOptions()).config.policy for folder in (tmp_path, checkpoint))
    assert new == old


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", "", 7, "a/b"])
def test_a_state_file_that_is_not_beside_the_processor_is_refused(checkpoint, tmp_path, name):
    change_json(
        copied(checkpoint, tmp_path) / AFTER, lambda processor: processor["steps"][0].update(state_file=name)
    )
    with pytest.raises(ValueError, match=rf"{AFTER}: steps\[0\] .*state_file .*: expected (the|a string)"):
        plan_export(tmp_path, ExportOptions())


def test_a_state_file_that_is_missing_is_named(checkpoint, tmp_path):
    change_json(
        copied(checkpoint, tmp_path) / AFTER, lambda processor: processor["steps"][0].update(state_file="x")
    )
    with pytest.raises(FileNotFoundError, match=f"/x not found, but {AFTER} names it"):
        plan_export(tmp_path, ExportOptions())
