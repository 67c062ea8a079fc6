# SPDX-License-Identifier: Apache-2.0
"""Layers in 4 bits against the dequantised checkpoint: logits and tokens in fp16.

Decode steps run in the engine and in the fused kernels; without a GPU these are their doubles in NumPy.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytestmark = [
    pytest.mark.parity,
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused decoding"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dequantized import GROUP, Agreement, GreedyAnswer, answer, compare, write_dequantized  # noqa: E402
from text_families import reference_logits  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures import on_device  # noqa: E402
from fixtures.decoder_checkpoint import write_decoder_checkpoint  # noqa: E402
from fixtures.fused_decoding import SIZES, fused_on_host  # noqa: E402

TOLERANCE = 2e-2  # relative
TOKENS = 10
PLACES = ("red box", "green ball", "table", "door", "blue cone", "wall", "lamp", "white box", "ramp", "chair")
ORDERS = ("go to the {}", "wait beside the {}", "do you see a {}?", "turn to the {} and stop", "not the {}")
PROMPTS = [order.format(place) for place in PLACES for order in ORDERS]  # 50


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of the engines `int4` and `plain`, and transformers' model.

    The model has the dequantised weights.
    """
    root = tmp_path_factory.mktemp("int4")
    sizes = {**SIZES, "hidden_size": GROUP, "intermediate_size": 2 * GROUP, "tie_word_embeddings": False}
    checkpoint = write_decoder_checkpoint(root / "checkpoint", "qwen3", **sizes)
    dequantized = write_dequantized(checkpoint, root / "dequantized")
    export(checkpoint, root / "int4", precision="fp16", quantize="int4", group_size=GROUP)
    export(dequantized, root / "plain", precision="fp16")
    model = transformers.AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)
    return root, model.eval()


@pytest.fixture(scope="module", params=["engine", pytest.param("fused", marks=pytest.mark.kernel_doubles)])
def agreement(request, exported, runtime_device) -> Agreement:
    root, model = exported
    requests = [LLMGenerationRequest(each, sampling=SamplingParams(max_tokens=TOKENS)) for each in PROMPTS]
    answers = {}
    for name in ("int4", "plain"):
        on_host = fused_on_host() if on_device.chosen == "cpu" else nullcontext()
        with on_host, LLMInferenceRuntime(root / name, runtime_device, decode=request.param) as runtime:
            assert bool(runtime.fused_rows) == (request.param == "fused")
            answers[name] = answer(runtime, requests)
    assert len({token for each in answers["int4"] for token in each.tokens}) > len(PROMPTS)

    def reference(prompt: int, found: GreedyAnswer):
        return reference_logits(model, found.prompt + found.tokens)[len(found.prompt) - 1 : -1]

    found = compare(answers["int4"], answers["plain"], reference)
    print(f"decode={request.param}: {found}")
    return found


def test_logits_are_those_of_transformers_with_the_dequantised_weights(agreement):
    assert agreement.positions == len(PROMPTS) * TOKENS
    assert agreement.euclidean <= TOLERANCE
    assert agreement.maximum <= TOLERANCE


def test_tokens_are_those_of_the_dequantised_engine_but_for_ties(agreement):
    assert agreement.ties() == agreement.differences
    assert agreement.equal >= 0.9 * len(PROMPTS)  # else ties would hide a difference
