# SPDX-License-Identifier: Apache-2.0
"""The exported graphs, alone in ONNX Runtime, against transformers and PyTorch.

In fp32 they are within 1e-3, and greedy tokens are equal.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_graphs import Encoders, Graph, LanguageModel  # noqa: E402

TOLERANCE = 1e-3
SYSTEM = "You drive a robot."
TEXTS = ["go to the red box", "What do you see?"]


@pytest.fixture(scope="module")
def image(thinker) -> np.ndarray:
    """Noise with large shapes in it, of a size that the processor need not change."""
    pixels = thinker.processor.size["shortest_edge"]
    width = {71680: 320}.get(pixels, 64)
    height = pixels // width
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (height // 16, width // 16, 3)).repeat(16, 0).repeat(16, 1)
    return np.clip(coarse + rng.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def language_model(engine) -> LanguageModel:
    return LanguageModel(engine)


@pytest.fixture(scope="module")
def run_vision(thinker, engine):
    return partial(Encoders(engine).vision, thinker)


@pytest.fixture(scope="module")
def prefill(thinker, engine, language_model):
    return partial(language_model.prefill, thinker, Encoders(engine))


def test_vision_rows_and_deepstack_rows_match(thinker, run_vision, image):
    prompt = thinker.prompt(TEXTS[0], image=image)
    expected = thinker.vision(prompt)
    found = run_vision(prompt)
    assert len(found) == len(expected) == 3
    for rows, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, reference, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [(96, 32), (32, 96), (80, 80)])
def test_vision_matches_on_other_image_shapes(thinker, run_vision, size):
    """One graph is for all shapes: grids of these images have other proportions."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    prompt = thinker.prompt(TEXTS[0], image=image)
    for rows, reference in zip(run_vision(prompt), thinker.vision(prompt), strict=True):
        np.testing.assert_allclose(rows, reference, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("with_image", [True, False], ids=["image", "text"])
@pytest.mark.parametrize("text", TEXTS)
def test_prefill_logits_match_at_every_position(thinker, prefill, image, text, with_image):
    prompt = thinker.prompt(text, SYSTEM, image if with_image else None)
    found = prefill(prompt, wanted=range(prompt.input_ids.shape[1]))
    np.testing.assert_allclose(found, thinker.prefill_logits(prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_decoding_matches_token_by_token(thinker, prefill, language_model, image, text):
    prompt = thinker.prompt(text, SYSTEM, image)
    answer = thinker.answer(prompt, max_tokens=24)
    logits = [prefill(prompt)]
    for token in answer.token_ids:
        position = torch.full((3, 1, 1), language_model.length + answer.delta)
        logits.append(language_model.step(language_model.embedding[[token]], *thinker.rope_rows(position)))
    logits = np.concatenate(logits[:-1])
    assert logits.argmax(-1).tolist() == answer.token_ids
    np.testing.assert_allclose(logits, answer.logits, atol=TOLERANCE, rtol=0)
    for i, (keys, values) in enumerate(answer.cache):
        found_keys, found_values = language_model.kv(i)
        np.testing.assert_allclose(found_keys, keys, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(found_values, values, atol=TOLERANCE, rtol=0)


def test_velocities_match_for_several_requests_and_samples(thinker, expert, engine, image):
    """Two requests have three trajectories each, at times from noise to action.

    The caches have different lengths, and other values behind the filled rows; some of those rows are read
    too.
    """
    graph = Graph(engine / "action" / "model.onnx")
    capacity, samples = graph.inputs["key_cache_0"].shape[2], 3
    steps, actions = graph.inputs["trajectory"].shape[1:]
    answers = [
        thinker.answer(thinker.prompt(text, image=image), max_tokens=4 + 3 * i)
        for i, text in enumerate(TEXTS)
    ]
    lengths = [answer.cache[0][0].shape[1] for answer in answers]
    assert lengths[0] != lengths[1]

    shape = graph.inputs["key_cache_0"].shape
    trajectory = torch.randn(samples, steps, actions, generator=torch.Generator().manual_seed(0))
    for answer, length in zip(answers, lengths, strict=True):
        inputs = {"kv_length": [length], "cache_rows": np.arange(min(length + 7, capacity))}
        for i, pair in enumerate(answer.cache):
            for kind, rows in zip(("key", "value"), pair, strict=True):
                inputs[f"{kind}_cache_{i}"] = np.full(shape, 9.0)
                inputs[f"{kind}_cache_{i}"][0, :, :length] = rows
        start = length + answer.delta
        positions = (start + torch.arange(steps)).expand(3, 1, -1)
        inputs["rope_cos"], inputs["rope_sin"] = thinker.rope_rows(positions)
        for time in (0.0, 0.1, 0.35, 0.9):
            found = graph(trajectory=trajectory, time=np.full(graph.inputs["time"].shape, time), **inputs)
            for row in range(samples):
                expected = expert.velocity(trajectory[row], time, answer.cache, start)
                np.testing.assert_allclose(found["velocity"][row], expected, atol=TOLERANCE, rtol=0)
