# SPDX-License-Identifier: Apache-2.0
"""The registry of model families: a new family needs no change elsewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from edgellm_ros.builder import export, inspect
from edgellm_ros.builder.families import families, registered
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.seed_oss_family import SEED_OSS, write_seed_oss_checkpoint
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_seed_oss_checkpoint(tmp_path_factory.mktemp("seed_oss") / "checkpoint")


def answer(engine, **options):
    with LLMInferenceRuntime(engine) as runtime:
        request = LLMGenerationRequest("hello", sampling=SamplingParams(max_tokens=8), logprobs=3, **options)
        return runtime.handle_request(request)


FAMILIES = [
    "alpamayo",
    "internvl",
    "llama",
    "mimo",
    "nemotron_h",
    "qwen2",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_asr",
    "qwen3_omni",
    "qwen3_vl",
]


def test_the_page_of_models_has_a_row_for_each_family():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = page[page.index("## Families") : page.index("## Policies")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == [each.name for each in families()]


def test_the_folders_are_the_families():
    assert [family.name for family in families()] == FAMILIES


def test_an_unknown_model_type_lists_the_known_ones(checkpoint, tmp_path):
    known = "alpamayo1_5, alpamayo_r1, internvl, llama, mimo, mistral, nemotron_h, "
    known = f"model_type 'seed_oss': supported: {known}"
    with pytest.raises(
        ValueError,
        match=rf"config\.json: {known}qwen2, qwen2_5_omni, qwen2_5_omni_thinker, qwen2_5_vl, qwen3, qwen3_5",
    ):
        export(checkpoint, tmp_path)
    with (
        registered(dataclasses.replace(SEED_OSS, model_types=("plain",))),
        pytest.raises(
            ValueError,
            match=f"{known}plain, qwen2, qwen2_5_omni, qwen2_5_omni_thinker, qwen2_5_vl, qwen3, qwen3_5",
        ),
    ):
        export(checkpoint, tmp_path)


@pytest.mark.only_on("cpu", reason="the export is the same for every device")
def test_a_family_outside_of_the_package_is_exported_and_answers(checkpoint, tmp_path):
    with registered(SEED_OSS):
        config = export(checkpoint, tmp_path / "engine", lm_head_input=True, max_lora_rank=4)
    assert config.model_type == "seed_oss"
    assert (config.vision, config.audio, config.action) == (None, None, None)
    assert [part.name for part in inspect(tmp_path / "engine", verify=True).parts] == ["llm"]
    assert (tmp_path / "engine" / "llm" / "model.cuda.onnx").is_file()
    assert len(answer(tmp_path / "engine").token_ids) > 0


@pytest.mark.only_on("cpu", reason="the export is the same for every device")
def test_the_shared_layers_give_a_new_family_lora_inputs(checkpoint, tmp_path):
    with registered(SEED_OSS):
        export(checkpoint, tmp_path / "plain")
        export(checkpoint, tmp_path / "lora", max_lora_rank=4)
    plain = answer(tmp_path / "plain").logprobs
    assert answer(tmp_path / "lora").logprobs == plain
    # write_adapter reads the sizes from text_config
    text = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = tmp_path / "sizes"
    sizes.mkdir()
    write_json(sizes / "config.json", {"text_config": {**text, "head_dim": 16, "num_hidden_layers": 3}})
    write_adapter(tmp_path / "lora" / "lora" / "a", sizes, prefix="base_model.model.model.", r=4)
    assert answer(tmp_path / "lora", lora="a").logprobs != plain
