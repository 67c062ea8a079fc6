# SPDX-License-Identifier: Apache-2.0
"""Exports of GR00T N1.6 in NVIDIA's layout."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest
import tokenizers

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.diffusion.action_spaces import make_reference
from edgellm_ros.diffusion.affine_space import model_state
from edgellm_ros.diffusion.groot_space import GrootActionSpace
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.groot_changes import of_modality, of_model, of_processor
from fixtures.groot_checkpoint import ROBOT, GrootShape, write_groot_of_lerobot
from fixtures.groot_n16_checkpoint import SIDE, write_groot_n16
from fixtures.policy_folders import change_json
from fixtures.tiny_checkpoint import write_json

ARM = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": "arm"}
ANGLES = {"waist": 1, "arm": 3, "hand": 2, "gripper": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_groot_n16(tmp_path_factory.mktemp("groot_n16"))


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def planned(checkpoint, **options):
    return plan_export(checkpoint, ExportOptions(**{"embodiment": ROBOT, **options})).config.policy


def stored(checkpoint):
    return json.loads((checkpoint / "statistics.json").read_text())[ROBOT]


def test_the_engine_has_the_graphs_and_a_tokenizer(checkpoint, tmp_path):
    export(checkpoint, tmp_path, embodiment=ROBOT)
    parts = ("action", "prefix", "visual")
    graphs = [f"{part}/model.onnx{end}" for part in parts for end in ("", ".data")]
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == sorted([*graphs, "config.json", "tokenizer.json"])
    policy = EngineConfig.load(tmp_path).policy
    assert (policy.kind, policy.vision.kind, policy.embodiment) == ("groot", "siglip2", ROBOT)


def test_the_configuration_tells_cameras_state_and_actions(checkpoint):
    policy, stats = planned(checkpoint), stored(checkpoint)
    assert policy.cameras.names == ("front", "wrist")
    assert policy.state.names == policy.action_space.names == ("arm_0", "arm_1", "arm_2", "gripper")
    low = [*stats["state"]["arm"]["q01"], *stats["state"]["gripper"]["q01"]]
    np.testing.assert_array_equal(np.float32(policy.state.offset), np.float32(low))
    assert (policy.action_space.horizon, policy.action_space.model_horizon) == (5, 6)
    assert policy.vision.size_factor == 28
    assert (policy.vision.min_pixels, policy.vision.max_pixels) == (4 * 28 * 28, 4096 * 28 * 28)


def test_sizes_that_the_file_leaves_out_are_those_of_the_version(tmp_path):
    """The model code has 16 actions of 29 values, N1.7 has 40 of 132."""
    write_groot_n16(tmp_path, shape=GrootShape(side=SIDE, model_dim=29, horizon=16))
    drop = ("max_state_dim", "max_action_dim", "action_horizon")
    change_json(tmp_path / "config.json", lambda data: [data.pop(name) for name in drop])
    space = planned(tmp_path).action_space
    assert (space.model_dim, space.model_horizon, planned(tmp_path).state.model_dim) == (29, 16, 29)


def test_the_task_comes_before_the_images(checkpoint):
    """The tokens of a task depend on the text up to the next special tokens."""
    plan = plan_export(checkpoint, ExportOptions(embodiment=ROBOT))
    policy = plan.config.policy
    words = tokenizers.Tokenizer.from_str(plan.texts["tokenizer.json"].decode())
    before, after = (
        words.decode(each, skip_special_tokens=False) for each in (policy.prompt_before, policy.prompt_after)
    )
    assert before == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>"
    assert (policy.task_before, policy.task_after, policy.no_task) == ("user\n", "<image 1>", "")
    assert after == "<img></img><image 2><img></img><|im_end|>\n"
    starts = [i + 1 for i, token in enumerate(policy.prompt_after) if words.id_to_token(token) == "<img>"]
    assert policy.image_places == tuple(starts)
    assert policy.places(100) == tuple(100 - len(policy.prompt_after) + start for start in starts)


def test_a_tokenizer_file_counts_before_a_vocabulary(copy):
    vlm = copy / "vlm"
    first = plan_export(copy, ExportOptions(embodiment=ROBOT))
    (vlm / "tokenizer.json").write_bytes(first.texts["tokenizer.json"])
    (vlm / "vocab.json").unlink()
    assert plan_export(copy, ExportOptions(embodiment=ROBOT)).config == first.config


def test_relative_actions_and_statistics_by_step_are_those_of_the_files(tmp_path):
    shape = GrootShape(
        side=SIDE, state={"gripper": 1, "arm": 3}, representations={"arm": ARM}, per_step=True, steps=4
    )
    write_groot_n16(tmp_path, shape=shape)
    space = planned(tmp_path).action_space
    assert (space.references, space.relative) == ((1, 2, 3, -1), (True, True, True, False))
    rows = np.array(stored(tmp_path)["relative_action"]["arm"]["min"])
    np.testing.assert_array_equal(np.float32(space.step_offset)[:, :3], np.float32(rows))


def test_actions_are_limited_spread_over_their_ranges_and_added_to_the_state(tmp_path):
    """Relative actions have no percentiles, and their ranges may differ by step."""
    shape = GrootShape(side=SIDE, representations={"arm": ARM}, per_step=True, steps=4)
    write_groot_n16(tmp_path, shape=shape)
    config, stats = planned(tmp_path).action_space, stored(tmp_path)
    low, high = (np.array(stats["relative_action"]["arm"][name]) for name in ("min", "max"))
    low, high = (
        np.concatenate([each, np.repeat([stats["action"]["gripper"][name]], 4, axis=0)], axis=1)
        for each, name in ((low, "q01"), (high, "q99"))
    )
    values = np.random.default_rng(0).uniform(-1.5, 1.5, (2, config.model_horizon, config.model_dim))
    expected = low + (np.clip(values[:, :4, :4], -1, 1) + 1) / 2 * (high - low)
    found = GrootActionSpace(config).denormalise(values.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    state = np.array([0.5, -0.25, 2, 9], np.float32)
    absolute = make_reference(state, config).absolute(found)
    np.testing.assert_allclose(absolute - found, np.broadcast_to([0.5, -0.25, 2, 0], (2, 4, 4)), atol=1e-5)


def test_angles_become_sines_and_cosines_by_key(tmp_path):
    write_groot_n16(tmp_path, shape=GrootShape(side=SIDE, state=ANGLES, angles=("hand", "arm")))
    state = planned(tmp_path).state
    assert state.angles == ((1, 3), (4, 2))
    values = np.array([0.3, 1, 2, 3, -4, 5, 0.1], np.float32)
    found, arm, hand = model_state(values, state)[0], values[1:4], values[4:6]
    np.testing.assert_array_equal(found[1:7], [*np.sin(arm), *np.cos(arm)])
    np.testing.assert_array_equal(found[7:11], [*np.sin(hand), *np.cos(hand)])
    plain = (values[[0, 6]] - np.take(state.offset, [0, 6])) / np.take(state.scale, [0, 6]) - 1
    np.testing.assert_allclose(found[[0, 11]], np.clip(plain, -1, 1), atol=1e-6)
    assert not found[12:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("state", ["leg"]), r"sin_cos_embedding_keys \['leg'\]: expected a list of modality_keys"),
        (("state", "arm"), "sin_cos_embedding_keys 'arm': expected a list of modality_keys"),
        ((None, 11), "model_dim 11 is less than the 12 values with sines and cosines"),
    ],
)
def test_angles_that_do_not_fit_are_refused(tmp_path, change, message):
    write_groot_n16(tmp_path, shape=GrootShape(side=SIDE, state=ANGLES, angles=("arm", "hand")))
    modality, value = change
    if modality is None:
        change_json(tmp_path / "config.json", lambda data: data.update(max_state_dim=value))
    else:
        change_json(tmp_path / "processor_config.json", of_modality("state", sin_cos_embedding_keys=value)[1])
    with pytest.raises(ValueError, match=message):
        planned(tmp_path)


def test_angles_count_only_if_the_processor_says_so(tmp_path):
    write_groot_n16(tmp_path, shape=GrootShape(side=SIDE, state=ANGLES, angles=("arm",)))
    change_json(
        tmp_path / "processor_config.json",
        lambda data: data["processor_kwargs"].update(apply_sincos_state_encoding=False),
    )
    assert planned(tmp_path).state.angles == ()


@pytest.mark.parametrize(
    ("settings", "crop"),
    [
        ({}, (False, 64)),
        ({"letter_box_transform": True}, (True, 64)),
        ({"image_target_size": None, "image_crop_size": None}, (False, 64)),  # as the published file
        ({"shortest_image_edge": None}, (False, 64)),  # of the target
        ({"use_albumentations": False, "image_crop_size": [56, 56]}, (True, 0)),
        (
            {"use_albumentations": False, "image_crop_size": [56, 56], "letter_box_transform": False},
            (False, 0),
        ),
    ],
)
def test_images_are_cropped_as_the_processor_does(copy, settings, crop):
    change_json(copy / "processor_config.json", lambda data: data["processor_kwargs"].update({**settings}))
    found = planned(copy).cameras.crop
    assert (found.letter_box, found.short_side) == crop


def test_a_letter_box_that_no_file_tells_of_is_logged(copy, caplog):
    with caplog.at_level(logging.WARNING):
        planned(copy)
    assert "processor_config.json: processor_kwargs has no letter_box_transform" in caplog.text
    caplog.clear()
    change_json(
        copy / "processor_config.json",
        lambda data: data["processor_kwargs"].update(letter_box_transform=True),
    )
    planned(copy)
    assert "letter_box_transform" not in caplog.text


def of_dit(**changes):
    return "config.json", lambda data: data["diffusion_model_cfg"].update(changes)


def of_eagle(part=None, **changes):
    return "vlm/config.json", lambda data: (data if part is None else data[part]).update(changes)


def of_tokens(**changes):
    return "vlm/processor_config.json", lambda data: data.update(changes)


def of_pixels(**changes):
    return "vlm/preprocessor_config.json", lambda data: data.update(changes)


def of_words(**changes):
    return "vlm/tokenizer_config.json", lambda data: data.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_model(backbone_model_type="qwen"), "backbone_model_type 'qwen': supported: eagle"),
        (of_model(use_alternate_vl_dit=False), "use_alternate_vl_dit False: supported: True"),
        (of_model(select_layer=9), "select_layer 5: the last layer in model.safetensors is"),
        (of_model(vl_self_attention_cfg={"num_layers": 1}), "vl_self_attention_cfg .*: supported: None"),
        (of_dit(num_layers=3), "num_layers 3: model.safetensors has 4 layers of action_head.model"),
        (of_model(num_inference_timesteps=1001), "num_inference_timesteps 1001: expected at most 1000"),
        (of_processor(shortest_image_edge=9000), "shortest_image_edge 9000: expected at most 8192"),
        (of_model(backbone_embedding_dim=50), "backbone_embedding_dim 50: expected hidden_size 48 of .*vlm"),
        (of_model(max_num_embodiments=2), "max_num_embodiments 2: the embodiment is number 2"),
        (of_processor(crop_fraction=None, image_target_size=None), "image_target_size None: expected a list"),
        (
            of_processor(crop_fraction=None, image_crop_size=[65, 65]),
            r"image_crop_size \[65, 65\]: expected at most image_target_size, 64",
        ),
        (
            of_processor(shortest_image_edge=None, image_target_size=None),
            "image_target_size None: expected a list of integers",
        ),
        (
            of_modality("state", mean_std_embedding_keys=["arm"]),
            "mean_std_embedding_keys .*: supported: None",
        ),
        (of_eagle(model_type="qwen3_vl"), "model_type 'qwen3_vl': supported: eagle_3_vl"),
        (of_eagle(select_layer=-2), "select_layer -2: supported: -1"),
        (of_eagle(use_llm_lora=8), "use_llm_lora 8: supported: 0"),
        (of_eagle(downsample_ratio=0.4), "downsample_ratio 0.4: expected 1 divided by a whole number"),
        (
            of_eagle(downsample_ratio=1.0),
            "patch_size 14: with 1 patches of a token's side, expected 28 pixels",
        ),
        (of_tokens(pixels_per_token=196), "pixels_per_token 196: supported: 784"),
        (of_tokens(image_placeholder="img"), "image_placeholder 'img': supported: image"),
        (
            of_eagle(image_token_index=5),
            "config.json: image_token_index 5: expected that of <IMG_CONTEXT> in",
        ),
        (of_tokens(image_token="<img>"), "image_token_index .*: expected that of <img> in vocab.json"),
        (
            of_eagle("text_config", architectures=["Qwen2ForCausalLM"]),
            r"architectures \['Qwen2ForCausalLM'\]",
        ),
        (of_eagle("text_config", use_sliding_window=True), "use_sliding_window True: supported: False"),
        (of_eagle("text_config", vocab_size=200), "token '.*' has the id .*, outside the vocabulary of 200"),
        (of_eagle("vision_config", use_rope=True), "use_rope True: supported: False"),
        (of_eagle("vision_config", use_windows_attn=True), "use_windows_attn True: supported: False"),
        (of_eagle("vision_config", model_type="radio"), "model_type 'radio': supported: siglip2_vision_mo"),
        (of_eagle("vision_config", num_patches=24), "num_position_embeddings must be a square, got 24"),
        (of_eagle("vision_config", num_hidden_layers=3), "num_hidden_layers 3: the last layer in"),
        (of_eagle("vision_config", num_hidden_layers=1), r"model.safetensors has 2 layers of \S+encoder"),
        (of_eagle("vision_config", hidden_size=16), r"patch_embedding.weight.* has shape \[32, 588\]"),
        (of_pixels(do_resize=True), "do_resize True: supported: False"),
        (of_pixels(image_std=[0.5]), r"image_std \[0.5\]: expected 3 values"),
        (of_words(tokenizer_class="LlamaTokenizer"), "tokenizer_class 'LlamaTokenizer': supported: Qwen2Tok"),
        (
            of_words(added_tokens_decoder={"9": {"content": "<img>"}}),
            "'<img>': expected the id 9, but .* 263",
        ),
        (of_words(added_tokens_decoder={"x": {}}), "added_tokens_decoder: x .*: expected the id of a token"),
    ],
)
def test_what_would_be_computed_differently_is_refused_with_one_line(copy, change, message):
    file, changed = change
    change_json(copy / file, changed)
    with pytest.raises(ValueError, match=message) as caught:
        export(copy, copy.parent / "engine", embodiment=ROBOT)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ("a b c\n", "merges.txt: line 1 'a b c': expected two tokens"),
        ("#version: 0.2\na Q9\n", "merges.txt: not the merges of vocab.json: .*Q9"),
    ],
)
def test_merges_of_another_vocabulary_are_refused(copy, merges, message):
    (copy / "vlm" / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match=message):
        planned(copy)


def test_a_missing_eagle_is_told_with_where_it_is(copy, checkpoint):
    shutil.rmtree(copy / "vlm")
    message = (
        r"vlm/config.json not found: a GR00T needs config.json, .*: gr00t/.*/Eagle-Block2A-2B-v2 of .*--vlm"
    )
    with pytest.raises(FileNotFoundError, match=message):
        planned(copy)
    assert planned(copy, vlm=checkpoint / "vlm") == planned(checkpoint)


@pytest.mark.parametrize(
    "file", ["vocab.json", "merges.txt", "tokenizer_config.json", "processor_config.json"]
)
def test_a_missing_file_of_eagle_is_named(copy, file):
    (copy / "vlm" / file).unlink()
    missing = "tokenizer.json" if file == "vocab.json" else file
    with pytest.raises(FileNotFoundError, match=rf"vlm/{missing} not found"):
        planned(copy)


def test_a_chat_template_that_has_images_first_is_refused(copy):
    template = "{% for part in messages[0]['content'] | reverse %}<|im_start|>{% if part.type == 'image' %}"
    template += "<image-1>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    write_json(copy / "vlm" / "chat_template.json", {"chat_template": template})
    with pytest.raises(
        ValueError, match=r"chat_template\.json: a chat template without the task, or without"
    ):
        planned(copy)


def test_lerobot_saves_no_policy_that_was_trained_from_it(tmp_path):
    write_groot_of_lerobot(tmp_path)
    change_json(tmp_path / "base" / "config.json", lambda data: data.update(model_type="Gr00tN1d6"))
    with pytest.raises(ValueError, match="model_type 'Gr00tN1d6': supported: Gr00tN1d7"):
        planned(tmp_path)
