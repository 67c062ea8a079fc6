# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's X-VLA."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.mutated_policies import read
from fixtures.policy_folders import AFTER, BEFORE, change_json, copied, with_step
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, STATE, feature
from fixtures.tiny_checkpoint import write_json
from fixtures.xvla_checkpoint import (
    DOMAIN,
    MODEL_ACTIONS,
    MODEL_STATES,
    PROMPTS,
    SIDE,
    TOKENS,
    WIDTH,
    in_older_layout,
    write_xvla,
    xvla_config,
)

TO_AXIS_ANGLE = "xvla_rotation_6d_to_axis_angle"
IDENTITY = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "IDENTITY"}
VISION = "florence_config.vision_config"
TEXT = "florence_config.text_config"
IMAGE_ROWS = 1 + (SIDE // 8) ** 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_xvla(tmp_path_factory.mktemp("xvla"))


def planned(folder, **options):
    return plan_export(folder, ExportOptions(**options))


def with_florence(checkpoint, directory, section, **changes):
    """Copy a checkpoint with changes of a section of Florence-2's configuration.

    None removes a key.
    """
    copied(checkpoint, directory)

    def change(config):
        for key in section.split("."):
            config = config[key]
        for key, value in changes.items():
            if value is None:
                del config[key]
            else:
                config[key] = value

    change_json(directory / "config.json", change)
    return directory


def weights_of(folder, part):
    """Read the weights of a graph by name."""
    graph = planned(folder).graphs[f"{part}/model.onnx"].graph
    return {name: value.const_value.numpy() for name, value in graph.initializers.items()}


def test_the_configuration_tells_cameras_state_actions_and_steps(checkpoint, tmp_path):
    export(checkpoint, tmp_path)
    config = EngineConfig.load(tmp_path)
    policy = config.policy
    assert (policy.kind, policy.cameras.names, policy.cameras.image_size) == ("xvla", tuple(CAMERAS), SIDE)
    assert (policy.state.dim, policy.state.model_dim) == (STATE, MODEL_STATES)
    space = policy.action_space
    assert (space.dim, space.model_dim, space.horizon) == (ACTIONS, MODEL_ACTIONS, HORIZON)
    assert (policy.max_prompt_tokens, policy.num_denoise_steps) == (TOKENS, 4)
    assert (policy.has_flow, policy.from_noise) == (False, True)
    assert config.builder.max_action_samples > 1


def test_rows_of_missing_images_and_of_a_short_task_have_their_place(checkpoint):
    graphs = planned(checkpoint).graphs
    condition, state = graphs["prefix/model.onnx"].graph.outputs
    assert list(condition.shape) == [1, 2 * IMAGE_ROWS + TOKENS + PROMPTS, WIDTH]
    assert list(state.shape) == [1, 1, WIDTH]


def test_all_weights_are_read(checkpoint):
    assert not planned(checkpoint).unread


def test_both_layouts_of_florence_2_give_the_same_graphs(checkpoint, tmp_path):
    older = in_older_layout(write_xvla(tmp_path))
    assert not planned(older).unread
    for part in ("visual", "prefix", "action"):
        ours, theirs = weights_of(checkpoint, part), weights_of(older, part)
        for name, values in ours.items():
            turned = theirs[name] if theirs[name].shape == values.shape else theirs[name].T
            np.testing.assert_array_equal(turned, values)


def test_the_graphs_have_the_weights_of_the_domain_of_the_processor(checkpoint, tmp_path):
    other = with_step(copied(checkpoint, tmp_path), BEFORE, 5, domain_id=DOMAIN + 1)
    for part, name in (
        ("prefix", "model.transformer.soft_prompt_hub.weight"),
        ("action", "model.transformer.action_decoder.fc.weight"),
    ):
        ours, theirs = (weights_of(folder, part)[name] for folder in (checkpoint, other))
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() > 0.1


@pytest.mark.parametrize(
    ("mode", "states", "size", "actions"),
    [
        ("ee6d", 20, 20, 20),
        ("JOINT", 14, 14, 14),
        ("agibot_ee6d", 5, 20, 20),
        ("franka_joint7", 5, 20, 7),
        ("so101_bimanual", 20, 20, 12),
        ("auto", 5, MODEL_ACTIONS, ACTIONS),
    ],
)
def test_an_action_mode_tells_the_values_of_the_model_and_of_the_robot(tmp_path, mode, states, size, actions):
    """Weights are those of another mode, so that graphs are refused."""
    changes = {"action_mode": mode, "max_state_dim": states, "normalization_mapping": IDENTITY}
    folder = write_xvla(tmp_path, **changes)
    message = rf"action_encoder\.fc\.weight.*by the config it is \[3, {(size + states + 6) * WIDTH}\]"
    with pytest.raises(ValueError, match=message):
        planned(folder)
    assert xvla_actions(folder) == (actions, size)


def xvla_actions(folder):
    """Return the robot's and the model's values of an action.

    The folder's weights need not fit.
    """
    space = read(folder).config.action_space
    return space.dim, space.model_dim


def test_targets_of_the_tip_are_a_step_of_the_processor(tmp_path):
    changes = {"action_mode": "ee6d", "max_state_dim": 20, "normalization_mapping": IDENTITY}
    with_step(write_xvla(tmp_path, **changes), AFTER, 1, TO_AXIS_ANGLE, expected_action_dim=10)
    assert xvla_actions(tmp_path) == (7, 20)


@pytest.mark.parametrize(("way", "expected"), [("IDENTITY", 5), ("MEAN_STD", STATE)])
def test_a_state_that_is_not_normalised_has_the_values_of_the_data_set(checkpoint, tmp_path, way, expected):
    """A feature may be left from the policy that the training began with."""
    (tmp_path / "policy").mkdir()
    folder = copied(checkpoint, tmp_path / "policy")
    for file, key in (("config.json", "normalization_mapping"), (BEFORE, "norm_map")):

        def change(data, key=key):
            where = data["steps"][7]["config"] if "steps" in data else data
            where[key]["STATE"] = way

        change_json(folder / file, change)
    with_step(folder, AFTER, 0, norm_map={**xvla_config(259)["normalization_mapping"], "STATE": way})
    names = [f"joint_{i}" for i in range(expected)]
    features = {"observation.state": {"shape": [5], "names": names}}
    write_json(tmp_path / "info.json", {"fps": 30, "features": features})
    state = planned(folder, dataset=tmp_path).config.policy.state
    assert (state.names, state.model_dim) == (tuple(names), MODEL_STATES)


def test_a_state_of_more_values_than_the_model_has_is_refused(tmp_path):
    mapping = {**IDENTITY, "STATE": "IDENTITY"}
    folder = write_xvla(tmp_path, normalization_mapping=mapping)
    features = {"observation.state": {"shape": [MODEL_STATES + 1]}}
    write_json(tmp_path / "info.json", {"fps": 30, "features": features})
    with pytest.raises(
        ValueError, match=rf"info\.json: .*shape \[7\]: expected \[n\], n from 1 to {MODEL_STATES}"
    ):
        planned(folder, dataset=tmp_path)


def test_images_of_squares_need_not_be_resized(checkpoint, tmp_path):
    cameras = {f"observation.images.{name}": feature("VISUAL", 3, SIDE, SIDE) for name in CAMERAS}
    inputs = xvla_config(259)["input_features"] | cameras
    folder = copied(checkpoint, tmp_path, input_features=inputs, resize_imgs_with_padding=None)
    assert planned(folder).config == planned(checkpoint).config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_proprio": False}, "use_proprio False: supported: True"),
        ({"pad_language_to": "longest"}, "pad_language_to 'longest': supported: max_length"),
        ({"domain_feature_key": "robot"}, "domain_feature_key 'robot': supported: None"),
        ({"n_obs_steps": 2}, "n_obs_steps 2: supported: 1"),
        ({"action_mode": "gripper"}, "action_mode 'gripper': supported: ee6d, joint, agibot_ee6d, .*, auto"),
        ({"action_mode": "so101_bimanual"}, "max_state_dim 6: expected 20 with action_mode so101_bimanual"),
        ({"action_mode": "ee6d"}, "max_state_dim 6: expected more than 19 with action_mode ee6d"),
        ({"action_mode": "agibot_ee6d"}, r"shape \[4\]: normalised, but action_mode agibot_ee6d has 20"),
        ({"resize_imgs_with_padding": [32, 48]}, r"resize_imgs_with_padding \[32, 48\]: expected a square"),
        ({"resize_imgs_with_padding": None}, r"shape \[3, 48, 64\]: expected squares of one size"),
        ({"max_len_seq": 63}, "max_len_seq 63: less than the 64 rows of actions, images and task"),
        ({"tokenizer_max_length": 48, "max_len_seq": 900}, "65 rows with those of an image, but .* 64 pos"),
        ({"depth": 3}, "depth 3: model.safetensors has 2 layers of model.transformer.blocks"),
        ({"num_heads": 5}, "num_heads 5: expected a divisor of hidden_size 32"),
        ({"len_soft_prompts": 0}, "len_soft_prompts 0: model.safetensors has soft prompts"),
        ({"num_image_views": 65}, "num_image_views 65: expected at most 64"),
        ({"n_action_steps": 7}, "n_action_steps 7: expected at most chunk_size 6"),
        ({"normalization_mapping": {**IDENTITY, "VISUAL": "MEAN_STD"}}, "VISUAL 'MEAN_STD': supported"),
        ({"rotation_loss": 2}, "rotation_loss 2: not a key of LeRobot 0.3 to 0.6"),
    ],
)
def test_what_the_graphs_would_compute_differently_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        planned(copied(checkpoint, tmp_path, **changes))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (VISION, {"patch_prenorm": [True, True]}, "patch_prenorm .*: supported: false first"),
        (VISION, {"patch_prenorm": [False]}, r"patch_prenorm \[False\]: expected a value for each of the 2"),
        (VISION, {"depths": [1, 2]}, r"depths \[1, 2\]: model.safetensors has 1 blocks of stage 1"),
        (VISION, {"num_heads": [2, 5]}, r"num_heads \[2, 5\]: expected divisors of embed_dim \[8, 12\]"),
        (VISION, {"image_feature_source": ["last_frame"]}, "image_feature_source .*: supported: None,"),
        (VISION, {"window_size": None}, "key 'window_size' is missing"),
        (VISION, {"patch_stride": [1, 1]}, "patch_stride .*: 32 places of a side, but 9 positions"),
        (VISION, {"model_type": "vit"}, "model_type 'vit': supported: davit"),
        (TEXT, {"scale_embedding": True}, "scale_embedding True: supported: False"),
        (TEXT, {"activation_function": "relu"}, "activation_function 'relu': supported: gelu"),
        (TEXT, {"d_model": None}, "key 'd_model' is missing"),
        (TEXT, {"encoder_layers": 2}, "encoder_layers 2: model.safetensors has 1 layers"),
        ("florence_config", {"projection_dim": 17}, "projection_dim 17: expected d_model of text_config, 32"),
    ],
)
def test_another_florence_2_is_refused(checkpoint, tmp_path, section, changes, message):
    with pytest.raises(ValueError, match=message):
        planned(with_florence(checkpoint, tmp_path, section, **changes))


@pytest.mark.parametrize(
    ("file", "place", "name", "settings", "message"),
    [
        (BEFORE, 3, "xvla_image_scale", {}, "'xvla_image_scale': not supported, .*; supported: rename_obs"),
        (BEFORE, 2, "smolvla_new_line_processor", {}, "'smolvla_new_line_processor': not supported"),
        (BEFORE, 3, "relative_actions_processor", {}, "'relative_actions_processor': not supported"),
        (BEFORE, 5, None, {"domain_id": 3}, r"domain_id 3: expected from 0 to 2 \(num_domains\)"),
        (BEFORE, 4, None, {"image_keys": ["a"]}, r"image_keys \['a'\]: supported: None"),
        (BEFORE, 2, None, {"padding": "longest"}, "padding 'longest': supported: max_length"),
        (BEFORE, 3, "xvla_imagenet_normalize", {}, "xvla_image_to_float: twice, or after xvla_im"),
        (AFTER, 1, TO_AXIS_ANGLE, {}, "normalised, but action_mode auto has 7 actions"),
    ],
)
def test_other_steps_are_refused_by_name(checkpoint, tmp_path, file, place, name, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(with_step(copied(checkpoint, tmp_path), file, place, name, **settings))


@pytest.mark.parametrize("name", ["tokenizer_processor", "xvla_imagenet_normalize", "xvla_add_domain_id"])
def test_a_processor_without_a_step_that_the_model_needs_is_refused(checkpoint, tmp_path, name):
    def without(processor):
        processor["steps"] = [step for step in processor["steps"] if step["registry_name"] != name]

    change_json(copied(checkpoint, tmp_path) / BEFORE, without)
    with pytest.raises(ValueError, match=f"{BEFORE}: no step {name}: the policy's inputs would be others"):
        planned(tmp_path)


def test_targets_of_other_modes_are_refused(tmp_path):
    folder = write_xvla(tmp_path, normalization_mapping=IDENTITY)
    with_step(folder, AFTER, 1, TO_AXIS_ANGLE)
    with pytest.raises(ValueError, match=r"action_mode 'auto': .* needs one of ee6d, agibot_ee6d"):
        planned(folder)


def test_the_tokenizer_is_that_of_bart(checkpoint, tmp_path):
    (copied(checkpoint, tmp_path) / "vlm").unlink()
    message = (
        r"vlm/tokenizer\.json not found: an X-VLA needs tokenizer\.json .*hf download facebook/bart-large"
    )
    with pytest.raises(FileNotFoundError, match=message):
        planned(tmp_path)
    assert planned(tmp_path, vlm=checkpoint / "vlm").config == planned(checkpoint).config


def test_processors_must_be_there(checkpoint, tmp_path):
    (copied(checkpoint, tmp_path) / AFTER).unlink()
    with pytest.raises(FileNotFoundError, match=f"{AFTER} not found: LeRobot saves it with an X-VLA"):
        planned(tmp_path)
