# SPDX-License-Identifier: Apache-2.0
"""Sampling on the host, against transformers' own logits processors where they are installed."""

import numpy as np
import pytest

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import SamplingState, load_kernels

KERNELS = load_kernels(CpuDevice())
VOCABULARY = 50


def make_state(batch=1, vocabulary=VOCABULARY, **parameters) -> SamplingState:
    defaults = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int64),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition_penalty": (1.0, np.float32),
        "seed": (0, np.uint64),
        "step": (0, np.int64),
    }
    rows = {
        name: Tensor.from_array(
            np.broadcast_to(np.array(parameters.get(name, value), dtype), (batch,)).copy()
        )
        for name, (value, dtype) in defaults.items()
    }
    return SamplingState(**rows, seen=Tensor.from_array(np.zeros((batch, vocabulary), bool)))


def sample(logits, state) -> list[int]:
    """One token per row of logits [B, V]."""
    logits = np.ascontiguousarray(logits, np.float32)
    tokens = Tensor.from_array(np.zeros(len(logits), np.int64))
    KERNELS.sample(Tensor.from_array(logits[:, None]), state, tokens)
    return tokens.array.tolist()


def draw_many(row, count, **parameters) -> np.ndarray:
    """How often each token is drawn from logits [V] in `count` steps."""
    state = make_state(vocabulary=len(row), **parameters)
    counts = np.zeros(len(row), int)
    for _ in range(count):
        state.seen.array[:] = False
        counts[sample(row[None], state)[0]] += 1
    return counts


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(3).standard_normal(VOCABULARY).astype(np.float32) * 2


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals(logits):
    assert sample(logits[None], make_state(temperature=0.0)) == [int(logits.argmax())]
    logits[[7, 30]] = logits.max() + 1
    assert sample(logits[None], make_state(temperature=0.0)) == [7]


def test_tokens_are_drawn_as_often_as_their_probability_says(logits):
    counts = draw_many(logits, 4000, temperature=1.5)
    expected = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum() * 4000
    likely = expected > 20
    assert np.abs(counts - expected)[likely].max() < 5 * np.sqrt(expected[likely].max())
    np.testing.assert_allclose(counts[likely], expected[likely], atol=5 * np.sqrt(expected.max()))


def test_the_step_advances_so_that_each_token_has_its_own_random_number(logits):
    state = make_state(temperature=2.0)
    drawn = [sample(logits[None], state)[0] for _ in range(20)]
    assert state.step.array.tolist() == [20]
    assert len(set(drawn)) > 5
    assert [
        sample(logits[None], again)[0] for again in [make_state(temperature=2.0)] for _ in range(20)
    ] == drawn


def test_another_seed_draws_other_tokens(logits):
    draws = []
    for seed in (1, 2):
        state = make_state(temperature=2.0, seed=seed)
        draws.append([sample(logits[None], state)[0] for _ in range(20)])
    assert draws[0] != draws[1]


def test_top_k_one_is_greedy(logits):
    assert sample(logits[None], make_state(temperature=5.0, top_k=1)) == [int(logits.argmax())]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow(logits):
    assert sample(logits[None] * 1e4, make_state(temperature=1e-30)) == [int(logits.argmax())]


@pytest.mark.parity
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.8, "top_k": 8},
        {"repetition_penalty": 0.6, "top_p": 0.6},
    ],
    ids=str,
)
def test_filters_keep_the_tokens_that_transformers_keeps_with_the_same_probabilities(logits, parameters):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    seen = [3, 8, int(logits.argmax()), 20]
    scores = torch.tensor(logits)[None]
    for name, processor in [
        ("repetition_penalty", transformers.RepetitionPenaltyLogitsProcessor),
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ]:
        if name in parameters:
            scores = processor(parameters[name])(torch.tensor([seen]), scores)
    expected = scores.softmax(-1)[0].numpy() * 3000

    state = make_state(**parameters)
    counts = np.zeros(VOCABULARY)
    for _ in range(3000):
        state.seen.array[:] = False
        state.seen.array[0, seen] = True
        counts[sample(logits[None], state)[0]] += 1
    assert not counts[expected == 0].any()
    assert counts[expected > 15].all()
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(3000 * 0.25))


def test_a_drawn_token_counts_as_seen(logits):
    state = make_state(temperature=0.0, repetition_penalty=1e6)
    logits = np.abs(logits)
    first, second = sample(logits[None], state)[0], sample(logits[None], state)[0]
    assert [first, second] == np.argsort(-logits)[:2].tolist()
    assert np.flatnonzero(state.seen.array[0]).tolist() == sorted([first, second])


def test_rows_follow_their_own_rules_and_do_not_touch_each_other(logits):
    batch = np.stack([logits, logits[::-1], logits])
    state = make_state(3, temperature=[0.0, 1.5, 1.5], top_k=[0, 3, 0], seed=[0, 4, 9])
    together = [sample(batch, state) for _ in range(10)]
    alone = [
        make_state(temperature=0.0),
        make_state(temperature=1.5, top_k=3, seed=4),
        make_state(temperature=1.5, seed=9),
    ]
    for row, state in enumerate(alone):
        assert [sample(batch[row : row + 1], state)[0] for _ in range(10)] == [step[row] for step in together]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_give_no_token(logits, value):
    broken = logits.copy()
    broken[4] = value
    assert sample(np.stack([logits, broken]), make_state(2))[1] == -1


def test_log_probabilities_are_those_of_a_softmax_in_falling_order(logits):
    ids, values = (Tensor.from_array(np.zeros((1, 4), dtype)) for dtype in (np.int64, np.float32))
    KERNELS.log_probabilities(
        Tensor.from_array(logits[None, None]), Tensor.from_array(np.array([17])), ids, values
    )
    expected = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    assert ids.array[0].tolist() == [*np.argsort(-logits)[:3].tolist(), 17]
    np.testing.assert_allclose(values.array[0], expected[ids.array[0]], rtol=1e-6)
