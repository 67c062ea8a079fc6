# SPDX-License-Identifier: Apache-2.0
"""Block drafters of DFlash against transformers' arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import onnxruntime  # noqa: E402
from dflash_reference import DFlashReference  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.dflash_checkpoints import BLOCK, MASK_TOKEN, WRITERS  # noqa: E402
from fixtures.requests_for_tests import request as make_request  # noqa: E402

CASES = [(family, seed) for family in WRITERS for seed in range(6)]
LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 96, "max_draft_tree_size": 16}
TOLERANCE, ROUNDS = 1e-3, 5
TEXT = "go to the red box and stop in front of it"
DFLASH = SpecDecodeDraftingConfig(1, 7, 8, "dflash")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def exported(request, tmp_path_factory):
    """An engine, its configuration and reference."""
    family, seed = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = WRITERS[family](folder / "checkpoint", seed)
    config = export(checkpoint, folder / "engine", **LIMITS)
    assert config.draft.kind == "dflash"
    with torch.no_grad():
        yield folder / "engine", config, DFlashReference(checkpoint)


@torch.no_grad()
def test_the_states_are_those_after_the_drafter_s_layers_of_the_base(exported):
    engine, config, reference = exported
    with LLMInferenceRuntime(engine, "cpu", prefix_cache_bytes=0, drafting=DFLASH) as runtime:
        answer = runtime.handle_request(make_request(TEXT, max_tokens=1))
        ids = torch.tensor([runtime.base_model_input_token_ids[0]])
        outputs = runtime.pipeline.hidden_states.outputs
        found = outputs(1, answer.prompt_tokens, config.draft.base_state_layers)
        expected = reference.states(ids).numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(np.concatenate([each.array for each in found], -1), expected, atol=TOLERANCE)


@torch.no_grad()
def test_blocks_after_a_prompt_and_after_accepted_tokens_have_the_reference_s_logits(exported):
    engine, config, reference = exported
    rng, prompt = np.random.default_rng(0), 13
    drafter = Graphs(engine, config)
    ids = rng.integers(0, 256, prompt + 4 * ROUNDS + 1)
    states = reference.states(torch.tensor(ids[None]))
    table = reference.base.get_input_embeddings().weight.numpy()
    start, stop = 0, prompt
    for _ in range(ROUNDS):
        new, newest = states[:, start:stop], int(ids[stop])
        drafter.append(new.numpy(), start)
        logits = drafter.draft(table[[newest, *[MASK_TOKEN] * (BLOCK - 1)]][None], stop)
        expected = reference.run(new, newest, start).numpy()
        assert expected.std() > 0.1
        np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE, rtol=0)
        start, stop = stop, stop + int(rng.integers(1, 5))


class Graphs:
    """The two graphs of a drafter, run by ONNX Runtime, and their KV cache."""

    def __init__(self, engine, config) -> None:
        names = "context", "model"
        self._context, self._block = (onnxruntime.InferenceSession(engine / f"draft/{n}.onnx") for n in names)
        self._draft, capacity = config.draft, config.draft.cache_capacity(config.max_kv_cache_capacity)
        shape = (1, self._draft.num_key_value_heads, capacity, self._draft.head_dim)
        parts, layers = ("key", "value"), range(self._draft.num_layers)
        self._places = [(f"{part}_cache_{i}", f"present_{part}_{i}") for part in parts for i in layers]
        self._caches = {name: np.zeros(shape, np.float32) for name, _ in self._places}

    def append(self, states: np.ndarray, start: int) -> None:
        """Append rows of context: states [1,S,n*H]."""
        layers, rows = self._draft.base_state_layers, states.shape[1]
        each = np.split(states, len(layers), axis=-1)
        given = {f"hidden_states_{i}": part for i, part in zip(layers, each, strict=True)}
        outputs = [present for _, present in self._places]
        found = self._context.run(outputs, given | self._rows(start, rows))
        self._caches = {name: each for (name, _), each in zip(self._places, found, strict=True)}

    def draft(self, embeds: np.ndarray, start: int) -> np.ndarray:
        """Return the logits [1,S-1,V] of a block of embeddings [1,S,H]."""
        size = embeds.shape[1]
        ends, last = np.array([start + size]), np.arange(1, size)[None]
        given = {"inputs_embeds": embeds, "visible_rows": ends, "last_token_ids": last}
        return self._block.run(["logits"], given | self._rows(start, size))[0]

    def _rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        size = self._draft.head_dim
        angles = np.outer(np.arange(start, start + count), 10000.0 ** (-np.arange(0, size, 2) / size))
        cos, sin = (np.float32(part(angles))[None] for part in (np.cos, np.sin))
        return {"rope_cos": cos, "rope_sin": sin, "kv_write_index": np.array([start]), **self._caches}
