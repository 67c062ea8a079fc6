# SPDX-License-Identifier: Apache-2.0
"""Exports of pi0 and pi0.5 as openpi saves them for PyTorch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head
from edgellm_ros.multimodal.padded_image import padded_image
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.pi_checkpoint import openpi_sizes, write_openpi, write_pi
from fixtures.policy_folders import change_json
from fixtures.tiny_checkpoint import write_json

KINDS = ("pi0", "pi05")


def policy_of(folder, **options):
    return plan_export(folder, ExportOptions(**options)).config.policy


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_those_of_the_same_model_in_lerobot_s_form(tmp_path, kind):
    """Images of 224 pixels are not resized, which LeRobot does in another way."""
    sizes = openpi_sizes(kind)
    write_pi(tmp_path / "lerobot", kind, sizes=sizes, num_inference_steps=10)
    write_openpi(tmp_path / "openpi", kind)
    rng = np.random.default_rng(0)
    images = tuple(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for _ in range(2))
    found = {}
    for form in ("lerobot", "openpi"):
        engine = tmp_path / f"{form}_engine"
        config = export(tmp_path / form, engine).policy
        assert config.cameras.names == ("top", "wrist")
        with LLMInferenceRuntime(engine) as runtime:
            request = LLMGenerationRequest("pick it up", images=images, state=np.array([0.3, -1, 2]))
            found[form] = runtime.handle_request(request).actions
    np.testing.assert_allclose(found["openpi"], found["lerobot"], atol=1e-4 * np.ptp(found["lerobot"]))


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_have_openpi_s_margin(tmp_path, kind):
    policy = policy_of(write_openpi(tmp_path, kind, relative=[True, True, True, False]))
    path = tmp_path / "assets" / "someone" / "a_robot" / "norm_stats.json"
    stats = json.loads(path.read_text())["norm_stats"]["actions"]
    each = {name: np.array(values[:4]) for name, values in stats.items()}
    scale = (each["q99"] - each["q01"] + 1e-6) / 2 if kind == "pi05" else each["std"] + 1e-6
    offset = each["q01"] if kind == "pi05" else each["mean"]
    space = policy.action_space
    np.testing.assert_allclose(space.scale, scale, rtol=1e-7)
    np.testing.assert_allclose(space.offset, offset, rtol=1e-6)
    assert (space.names, space.relative) == (("x", "y", "z", "grip"), (True, True, True, False))
    assert space.dt == pytest.approx(0.1)


def test_prompts_are_those_of_openpi(tmp_path):
    state, task = np.zeros((1, 8), np.float32), " put_it\ndown "
    prompts = {}
    for kind, changes in (("pi0", {}), ("pi05", {}), ("pi05", {"discrete_state_input": False})):
        folder = tmp_path / f"{kind}{len(changes)}"
        head = make_policy_head(policy_of(write_openpi(folder, kind, **changes)))
        prompts[kind, bool(changes)] = head.prompt(task, state)
    assert prompts["pi0", False] == prompts["pi05", True] == "put it down\n"
    assert prompts["pi05", False] == "Task: put it down, State: 128 128 128;\nAction: "


def test_images_are_resized_by_pillow():
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    expected = np.zeros((56, 56, 3), np.uint8)
    expected[7:49] = Image.fromarray(image).resize((56, 42), Image.Resampling.BILINEAR)
    found = padded_image(image, 56, -1.0, centred=True, filtered=True)
    np.testing.assert_allclose(found, np.moveaxis(expected / 255 * 2 - 1, 2, 0), atol=1e-6)
    assert np.abs(found - padded_image(image, 56, -1.0, centred=True)).max() > 0.1


CHANGES = [
    ({"cameras": {"top": "top"}}, "cameras .*: expected names for some of base_0_rgb, left_wrist_0_rgb"),
    ({"cameras": {}}, "cameras {}: expected names for some of base_0_rgb"),
    ({"cameras": {"base_0_rgb": 1}}, "base_0_rgb 1: expected a string"),
    ({"cameras": {"base_0_rgb": "a", "left_wrist_0_rgb": "a"}}, "names must be different"),
    ({"state": []}, r"state \[\]: expected a list of 1 to 8 names"),
    ({"state": ["x"] * 9}, "state .*: expected a list of 1 to 8 names"),
    ({"actions": [1, 2]}, r"actions \[1, 2\]: expected a list of names"),
    ({"actions": ["x", "x"]}, "names must be different"),
    ({"relative": [True]}, r"relative \[True\]: expected a list of 4 of true or false"),
    ({"relative": [True, True, True, True]}, "relative actions need as many values of the state, got 3"),
    ({"fps": 0}, "fps 0: expected more than 0"),
    ({"discrete_state_input": "no"}, "discrete_state_input 'no': expected true or false"),
    ({"asset_id": "other"}, "asset_id 'other': expected one of someone/a_robot"),
    ({"gripper": True}, "gripper True: expected one of actions, asset_id, cameras"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_a_description_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"openpi\.json.*{message}") as error:
        policy_of(write_openpi(tmp_path, **changes))
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_without_a_description_is_refused_with_an_example(tmp_path):
    (write_openpi(tmp_path) / "openpi.json").unlink()
    with pytest.raises(ValueError, match=r'openpi\.json not found: .* as in {"cameras": {"base_0_rgb"'):
        policy_of(tmp_path)


def test_a_camera_without_a_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"openpi\.json: names must not be empty, got \(''"):
        policy_of(write_openpi(tmp_path, cameras={"base_0_rgb": ""}))


def test_a_folder_without_statistics_is_refused(tmp_path):
    (write_openpi(tmp_path) / "assets/someone/a_robot/norm_stats.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"assets: no norm_stats\.json in it: openpi saves"):
        policy_of(tmp_path)


def test_statistics_of_two_assets_need_a_name(tmp_path):
    folder = write_openpi(tmp_path)
    other = tmp_path / "assets" / "other"
    other.mkdir()
    stats = json.loads((tmp_path / "assets/someone/a_robot/norm_stats.json").read_text())
    stats["norm_stats"]["state"]["q01"] = [-5.0, -5, -5]
    write_json(other / "norm_stats.json", stats)
    with pytest.raises(ValueError, match="has statistics of other, someone/a_robot: name one"):
        policy_of(folder)
    change_json(folder / "openpi.json", lambda told: told.update(asset_id="other"))
    assert policy_of(folder).state.offset == (-5.0, -5.0, -5.0)


def test_statistics_of_too_few_values_are_refused(tmp_path):
    folder = write_openpi(tmp_path)
    path = folder / "assets/someone/a_robot/norm_stats.json"
    change_json(path, lambda stats: stats["norm_stats"]["state"].update(q99=[1.0]))
    with pytest.raises(ValueError, match=r"state: QUANTILES needs q99 of 3 values, found \[1\]"):
        policy_of(folder)


@pytest.mark.parametrize("option", [{"lerobot": "0.5"}, {"dataset": "meta"}])
def test_options_of_lerobot_s_folders_are_refused(tmp_path, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"a checkpoint of openpi, but --{name} is for those of LeRobot"):
        policy_of(write_openpi(tmp_path), **option)


def test_a_folder_of_jax_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "params").mkdir()
    with pytest.raises(ValueError, match=r"for JAX: convert it with openpi's .*to_pytorch\.py"):
        policy_of(tmp_path)
