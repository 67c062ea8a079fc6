# SPDX-License-Identifier: Apache-2.0
"""Exports of GR00T N1.7 in NVIDIA's layout."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.groot_changes import of_modality, of_model, of_processor
from fixtures.groot_checkpoint import ONE_ROBOT, OTHER, ROBOT, GrootShape, write_groot
from fixtures.policy_folders import change_json
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_json

RELATIVE = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": "arm"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_groot(tmp_path_factory.mktemp("groot"))


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory, embodiment=ROBOT)
    return directory


def planned(checkpoint, **options):
    return plan_export(checkpoint, ExportOptions(**{"embodiment": ROBOT, **options})).config.policy


def stored(checkpoint, robot=ROBOT):
    return json.loads((checkpoint / "statistics.json").read_text())[robot]


def test_the_engine_has_the_graphs_and_the_tokenizer_alone(engine):
    parts = ("action", "prefix", "visual")
    graphs = [f"{part}/model.onnx{end}" for part in parts for end in ("", ".data")]
    files = sorted(path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "config.json", "tokenizer.json"])


def test_the_configuration_tells_cameras_state_and_actions(engine, checkpoint):
    policy, stats = EngineConfig.load(engine).policy, stored(checkpoint)
    assert policy.cameras.names == ("front", "wrist")
    assert policy.state.names == policy.action_space.names == ("arm_0", "arm_1", "arm_2", "gripper")
    assert policy.embodiment == ROBOT
    low = [*stats["state"]["arm"]["q01"], *stats["state"]["gripper"]["q01"]]
    np.testing.assert_array_equal(np.float32(policy.state.offset), np.float32(low))
    space = policy.action_space
    high = [*stats["action"]["arm"]["q99"], *stats["action"]["gripper"]["q99"]]
    np.testing.assert_allclose(np.array(space.offset) + 2 * np.array(space.scale), high, rtol=1e-6)
    assert (space.horizon, space.model_horizon, space.relative) == (5, 6, (False,) * 4)
    assert not space.step_offset
    assert policy.num_denoise_steps == 4


def test_the_report_tells_the_embodiment(engine):
    text = render(inspect(engine))
    assert f"embodiment     {ROBOT}".split() == [
        word for line in text.splitlines() if "embodiment" in line for word in line.split()
    ]
    assert "front, wrist: at most 8 rows each, from short side 32 px" in text


def test_each_embodiment_has_its_own_statistics_and_weights(checkpoint, tmp_path):
    found = {}
    for robot in (ROBOT, OTHER):
        export(checkpoint, tmp_path / robot, embodiment=robot)
        found[robot] = (tmp_path / robot / "action" / "model.onnx.data").read_bytes()
        state = planned(checkpoint, embodiment=robot).state
        low = stored(checkpoint, robot)["state"]["arm"]["q01"]
        np.testing.assert_array_equal(np.float32(state.offset[:3]), np.float32(low))
    assert found[ROBOT] != found[OTHER]


def test_the_only_embodiment_need_not_be_named(tmp_path):
    write_groot(tmp_path, shape=ONE_ROBOT)
    assert planned(tmp_path, embodiment=None).embodiment == ROBOT


def test_embodiments_are_listed_if_there_are_several(checkpoint):
    with pytest.raises(ValueError, match=rf"name one \(--embodiment\): {ROBOT}, {OTHER}"):
        planned(checkpoint, embodiment=None)
    with pytest.raises(ValueError, match=rf"--embodiment 'gr2': expected one with .*: {ROBOT}, {OTHER}"):
        planned(checkpoint, embodiment="gr2")


def test_another_policy_has_no_embodiment(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: --embodiment: a smolvla is for one robot"):
        planned(write_smolvla(tmp_path))


def test_relative_actions_name_the_values_of_the_state(tmp_path):
    """The state has the arm second, the actions have it first."""
    shape = GrootShape(
        state={"gripper": 1, "arm": 3}, representations={"arm": RELATIVE}, per_step=True, steps=4
    )
    write_groot(tmp_path, shape=shape)
    space = planned(tmp_path).action_space
    assert space.references == (1, 2, 3, -1)
    assert space.relative == (True, True, True, False)
    rows = np.array(stored(tmp_path)["relative_action"]["arm"]["min"])
    np.testing.assert_array_equal(np.float32(space.step_offset)[:, :3], np.float32(rows))


def test_values_that_do_not_vary_count_as_zero(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")

    def change(data):
        data[ROBOT]["state"]["arm"]["q99"][1] = data[ROBOT]["state"]["arm"]["q01"][1]

    change_json(tmp_path / "copy" / "statistics.json", change)
    assert planned(tmp_path / "copy").state.limits == (1, 0, 1, 1)


def test_a_data_set_gives_the_rate(checkpoint, tmp_path):
    write_json(tmp_path / "info.json", {"fps": 20, "features": {}})
    assert planned(checkpoint, dataset=tmp_path).action_space.dt == pytest.approx(0.05)


# the layers of the model code
without_vl = "config.json", lambda data: data.pop("vl_self_attention_cfg")


def of_vlm(**changes):
    def change(data):
        for key, value in changes.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value

    return "vlm/config.json", change


def of_statistics(modality, key, **changes):
    return "statistics.json", lambda data: data[ROBOT][modality][key].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_model(model_type="Gr00tN1d5"), "model_type 'Gr00tN1d5': .* this is GR00T N1.5"),
        (of_model(use_alternate_vl_dit=False), "use_alternate_vl_dit False: supported: True"),
        (of_model(state_history_length=2), "state_history_length 2: supported: 1"),
        (of_model(select_layer=2), "select_layer 2: expected more layers than the 2 deepstack features"),
        (of_model(select_layer=9), "select_layer 4: the last layer in model.safetensors is"),
        (
            of_model(vl_self_attention_cfg=None),
            "num_layers 0: model.safetensors has 1 layers of action_head.vl_s",
        ),
        (without_vl, "num_layers 4: the last layer in model.safetensors is"),
        (of_vlm(image_token_id=0), r"vlm/config.json: image_token_id 0: expected that of <\|image_pad\|> in"),
        (
            of_vlm(vision_config={"deepstack_visual_indexes": [0]}),
            r"model.safetensors has 2 layers of \S+deepst",
        ),
        (of_model(num_inference_timesteps=1001), "num_inference_timesteps 1001: expected at most 1000"),
        (of_model(backbone_embedding_dim=50), "backbone_embedding_dim 50: expected hidden_size 48 of "),
        (of_model(input_embedding_dim=26), "input_embedding_dim 26: expected an even number, the 24 of"),
        (of_model(hidden_size=21), "hidden_size 21: expected output_dim of diffusion_model_cfg"),
        (of_model(max_num_embodiments=2), "max_num_embodiments 2: the embodiment is number 2"),
        (of_model(max_seq_len=4), "max_seq_len 4: expected at least action_horizon 6"),
        (of_model(max_action_dim=3), "model_dim 3 is less than the 4 names"),
        (of_model(action_horizon=4), "model_horizon must be at least 5, got 4"),
        (of_model(diffusion_model_cfg={}), "interleave_self_attention None: supported: True"),
        (
            of_processor(image_target_size=[64], shortest_image_edge=None),
            r"image_target_size \[64\]: expected height and width",
        ),
        (of_processor(crop_fraction=1.5), "crop_fraction 1.5: expected above 0 and at most 1"),
        (
            of_processor(use_albumentations=False, image_crop_size=[31, 32]),
            r"image_crop_size \[31, 32\]: expected \[32, 32\] less an even number",
        ),
        (of_processor(shortest_image_edge=9000), "shortest_image_edge 9000: expected at most 8192"),
        (
            of_modality("video", modality_keys=["", "wrist"]),
            r"modality_keys \['', 'wrist'\]: expected a list of names",
        ),
        (of_modality("video", modality_keys=[]), r"modality_keys \[\]: expected a list of names"),
        (
            of_modality("video", delta_indices=[-15]),
            r"delta_indices \[-15\]: supported: up to 8 growing numb",
        ),
        (of_modality("state", delta_indices=[-1, 0]), r"delta_indices \[-1, 0\]: supported: \[0\]"),
        (of_modality("action", delta_indices=[0, 2]), r"delta_indices \[0, 2\]: supported: 0, 1, 2"),
        (of_modality("action", action_configs=[{}]), "expected 2 objects, one of each of modality_keys"),
        (
            of_modality("state", mean_std_embedding_keys=["arm"]),
            "mean_std_embedding_keys .*: supported: None",
        ),
        (of_modality("state", exclude_state=True), "exclude_state True: supported: False"),
        (
            of_statistics("state", "arm", q99=[9, 9, 1e39]),
            r"statistics.json: .*q99 .*: expected numbers of at mo",
        ),
        (of_statistics("state", "arm", q01=None), "q01 None: expected a list of numbers"),
        (of_statistics("state", "arm", q01=[9, 9, 9]), "q99 .*: has values below those of q01"),
        (of_statistics("action", "arm", q99=[1, 2]), r"q99 \[1, 2\]: expected the shape of q01, \[3\]"),
    ],
)
def test_what_the_graphs_would_compute_differently_is_refused(checkpoint, tmp_path, change, message):
    shutil.copytree(checkpoint, tmp_path / "copy")
    file, changed = change
    change_json(tmp_path / "copy" / file, changed)
    with pytest.raises(ValueError, match=message) as caught:
        planned(tmp_path / "copy")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rep": "DELTA"}, "rep 'DELTA': supported: relative, absolute"),
        ({"type": "EEF"}, "format 'DEFAULT': supported: xyz_rot6d"),
        ({"type": "EEF", "format": "XYZ_ROT6D"}, "format 'XYZ_ROT6D': expected 9 values, .* have 3"),
        ({"state_key": "gripper"}, "state_key 'gripper': gripper has 1 values, the actions arm have 3"),
        ({"state_key": "leg"}, "state_key 'leg': .* relative to leg, which the state does not have"),
    ],
)
def test_relative_actions_of_another_form_are_refused(tmp_path, changes, message):
    write_groot(tmp_path, shape=GrootShape(representations={"arm": RELATIVE | changes}))
    with pytest.raises(ValueError, match=message):
        planned(tmp_path)


def test_a_missing_vision_language_model_is_told_with_where_to_get_it(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    shutil.rmtree(copy / "vlm")
    with pytest.raises(FileNotFoundError, match=r"hf download nvidia/Cosmos-Reason2-2B .* --local-dir .*vlm"):
        planned(copy)
    assert planned(copy, vlm=checkpoint / "vlm") == planned(checkpoint)


def test_a_chat_template_without_images_is_refused(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "vlm" / "chat_template.jinja").write_text("{{ messages[0].content[-1].text }}")
    with pytest.raises(
        ValueError, match=r"chat_template.jinja: a chat template without the task, or without"
    ):
        planned(copy)


def test_a_camera_has_an_image_for_each_time(tmp_path):
    write_groot(tmp_path, shape=GrootShape(frames=(-15, 0)))
    policy = planned(tmp_path)
    assert (policy.cameras.frames, policy.images, len(policy.image_places)) == (2, 4, 4)
    assert policy.max_prefix_rows == 4 * policy.cameras.tokens + policy.max_prompt_tokens
