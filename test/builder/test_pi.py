# SPDX-License-Identifier: Apache-2.0
"""Exports of pi0 and pi0.5 as LeRobot saves them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.pi_shapes import EXPERT, PALIGEMMA, TEXT, TOWER
from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.pi_checkpoint import CAMERAS, SIZES, STATE, write_pi
from fixtures.policy_folders import AFTER, BEFORE, change_json, copied, with_step
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_json

TRAINING = "train_config.json"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Both kinds of both versions, by kind and version."""
    return {
        (kind, version): write_pi(tmp_path_factory.mktemp(kind), kind, lerobot=version)
        for kind in ("pi0", "pi05")
        for version in ("0.4", "0.6")
    }


def policy_of(folder, **options):
    return plan_export(folder, ExportOptions(**options)).config.policy


def read_weights(folder, **options):
    """Read all weights of an export; graphs for CUDA have none of their own."""
    return {
        (path, name): value.const_value.numpy()
        for path, graph in plan_export(folder, ExportOptions(**options)).graphs.items()
        if ".cuda." not in path
        for name, value in graph.graph.initializers.items()
    }


def with_tensors(checkpoint, directory, change):
    """Copy a checkpoint; `change` returns its tensors of the old ones."""
    copied(checkpoint, directory)
    (directory / "model.safetensors").unlink()
    save_file(change(load_file(checkpoint / "model.safetensors")), directory / "model.safetensors")
    return directory


def test_a_model_of_many_layers_is_loaded(tmp_path):
    """The time becomes 3 values of each of 37 norms.

    ONNX Runtime must see the list of their 111 sizes.
    """
    checkpoint = write_pi(tmp_path / "checkpoint", sizes=replace(SIZES["pi05"], layers=18))
    export(checkpoint, tmp_path / "engine")
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        assert runtime.config.policy.kind == "pi05"


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_padding_and_prompt_are_those_of_the_version_that_the_folder_tells(checkpoints, kind):
    old, new = (policy_of(checkpoints[kind, version]) for version in ("0.4", "0.6"))
    assert (old.cameras.fill, new.cameras.fill) == (-3.0, -1.0)
    assert (old.cameras.centred, new.cameras.centred) == (True, True)
    assert new.cameras.names == tuple(CAMERAS)
    if kind == "pi05":
        assert (old.prompted_values, new.prompted_values) == (32, STATE)


def test_a_folder_that_does_not_tell_the_version_needs_the_option(checkpoints, tmp_path):
    folder = copied(checkpoints["pi05", "0.4"], tmp_path)
    (folder / TRAINING).unlink()
    message = r"config\.json: type 'pi05': .*nothing in the folder tells .*\(--lerobot 0\.4, or 0\.5"
    with pytest.raises(ValueError, match=message):
        policy_of(folder)
    assert [policy_of(folder, lerobot=each).cameras.fill for each in ("0.4", "0.5")] == [-3.0, -1.0]


@pytest.mark.parametrize("sign", ["config", "step"])
def test_configuration_and_steps_tell_the_version_too(checkpoints, tmp_path, sign):
    folder = copied(checkpoints["pi05", "0.4"], tmp_path)
    (folder / TRAINING).unlink()
    if sign == "config":
        change_json(folder / "config.json", lambda config: config.update(use_relative_actions=False))
    else:
        with_step(folder, BEFORE, 2, "relative_actions_processor", enabled=False)
    assert policy_of(folder).cameras.fill == -1.0


def test_files_of_different_versions_need_the_option(checkpoints, tmp_path):
    folder = copied(checkpoints["pi05", "0.6"], tmp_path)
    (folder / TRAINING).unlink()
    write_json(folder / TRAINING, {"seed": 1})
    told = r"config\.json: 0\.5, policy_preprocessor\.json: 0\.5, train_config\.json: 0\.4"
    with pytest.raises(ValueError, match=rf"different LeRobots \({told}\): name one \(--lerobot\)"):
        policy_of(folder)
    assert policy_of(folder, lerobot="0.5").cameras.fill == -1.0


def test_the_option_is_refused_for_other_checkpoints(tiny_checkpoint, tmp_path):
    with pytest.raises(ValueError, match="--lerobot is for policies"):
        policy_of(tiny_checkpoint, lerobot="0.4")
    with pytest.raises(ValueError, match=r"type 'smolvla': the same with every LeRobot \(--lerobot 0\.4\)"):
        policy_of(write_smolvla(tmp_path), lerobot="0.4")


def renamed(tensors):
    """Name tensors as openpi and newer versions of transformers do."""
    names = {}
    for name in tensors:
        new = name.replace("vision_tower.vision_model.", "vision_tower.").removeprefix("model.")
        names[new.replace("time_mlp_", "action_time_mlp_")] = tensors[name]
    return names


def with_embedding(tensors):
    own = tensors | {f"{TEXT}.embed_tokens.weight": tensors[f"{PALIGEMMA}.lm_head.weight"]}
    return {name: values for name, values in own.items() if "lm_head" not in name}


@pytest.mark.parametrize("change", [renamed, with_embedding])
def test_other_names_of_tensors_are_read(checkpoints, tmp_path, change):
    checkpoint = checkpoints["pi05", "0.6"]
    found = read_weights(with_tensors(checkpoint, tmp_path, change))
    expected = read_weights(checkpoint)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)


def test_an_adapter_of_the_expert_is_merged(checkpoints, tmp_path):
    base, folder = checkpoints["pi05", "0.6"], tmp_path
    copied(base, folder, use_peft=True)
    (folder / "model.safetensors").unlink()
    module, rng = f"{EXPERT}.layers.0.self_attn.v_proj", np.random.default_rng(0)
    rows, columns = load_file(base / "model.safetensors")[f"{module}.weight"].shape
    a, b = rng.normal(size=(2, columns)), rng.normal(size=(rows, 2))
    tensors = {"A": a, "B": b}
    save_file(
        {f"base_model.model.{module}.lora_{k}.weight": v.astype(np.float32) for k, v in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 2}
    write_json(folder / "adapter_config.json", adapter | {"target_modules": ["v_proj"]})
    found, expected = read_weights(folder), read_weights(base)
    changed = [key for key in expected if not np.array_equal(found[key], expected[key])]
    (key,) = changed
    np.testing.assert_allclose((found[key] - expected[key])[:, -rows:], (b @ a).T, atol=1e-5)


CHANGES = [
    ({"n_obs_steps": 2}, "n_obs_steps 2: supported: 1"),
    ({"paligemma_variant": "gemma_7b"}, "paligemma_variant 'gemma_7b': supported: gemma_2b, gemma_300m"),
    ({"use_visual_memory": True}, "use_visual_memory True: not a key of LeRobot"),
    ({"use_proprioceptive_memory": True}, "use_proprioceptive_memory True: not a key of LeRobot"),
    ({"image_resolution": [28, 42]}, r"image_resolution \[28, 42\]: expected a square"),
    ({"image_resolution": [30, 30]}, "expected a square with a side of a multiple of 14 pixels"),
    ({"image_resolution": [42, 42]}, r"position_embedding.weight' has shape \[4, 16\], but .* \[9, 16\]"),
    ({"max_action_dim": 9}, r"action_in_proj.weight' has shape \[24, 8\], but by the config it is \[24, 9\]"),
    ({"max_action_dim": 3}, r"action: shape \[4\]: expected \[n\], n from 1 to 3"),
    ({"chunk_size": 0}, "chunk_size 0: expected at least 1"),
    ({"chunk_size": 9000}, "chunk_size 9000: expected at most 4096"),
    ({"tokenizer_max_length": 8190}, "chunk_size .*: with 8198 rows before it, expected at most 8192 rows"),
    ({"min_period": 5}, "min_period 5: expected more than 0 and less than max_period 4.0"),
    ({"num_inference_steps": 0}, "num_inference_steps 0: expected at least 1"),
    ({"tokenizer_max_length": None}, "tokenizer_max_length None: expected an integer"),
    ({"tokenizer_max_length": 100}, "max_length 200: supported: 100"),
    ({"use_relative_actions": True}, "use_relative_actions True: expected as `enabled` of relative"),
    ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "VISUAL 'MEAN_STD': supported: IDENTITY"),
    ({"type": None}, r"config.json: type None: expected a string"),
    ({"max_state_dim": 4097}, "max_state_dim 4097: expected at most 4096"),
    ({"num_inference_steps": 1001}, "num_inference_steps 1001: expected at most 1000"),
    ({"type": "pi0"}, r"steps\[4\] 'pi05_prepare_state_tokenizer_processor_step': not supported"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_what_the_graphs_would_compute_differently_is_refused(checkpoints, tmp_path, changes, message):
    copied(checkpoints["pi05", "0.6"], tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.update(changes))
    with pytest.raises(ValueError, match=message) as error:
        policy_of(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def swapped(first, second):
    def change(processor):
        steps = processor["steps"]
        steps[first], steps[second] = steps[second], steps[first]

    return change


STEPS = [
    ("pi05", lambda processor: processor["steps"].pop(4), "no step pi05_prepare_state_tokenizer_processor"),
    ("pi05", swapped(3, 4), r"steps\[4\] normalizer_processor: twice, or after pi05_prepare_state"),
    ("pi05", swapped(4, 5), r"steps\[5\] pi05_prepare_state\w+: twice, or after tokenizer_processor"),
    ("pi05", swapped(2, 3), r"steps\[3\] relative_actions_processor: twice, or after normalizer_processor"),
    ("pi0", lambda processor: processor["steps"].pop(2), "no step pi0_new_line_processor"),
    (
        "pi0",
        lambda processor: processor["steps"][2].update(registry_name="smolvla_new_line_processor"),
        r"steps\[2\] 'smolvla_new_line_processor': not supported",
    ),
]


@pytest.mark.parametrize(("kind", "change", "message"), STEPS)
def test_steps_that_would_make_another_prompt_are_refused(checkpoints, tmp_path, kind, change, message):
    copied(checkpoints[kind, "0.6"], tmp_path)
    change_json(tmp_path / BEFORE, change)
    with pytest.raises(ValueError, match=message):
        policy_of(tmp_path)


def test_relative_actions_are_relative_to_the_state(tmp_path):
    checkpoint = write_pi(tmp_path, use_relative_actions=True)

    def enable(processor):
        steps = [step for step in processor["steps"] if "_actions_" in step["registry_name"]]
        steps[0]["config"] |= {"enabled": True}
        if "exclude_joints" in steps[0]["config"]:
            names = ["pan", "lift", "elbow", "gripper"]
            steps[0]["config"] |= {"action_names": names}

    for file in (BEFORE, AFTER):
        change_json(checkpoint / file, enable)
    assert policy_of(checkpoint).action_space.relative == (True, True, True, False)


def test_a_missing_tokenizer_is_an_error_with_the_way_to_get_it(checkpoints, tmp_path):
    copied(checkpoints["pi05", "0.6"], tmp_path)
    (tmp_path / "vlm").unlink()
    message = "vlm/tokenizer.json not found: .* hf download google/paligemma-3b-pt-224 tokenizer.json --local"
    with pytest.raises(FileNotFoundError, match=message):
        policy_of(tmp_path)
    policy_of(tmp_path, vlm=checkpoints["pi05", "0.6"] / "vlm")


def test_the_image_token_of_the_tokenizer_needs_no_embedding(checkpoints, tmp_path):
    checkpoint = checkpoints["pi05", "0.6"]
    tokenizer = json.loads((checkpoint / "vlm" / "tokenizer.json").read_text())
    last = dict(tokenizer["added_tokens"][-1])

    def add(content):
        size = load_file(checkpoint / "model.safetensors")[f"{PALIGEMMA}.lm_head.weight"].shape[0]
        tokens = [*tokenizer["added_tokens"], last | {"id": size, "content": content}]
        write_json(tmp_path / "tokenizer.json", tokenizer | {"added_tokens": tokens})

    add("<image>")
    policy_of(checkpoint, vlm=tmp_path)
    add("<other>")
    with pytest.raises(ValueError, match=r"token '<other>' has the id .* outside the vocabulary"):
        policy_of(checkpoint, vlm=tmp_path)


def test_a_tower_of_other_heads_is_refused(checkpoints, tmp_path):
    name = f"{TOWER}.embeddings.patch_embedding.weight"

    def change(tensors):
        return tensors | {name: np.zeros((15, 3, 14, 14), np.float32)}

    folder = with_tensors(checkpoints["pi05", "0.6"], tmp_path, change)
    with pytest.raises(ValueError, match=r"patch embedding has shape \[15, 3, 14, 14\]: .* multiple of 16"):
        policy_of(folder)
