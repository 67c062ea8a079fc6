# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's ACT."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.check import check, render_check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.act_checkpoint import act_config, with_buffers, write_act
from fixtures.policy_folders import BEFORE, change_json, copied, with_relative_actions
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, STATE, feature
from fixtures.tiny_checkpoint import write_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_act(tmp_path_factory.mktemp("act"))


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


def changed(checkpoint, directory, **changes):
    """Copy a checkpoint without its weights, with changes of its configuration."""
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "config.json").unlink()
    write_json(directory / "config.json", act_config() | changes)
    return directory


def test_the_engine_has_one_graph_with_a_form_for_cuda_and_no_tokenizer(engine):
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == [
        *(f"action/model.{end}" for end in ("cuda.onnx", "onnx", "onnx.data")), "config.json",
    ]  # fmt: skip


def test_the_configuration_tells_cameras_state_and_actions(engine):
    config = EngineConfig.load(engine)
    policy = config.policy
    assert not config.has_language_model
    assert (policy.cameras.names, policy.cameras.heights, policy.cameras.widths) == (
        tuple(CAMERAS), (48, 40), (64, 40),
    )  # fmt: skip
    assert policy.cameras.tokens == (2 * 2, 2 * 2)  # places that are 32 pixels apart
    assert policy.max_prefix_rows == 2 * 4 + 2  # besides images the latent and the state
    assert (policy.state.dim, policy.action_space.dim, policy.action_space.horizon) == (
        STATE, ACTIONS, HORIZON,
    )  # fmt: skip
    assert config.builder.max_action_samples == 1


def test_the_encoder_of_the_variational_objective_is_left_out(checkpoint):
    unread = {each.name for each in plan_export(checkpoint, ExportOptions()).unread}
    assert unread == {"model.vae_encoder_cls_embed.*", "model.encoder_latent_input_proj.weight"}


def test_reports_tell_the_inputs(checkpoint, engine):
    told = "top 48x64 px: 4 rows, wrist 40x40 px: 4 rows"
    assert told in render_check(check(checkpoint))
    assert told in render(inspect(engine))
    assert "language" not in render(inspect(engine))


def test_statistics_in_buffers_of_an_older_policy_are_read(checkpoint, tmp_path):
    with_buffers(checkpoint, tmp_path)
    expected, found = (plan_export(each, ExportOptions()) for each in (checkpoint, tmp_path))
    assert found.config.policy == expected.config.policy
    for name, constant in expected.graphs["action/model.onnx"].graph.initializers.items():
        if constant.shape.rank() == 4 and constant.shape[1] == 3 and constant.shape[0] == 1:  # of pixels
            other = found.graphs["action/model.onnx"].graph.initializers[name]
            np.testing.assert_array_equal(other.const_value.numpy(), constant.const_value.numpy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_obs_steps": 2}, "n_obs_steps 2: supported: 1"),
        ({"vision_backbone": "resnet101"}, "vision_backbone 'resnet101': supported: resnet18, resnet34"),
        ({"feedforward_activation": "glu"}, "feedforward_activation 'glu': supported: relu, gelu"),
        (
            {"replace_final_stride_with_dilation": True},
            "replace_final_stride_with_dilation True: expected false",
        ),
        ({"n_heads": 3}, "dim_model 16: expected a multiple of 4 and of n_heads 3"),
        ({"n_encoder_layers": 2}, "n_encoder_layers 2: the last layer in .* is 'model.encoder.layers.0'"),
        (
            {"input_features": {"observation.state": feature("STATE", STATE)}},
            "observation.images.*expected at least one camera",
        ),
        (
            {"input_features": {"observation.images.top": feature("VISUAL", 4, 8, 8)}},
            r"shape \[4, 8, 8\]: expected \[3, height, width\]",
        ),
        (
            {"input_features": {**act_config()["input_features"], "observation.force": feature("ENV", 2)}},
            "observation.force .*: expected the type ENV for observation.environment_state, and for no other",
        ),
        ({"chunk_size": 7}, "decoder_pos_embed.weight"),
    ],
)
def test_what_the_graph_would_compute_differently_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_export(changed(checkpoint, tmp_path, **changes), ExportOptions())


def test_a_state_that_lerobot_leaves_out_is_left_out(checkpoint, tmp_path):
    """LeRobot lists all observations of a data set, and computes with one state."""
    inputs = {**act_config()["input_features"], "observation.effort": feature("STATE", 2)}
    (tmp_path / "with").mkdir()
    folder = changed(checkpoint, tmp_path / "with", input_features=inputs)
    change_json(folder / BEFORE, lambda processor: processor["steps"][3]["config"].update(features=inputs))
    more, less = (plan_export(each, ExportOptions()) for each in (folder, checkpoint))
    assert more.config == less.config
    assert more.unread == less.unread


def test_relative_actions_need_a_state_of_their_size(checkpoint, tmp_path):
    changed = with_relative_actions(copied(checkpoint, tmp_path), (True, True))
    with pytest.raises(ValueError, match=f"relative actions need as many values of the state, got {STATE}"):
        plan_export(changed, ExportOptions())


def test_a_vision_language_model_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"type 'act': a policy without a vision language model \(--vlm\)"):
        plan_export(checkpoint, ExportOptions(vlm=checkpoint))


def test_only_a_policy_may_lack_a_language_model(engine, tmp_path):
    data = json.loads((engine / "config.json").read_text())
    write_json(tmp_path / "config.json", data | {"action": None, "stop_token_ids": [1]})
    with pytest.raises(ValueError, match="llm must not be null: only a policy may have no language model"):
        EngineConfig.load(tmp_path)


def test_the_coefficient_of_temporal_ensembling_is_logged(checkpoint, tmp_path, caplog):
    plan_export(changed(checkpoint, tmp_path, temporal_ensemble_coeff=0.25), ExportOptions())
    assert "temporal_ensemble_coeff 0.25 is not part of the engine" in caplog.text
