# SPDX-License-Identifier: Apache-2.0
"""Exports of LeRobot's Diffusion Policy."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.check import check, render_check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.act_checkpoint import with_buffers
from fixtures.diffusion_checkpoint import (
    CAMERAS,
    CONDITION,
    EXECUTED,
    HORIZON,
    OBSERVATIONS,
    diffusion_config,
    write_diffusion,
)
from fixtures.smolvla_checkpoint import ACTIONS, STATE, feature
from fixtures.tiny_checkpoint import write_json

INPUTS = diffusion_config()["input_features"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_diffusion(tmp_path_factory.mktemp("diffusion"))


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
    config = {key: value for key, value in (diffusion_config() | changes).items() if value != "missing"}
    write_json(directory / "config.json", config)
    return directory


def test_the_engine_has_two_graphs_and_no_tokenizer(engine):
    graphs = [f"{part}/model.onnx{end}" for part in ("action", "prefix") for end in ("", ".data")]
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "prefix/model.cuda.onnx", "config.json"])


def test_the_configuration_tells_observations_actions_and_sampler(engine):
    config = EngineConfig.load(engine)
    policy = config.policy
    assert (policy.cameras.names, policy.cameras.heights, policy.cameras.widths) == (
        tuple(CAMERAS), (48, 48), (64, 64),
    )  # fmt: skip
    assert (policy.observation_steps, policy.first_action) == (OBSERVATIONS, OBSERVATIONS - 1)
    assert (policy.state.dim, policy.action_space.dim) == (STATE, ACTIONS)
    assert (policy.action_space.horizon, policy.model_horizon) == (EXECUTED, HORIZON)
    schedule = policy.schedule
    assert (schedule.sampler, schedule.train_steps, policy.num_denoise_steps) == ("DDPM", 20, 6)
    assert (schedule.prediction, schedule.clip) == ("epsilon", 1.0)
    assert config.builder.max_action_samples > 1


def test_the_condition_has_all_observations(checkpoint):
    graphs = plan_export(checkpoint, ExportOptions()).graphs
    (condition,) = graphs["prefix/model.onnx"].graph.outputs
    assert list(condition.shape) == [1, CONDITION]


def test_all_weights_are_read(checkpoint):
    assert not plan_export(checkpoint, ExportOptions()).unread


def test_a_compiled_policy_and_one_of_lerobot_0_3_are_the_same(checkpoint, tmp_path):
    """torch.compile renames the U-Net; LeRobot 0.3 saved statistics as buffers."""
    compiled, older = tmp_path / "compiled", tmp_path / "older"
    compiled.mkdir()
    changed(checkpoint, compiled)
    (compiled / "model.safetensors").unlink()
    weights = load_file(checkpoint / "model.safetensors")
    renamed = {name.replace(".unet.", ".unet._orig_mod."): each for name, each in weights.items()}
    save_file(renamed, compiled / "model.safetensors")
    with_buffers(checkpoint, older)
    expected = plan_export(checkpoint, ExportOptions())
    for folder in (compiled, older):
        found = plan_export(folder, ExportOptions())
        assert found.config == expected.config
        assert not found.unread
        for path, graph in expected.graphs.items():
            assert len(found.graphs[path].graph) == len(graph.graph)


def test_reports_tell_observations_and_sampler(checkpoint, engine):
    for report in (render_check(check(checkpoint)), render(inspect(engine))):
        assert "top 48x64 px, wrist 48x64 px" in report
        assert "2, 0.0333 s apart" in report
        assert "DDPM, 6 of 20 steps" in report


def test_steps_default_to_those_of_the_training_and_no_clips_to_none(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, num_inference_steps=None, clip_sample=False)
    policy = plan_export(folder, ExportOptions()).config.policy
    assert (policy.num_denoise_steps, policy.schedule.clip) == (20, None)


def test_a_crop_ratio_of_1_leaves_the_resized_image_whole(checkpoint, tmp_path):
    """LeRobot drops the crop_shape; the checkpoint has the grid of 40 x 56."""
    folder = changed(checkpoint, tmp_path, resize_shape=[40, 56], crop_shape=[8, 8])
    plan_export(folder, ExportOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_obs_steps": 0}, "n_obs_steps 0: expected at least 1"),
        ({"n_obs_steps": 65}, "n_obs_steps 65: expected at most 64"),
        ({"n_obs_steps": 3}, "cond_encoder.1.weight"),
        ({"horizon": "missing"}, "key 'horizon' is missing"),
        ({"crop_shape": "missing"}, "key 'crop_shape' is missing"),
        ({"output_features": {"action": feature("STATE", ACTIONS)}}, "type 'STATE': supported: ACTION"),
        ({"use_group_norm": "missing"}, "key 'use_group_norm' is missing"),
        ({"use_group_norm": False}, "rgb_encoder.backbone.1.running_mean"),
        ({"use_separate_rgb_encoder_per_camera": True}, "rgb_encoder.0.backbone.0.weight"),
        ({"horizon": 6}, r"horizon 6: expected a multiple of 4 \(2 for each of down_dims\)"),
        ({"n_action_steps": 8}, r"n_action_steps 8: expected at most 7 \(horizon - n_obs_steps \+ 1\)"),
        ({"vision_backbone": "resnet101"}, "vision_backbone 'resnet101': supported: resnet18, resnet34"),
        ({"resize_shape": [40]}, r"resize_shape \[40\]: expected \[height, width\]"),
        ({"crop_ratio": 0}, "crop_ratio 0: expected more than 0, at most 1"),
        ({"resize_shape": [4, 4], "crop_ratio": 0.2}, r"crop_ratio 0.2: leaves no pixel of resize_shape"),
        ({"crop_shape": [49, 8]}, r"crop_shape \[49, 8\]: expected at most \[48, 64\], the size of"),
        ({"crop_shape": [8, 8]}, "pool.pos_grid"),
        ({"spatial_softmax_num_keypoints": 5}, "pool.nets.weight"),
        ({"down_dims": []}, r"down_dims \[\]: expected at least one number"),
        ({"down_dims": [8, 18]}, "down_dims .*: expected multiples of n_groups 4"),
        ({"down_dims": [4, 8]}, "down_dims .*: expected a multiple of 8 as the first one"),
        ({"down_dims": [8, 24]}, "down_modules.1.0.cond_encoder.1.weight"),
        ({"kernel_size": 4}, "kernel_size 4: expected an odd number"),
        ({"diffusion_step_embed_dim": 2}, "diffusion_step_embed_dim 2: expected an even number"),
        ({"use_film_scale_modulation": False}, "cond_encoder.1.weight"),
        ({"more_attention": True}, "more_attention True: not a key of LeRobot 0.3 to 0.6"),
        ({"noise_scheduler_type": "PNDM"}, "noise_scheduler_type 'PNDM': supported: DDPM, DDIM"),
        ({"prediction_type": "v_prediction"}, "prediction_type 'v_prediction': supported: epsilon, sample"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid': supported: squaredcos_cap_v2, linear"),
        ({"beta_start": 0.03}, "beta_start and beta_end must rise between 0 and 1, got 0.03 and 0.02"),
        ({"clip_sample_range": 0.0}, "clip must be more than 0, got 0.0"),
        ({"num_train_timesteps": 10**6}, "train_steps must be from 1 to 100000, got 1000000"),
        ({"num_inference_steps": 21}, r"num_inference_steps 21: expected at most 20 \(num_train_timesteps\)"),
        (
            {"input_features": {key: INPUTS[key] for key in INPUTS if key != "observation.state"}},
            "observation.state None: expected the robot's state",
        ),
        (
            {"input_features": {"observation.state": INPUTS["observation.state"]}},
            "observation.images.*expected at least one camera",
        ),
        (
            {"input_features": INPUTS | {"observation.images.wrist": feature("VISUAL", 3, 40, 40)}},
            "expected images of one size, found 40x40 besides 48x64",
        ),
        (
            {"input_features": INPUTS | {"observation.force": feature("ENV", 2)}},
            "observation.force.*expected the type ENV for observation.environment_state, and for no other",
        ),
    ],
)  # fmt: skip
def test_what_the_graphs_would_compute_differently_is_refused(checkpoint, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        plan_export(changed(checkpoint, tmp_path, **changes), ExportOptions())
    assert "\n" not in str(raised.value)


def test_a_vision_language_model_is_refused(checkpoint):
    with pytest.raises(
        ValueError, match=r"type 'diffusion': a policy without a vision language model \(--vlm\)"
    ):
        plan_export(checkpoint, ExportOptions(vlm=checkpoint))
