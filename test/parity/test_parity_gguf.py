# SPDX-License-Identifier: Apache-2.0
"""GGUF files with random weights against transformers, which dequantises them."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")

from gguf_reference import assert_same, load  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.draws import draws  # noqa: E402
from fixtures.gguf_files import ARCHITECTURES, QUANTISED, write_gguf  # noqa: E402
from fixtures.requests_for_tests import request  # noqa: E402

LIMITS = {"max_input_len": 256, "max_kv_cache_capacity": 512, "max_batch_size": 1}
KINDS = ("F32", "F16", *QUANTISED)
# By default each type with one architecture, in turns.
CASES = draws(
    list(zip(itertools.cycle(ARCHITECTURES), KINDS, strict=False)),
    list(itertools.product(ARCHITECTURES, KINDS)),
)
PROMPTS = ("in the other thing", "the inner tin", "{x: 1}\n\n  the")
TOKENS = 32


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_answers_of_random_models(tmp_path, architecture, kind):
    path = write_gguf(tmp_path / "model.gguf", architecture, kind, seed=0)
    config = export(path, tmp_path / "engine", **LIMITS)
    model = load(path)
    with LLMInferenceRuntime(tmp_path / "engine", prefix_cache_bytes=0) as runtime:
        for prompt in PROMPTS:
            one = request(prompt, max_tokens=TOKENS, logprobs=10)
            assert_same(runtime, model, one, config.stop_token_ids, 1e-3)
