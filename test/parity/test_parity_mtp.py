# SPDX-License-Identifier: Apache-2.0
"""MTP heads of every layout against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from draft_graph import Draft  # noqa: E402
from mtp_reference import MiMoReference, Qwen35Reference  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.mtp_checkpoints import WRITERS  # noqa: E402
from fixtures.requests_for_tests import request as make_request  # noqa: E402

REFERENCES = {"qwen3_5": Qwen35Reference, "mimo": MiMoReference}
# MtpModel makes norms of the class of the last layer's.
CHANGES = {"num_hidden_layers": 3, "layer_types": [*["linear_attention"] * 2, "full_attention"]}
CASES = [(family, seed) for family in WRITERS for seed in range(6)]
LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 96, "max_draft_tree_size": 16}
TOLERANCE, LEVELS = 1e-3, 7
TEXT = "go to the red box and stop in front of it"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def exported(request, tmp_path_factory):
    """A checkpoint, its engine, configuration and reference."""
    family, seed = request.param
    folder = tmp_path_factory.mktemp(family)
    changes = CHANGES if family == "qwen3_5" else {}
    checkpoint = WRITERS[family](folder / "checkpoint", seed, **changes)
    config = export(checkpoint, folder / "engine", **LIMITS)
    assert config.draft.kind == "mtp"
    with torch.no_grad():
        yield checkpoint, folder / "engine", config, REFERENCES[family](checkpoint)


@torch.no_grad()
def test_the_states_are_those_after_the_last_norm_of_the_base(exported):
    _, engine, _, reference = exported
    drafting = SpecDecodeDraftingConfig(1, 3, 4, "mtp")
    with LLMInferenceRuntime(engine, "cpu", prefix_cache_bytes=0, drafting=drafting) as runtime:
        answer = runtime.handle_request(make_request(TEXT, max_tokens=1))
        ids = torch.tensor([runtime.base_model_input_token_ids[0]])
        found = runtime.pipeline.runner.fused_hidden_states(1, answer.prompt_tokens).array
        expected = reference.states(ids).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_a_prompt_and_the_levels_of_a_chain_have_the_reference_s_logits_and_states(exported):
    checkpoint, engine, config, reference = exported
    rng, prompt = np.random.default_rng(0), 13
    ids = rng.integers(0, 256, prompt + LEVELS + 1)
    (table,) = (
        values.astype(np.float32)
        for name, values in load_file(checkpoint / "model.safetensors").items()
        if name.endswith("embed_tokens.weight")
    )
    draft, embeds = Draft(engine, config), table[ids[1:]]
    states = reference.states(torch.tensor(ids[None, :prompt]))
    seen = np.tri(prompt + LEVELS, dtype=bool)

    def check(start: int, stop: int, states) -> torch.Tensor:
        last = [stop - start - 1]
        rows = states[0].numpy()
        positions = np.arange(start, stop)
        logits, following = draft.run(
            embeds[start:stop], rows, positions, seen[start:stop, :stop], start, last
        )
        expected = reference.run(
            states, torch.tensor(ids[None, start + 1 : stop + 1]), torch.tensor(positions[None])
        )
        assert expected[0].std() > 0.1
        np.testing.assert_allclose(logits, expected[0][0, last], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(following, expected[1][0], atol=TOLERANCE, rtol=0)
        return expected[1][:, -1:]

    newest = check(0, prompt, states)
    for level in range(LEVELS):
        newest = check(prompt + level, prompt + level + 1, newest)
