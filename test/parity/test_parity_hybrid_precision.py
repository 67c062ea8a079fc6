# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in half precision, and transformers in the same, against fp32.

In fp16 ONNX Runtime computes on the CPU; in bf16 a reference that rounds the result of every operator.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import Graph, LanguageModel  # noqa: E402
from rounded_graph import RoundedGraph  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.lowering.standard.recurrent import CHUNK  # noqa: E402
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint  # noqa: E402

# Both round the same activations to the same type at about the same places, so their errors are alike in
# size: the root mean squares of ours were 0.42 to 1.11 times those of transformers in 24 cases.
FACTOR = 1.5
PROMPT, STEPS = 2 * CHUNK + 5, 6
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
PRECISIONS = {"fp16": (torch.float16, Graph), "bf16": (torch.bfloat16, RoundedGraph)}


def logits_of(checkpoint, dtype, ids) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0].float().numpy()


def rope_rows(checkpoint, count: int) -> list[np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).model
    if not hasattr(model, "rotary_emb"):
        return []
    rows = model.rotary_emb(torch.zeros(1), torch.arange(count)[None])
    return [half[..., : half.shape[-1] // 2].numpy() for half in rows]


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(found - expected))))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("family", WRITERS)
def test_a_hybrid_is_as_near_to_fp32_as_transformers_is(tmp_path, family, seed, precision):
    checkpoint = WRITERS[family](tmp_path / "checkpoint", seed)
    export(checkpoint, tmp_path / "engine", precision=precision)
    dtype, open_graph = PRECISIONS[precision]
    model = LanguageModel(tmp_path / "engine", open_graph=open_graph)
    count = PROMPT + STEPS
    ids = np.random.default_rng(seed).integers(0, len(model.embedding), count)
    rows, found = rope_rows(checkpoint, count), []
    for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, count))]:
        embeds = model.embedding[ids[start:stop]]
        found.append(model.step(embeds, *(row[:, start:stop] for row in rows), wanted=range(stop - start)))
    expected = logits_of(checkpoint, torch.float32, ids)
    ours = error(np.concatenate(found), expected)
    theirs = error(logits_of(checkpoint, dtype, ids), expected)
    print(f"{family} {seed} {precision}: {ours:.1e}, transformers {theirs:.1e}")
    assert 0 < ours < FACTOR * theirs
