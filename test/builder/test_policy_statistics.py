# SPDX-License-Identifier: Apache-2.0
"""Statistics of policies: where they are read, and which count."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.weights import Weights
from fixtures.policy_folders import (
    AFTER,
    BEFORE,
    OF_ACTIONS,
    OF_OBSERVATIONS,
    change_json,
    copied,
    of_lerobot_0_3,
    with_step,
)
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_smolvla(tmp_path_factory.mktemp("smolvla"))


def policy(folder, **options):
    return plan_export(folder, ExportOptions(**options)).config.policy


def with_statistics(folder, file=OF_ACTIONS, **tensors):
    """Replace statistics of a copied checkpoint; None removes one."""
    found = load_file(folder / file) | {name.replace("__", "."): each for name, each in tensors.items()}
    (folder / file).unlink()
    save_file({name: each for name, each in found.items() if each is not None}, folder / file)
    return folder


def data_set(folder, **statistics):
    folder.mkdir()
    write_json(folder / "info.json", {"fps": 30, "features": {}})
    write_json(folder / "stats.json", {name.replace("__", "."): each for name, each in statistics.items()})
    return folder


def test_a_policy_of_lerobot_0_3_is_read_as_one_of_0_4(checkpoint, tmp_path):
    assert policy(of_lerobot_0_3(checkpoint, tmp_path)) == policy(checkpoint)


def test_buffers_that_were_never_filled_are_refused(checkpoint, tmp_path):
    """LeRobot 0.3 filled buffers without statistics with infinity."""
    endless = np.full(4, np.inf, np.float32)
    of_lerobot_0_3(checkpoint, tmp_path, unnormalize_outputs__buffer_action__std=endless)
    with pytest.raises(ValueError, match=r"buffer_action\.\*\): action: std has values that are not finite"):
        policy(tmp_path)


def test_missing_buffers_are_an_error_that_names_them(checkpoint, tmp_path):
    names = [f"unnormalize_outputs__buffer_action__{name}" for name in ("mean", "std")]
    of_lerobot_0_3(checkpoint, tmp_path, **dict.fromkeys(names))
    with pytest.raises(ValueError, match=r"no statistics of action in .*buffer_action\.\*\): .*--dataset"):
        policy(tmp_path)


def test_two_features_of_one_buffer_are_refused(tmp_path):
    """Both have the same underscores: a buffer's name does not tell the feature."""
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    names = ("observation.images.top_left", "observation.images.top.left")
    features = {name: {"type": "VISUAL", "shape": [3, 8, 8]} for name in names}
    config = {"input_features": features, "normalization_mapping": {"VISUAL": "MEAN_STD"}}
    normalisation = Normalisation(tmp_path, ConfigSection(config, "config.json"), Weights(tmp_path), None)
    with pytest.raises(ValueError, match=r"top\.left .*: buffers of the same name as those of .*top_left"):
        normalisation.affine(names[0], 3)


@pytest.mark.parametrize("saved", [{"action__mean": None, "action__std": None}, {}])
def test_a_data_set_counts_only_where_nothing_is_saved(checkpoint, tmp_path, caplog, saved):
    dataset = data_set(
        tmp_path / "meta", action={"mean": [1.0, 2, 3, 4], "std": [0.5, 1, 2, 4], "count": [7]}
    )
    (tmp_path / "policy").mkdir()
    changed = with_statistics(copied(checkpoint, tmp_path / "policy"), **saved)
    with caplog.at_level(logging.WARNING):
        space = policy(changed, dataset=dataset).action_space
    assert (space.scale == (0.5, 1, 2, 4)) is bool(saved)
    noted = "stats.json: other statistics of action than" in caplog.text
    assert noted is not bool(saved)


def test_ranges_keep_their_lower_end(checkpoint, tmp_path):
    """In fp32 the middle of [2, 2 + 1e-8] is 2, but LeRobot makes -1 of a 2."""
    ways = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "MIN_MAX"}
    changed = copied(checkpoint, tmp_path, normalization_mapping=ways)
    values = {name: np.float32(each) for name, each in (("q01", [0, 1, 2]), ("q99", [2, 2, 2]))}
    with_statistics(changed, OF_OBSERVATIONS, **{f"observation__state__{k}": v for k, v in values.items()})
    low, high = np.float32([-1, 0, 2, 3]), np.float32([1, 4, 2, 7])
    with_statistics(changed, action__min=low, action__max=high)
    found = policy(changed)
    assert (found.state.offset, found.state.shift) == ((0, 1, 2), (1, 1, 1))
    assert found.state.scale == pytest.approx((1, 0.5, 5e-9))
    assert (found.action_space.offset, found.action_space.shift) == ((-1, 0, 2, 3), (1,) * 4)
    assert found.action_space.scale == pytest.approx((1, 2, 5e-9, 2))


def test_settings_of_the_step_count(checkpoint, tmp_path):
    changed = with_step(copied(checkpoint, tmp_path), BEFORE, 5, eps=0.5)
    stats = load_file(checkpoint / OF_ACTIONS)
    np.testing.assert_allclose(policy(changed).state.scale, stats["observation.state.std"] + 0.5, rtol=1e-6)
    with_step(changed, BEFORE, 5, normalize_observation_keys=["observation.other"])
    assert policy(changed).state.scale == (1, 1, 1)


def test_images_have_a_value_for_each_channel(tmp_path):
    config = {
        "input_features": {"observation.images.top": {"type": "VISUAL", "shape": [3, 8, 8]}},
        "normalization_mapping": {"VISUAL": "MEAN_STD"},
    }
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    values = {"mean": mean.reshape(3, 1, 1), "std": std.reshape(3, 1, 1)}
    save_file(
        {f"normalize_inputs.buffer_observation_images_top.{name}": each for name, each in values.items()},
        tmp_path / "model.safetensors",
    )
    saved = Normalisation(tmp_path, ConfigSection(config, "config.json"), Weights(tmp_path), None)
    found = saved.affine("observation.images.top", 3)
    np.testing.assert_array_equal(found.offset, mean)
    np.testing.assert_allclose(found.scale, std, atol=1e-7)
    dataset = data_set(
        tmp_path / "meta", observation__images__top={name: each.tolist() for name, each in values.items()}
    )
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    other = Normalisation(tmp_path, ConfigSection(config, "config.json"), Weights(tmp_path), dataset)
    np.testing.assert_array_equal(other.affine("observation.images.top", 3).offset, mean)


def test_a_processor_without_its_normaliser_is_refused(checkpoint, tmp_path):
    """LeRobot would not normalise."""
    copied(checkpoint, tmp_path)
    change_json(tmp_path / AFTER, lambda processor: processor["steps"].pop(0))
    with pytest.raises(ValueError, match=f"{AFTER}: no step unnormalizer_processor, but .* action"):
        policy(tmp_path)


def test_one_processor_of_two_is_refused(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    (tmp_path / AFTER).unlink()
    with pytest.raises(FileNotFoundError, match=f"{AFTER} not found: LeRobot saves it with the other"):
        policy(tmp_path)


def test_a_step_without_statistics_is_an_error_that_names_it(checkpoint, tmp_path):
    copied(checkpoint, tmp_path)
    change_json(tmp_path / AFTER, lambda processor: processor["steps"][0].pop("state_file"))
    with pytest.raises(ValueError, match=f"no statistics of action in .*{AFTER}: .*--dataset"):
        policy(tmp_path)
