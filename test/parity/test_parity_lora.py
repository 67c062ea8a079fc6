# SPDX-License-Identifier: Apache-2.0
"""Adapters in the engine against PEFT on the same checkpoint.

Logits are within 1e-3, and greedy tokens are equal.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from adapters import ADAPTERS, LOGPROBS, MAX_RANK, MAX_TOKENS, PROMPT, write_adapters  # noqa: E402
from engine_graphs import LanguageModel  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from peft_reference import PeftReference, taken_for_dense  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from thinker_reference import ThinkerReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.runtime.adapters.lora import LoraAdapters  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def directories(checkpoint, tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"), checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory, max_lora_rank=MAX_RANK)
    return directory


@pytest.fixture(scope="module")
def runtime(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, lora_dirs={}) as runtime:
        yield runtime


def logits_and_answer(reference, engine, directory):
    """Return the logits of the graph alone, and the reference's answer.

    The graph takes the reference's tokens.
    """
    bindings = EngineExecutor.open(engine / "llm" / "model.onnx", CpuDevice()).bindings.values()
    adapter = LoraAdapters(CpuDevice(), bindings, MAX_RANK).add("adapter", directory)
    model = LanguageModel(engine, {name: tensor.array for name, tensor in adapter.tensors.items()})
    prompt = reference.prompt(PROMPT)
    answer = reference.answer(prompt, MAX_TOKENS)
    positions, _ = reference.positions(prompt)
    logits = [model.step(model.embedding[prompt.input_ids[0].numpy()], *reference.rope_rows(positions))]
    for token in answer.token_ids[:-1]:
        position = torch.full((3, 1, 1), model.length + answer.delta)
        logits.append(model.step(model.embedding[[token]], *reference.rope_rows(position)))
    return np.concatenate(logits), answer


def assert_same(reference, engine, runtime, name, directory):
    runtime.add_lora(name, directory)
    logits, answer = logits_and_answer(reference, engine, directory)
    print(f"{name}: {np.abs(logits - answer.logits.numpy()).max():.1e}")
    np.testing.assert_allclose(logits, answer.logits, atol=TOLERANCE, rtol=0)
    response = runtime.handle_request(
        LLMGenerationRequest(
            PROMPT, lora=name, sampling=SamplingParams(max_tokens=MAX_TOKENS), logprobs=LOGPROBS
        )
    )
    assert response.token_ids == answer.token_ids
    for entries, row in zip(response.logprobs, answer.logits.double().log_softmax(-1), strict=True):
        ids, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], atol=TOLERANCE, rtol=0)
    return answer


@pytest.mark.parametrize("kind", ADAPTERS)
def test_logits_and_greedy_tokens_match(checkpoint, directories, engine, runtime, kind):
    name = kind.replace(" ", "_")
    adapted = PeftReference(checkpoint, directories[kind])
    answer = assert_same(adapted, engine, runtime, name, directories[kind])
    base = ThinkerReference(checkpoint).answer(adapted.prompt(PROMPT), max_tokens=1)
    assert (answer.logits[0] - base.logits[0]).abs().max() > 0.1  # else it would say little


@pytest.mark.parametrize("wrapped", ["thinker", "its inner model", "its language model"])
def test_what_peft_saves_loads_as_it_is(checkpoint, engine, runtime, tmp_path, wrapped):
    """Whatever it had wrapped. PEFT starts with B = 0, so B is drawn."""
    reference = ThinkerReference(checkpoint)
    model = {
        "thinker": reference.model,
        "its inner model": reference.model.model,
        "its language model": reference.model.model.language_model,
    }[wrapped]
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=r"(.*language_model\.)?layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj"
    )
    with taken_for_dense(model):
        peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(std=0.3, generator=generator)
    peft.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"] is None
    name = wrapped.replace(" ", "_")
    assert_same(reference, engine, runtime, name, tmp_path)
    one_file = tmp_path / "adapter_model.safetensors"
    assert_same(reference, engine, runtime, f"{name}_file", one_file)


def test_the_adapters_that_a_checkpoint_brings_match(checkpoint, engine, runtime):
    """Those of the arena's checkpoint, which were trained: `german` and `cautious`."""
    directories = sorted(checkpoint.glob("lora/*"))
    if not directories:
        pytest.skip(f"{checkpoint} brings no adapters")
    for directory in directories:
        reference = PeftReference(checkpoint, directory)
        answer = assert_same(reference, engine, runtime, f"own_{directory.name}", directory)
        base = ThinkerReference(checkpoint).answer(reference.prompt(PROMPT), max_tokens=1)
        assert (answer.logits[0] - base.logits[0]).abs().max() > 0.1  # else it would say little


def test_a_batch_of_base_and_adapters_matches_row_by_row(checkpoint, directories, runtime):
    chosen = {"": None, "first": directories["rank 1"], "second": directories["rslora"]}
    for name in ("first", "second"):
        runtime.add_lora(name, chosen[name])
    responses = runtime.handle_request(
        [
            LLMGenerationRequest(PROMPT, lora=name, sampling=SamplingParams(max_tokens=MAX_TOKENS))
            for name in ("second", "", "first")
        ]
    )
    for name, response in zip(("second", "", "first"), responses, strict=True):
        reference = PeftReference(checkpoint, chosen[name]) if name else ThinkerReference(checkpoint)
        answer = reference.answer(reference.prompt(PROMPT), MAX_TOKENS)
        assert response.token_ids == answer.token_ids


def test_the_comparison_sees_a_wrong_scaling(checkpoint, directories, engine, tmp_path):
    """Else it would say little."""
    source = directories["patterns"]
    tensors = load_file(source / "adapter_model.safetensors")
    for key in tensors:
        if key.endswith("layers.1.self_attn.q_proj.lora_B.weight"):
            tensors[key] *= np.float32(1.1)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    logits, answer = logits_and_answer(PeftReference(checkpoint, source), engine, tmp_path)
    assert np.abs(logits - answer.logits.numpy()).max() > 10 * TOLERANCE
