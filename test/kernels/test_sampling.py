# SPDX-License-Identifier: Apache-2.0
"""Sampling, against transformers' logits processors where they are installed."""

import numpy as np
import pytest

from edgellm_ros.kernels import DraftTree

VOCABULARY = 50


def sample_many(side, row, count, seen=(), **parameters) -> np.ndarray:
    """Count how often each token is sampled from logits [V] in `count` steps.

    `seen`: tokens seen before each step.
    """
    marks = np.zeros((1, len(row)), bool)
    marks[0, list(seen)] = True
    state = side.sampling_state(1, len(row), **parameters)
    counts = np.zeros(len(row), int)
    for _ in range(count):
        side.device.upload(state.seen, marks)
        counts[side.sample(row[None], state)[0]] += 1
    return counts


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(3).standard_normal(VOCABULARY).astype(np.float32) * 2


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals(side, logits):
    assert side.sample(logits[None], side.sampling_state(1, VOCABULARY, temperature=0.0)) == [
        int(logits.argmax())
    ]
    logits[[7, 30]] = logits.max() + 1
    assert side.sample(logits[None], side.sampling_state(1, VOCABULARY, temperature=0.0)) == [7]


@pytest.mark.slow
def test_tokens_are_sampled_as_often_as_their_probability_says(side, logits):
    counts = sample_many(side, logits, 4000, temperature=1.5)
    expected = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum() * 4000
    likely = expected > 20
    assert np.abs(counts - expected)[likely].max() < 5 * np.sqrt(expected[likely].max())
    np.testing.assert_allclose(counts[likely], expected[likely], atol=5 * np.sqrt(expected.max()))


def test_the_position_advances_so_that_each_token_has_its_own_random_number(side, logits):
    state = side.sampling_state(1, VOCABULARY, temperature=2.0)
    sampled = [side.sample(logits[None], state)[0] for _ in range(20)]
    assert side.read(state.position).tolist() == [20]
    assert len(set(sampled)) > 5
    assert [
        side.sample(logits[None], again)[0]
        for again in [side.sampling_state(1, VOCABULARY, temperature=2.0)]
        for _ in range(20)
    ] == sampled


def test_another_seed_samples_other_tokens(side, logits):
    samples = []
    for seed in (1, 2):
        state = side.sampling_state(1, VOCABULARY, temperature=2.0, seed=seed)
        samples.append([side.sample(logits[None], state)[0] for _ in range(20)])
    assert samples[0] != samples[1]


def test_top_k_one_is_greedy(side, logits):
    assert side.sample(logits[None], side.sampling_state(1, VOCABULARY, temperature=5.0, top_k=1)) == [
        int(logits.argmax())
    ]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow(side, logits):
    assert side.sample(logits[None] * 1e4, side.sampling_state(1, VOCABULARY, temperature=1e-30)) == [
        int(logits.argmax())
    ]


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
def test_filters_keep_the_tokens_that_transformers_keeps_with_the_same_probabilities(
    side, logits, parameters
):
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

    counts = sample_many(side, logits, 3000, seen, **parameters)
    assert not counts[expected == 0].any()
    assert counts[expected > 15].all()
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(3000 * 0.25))


def test_a_sampled_token_counts_as_seen(side, logits):
    state = side.sampling_state(1, VOCABULARY, temperature=0.0, repetition_penalty=1e6)
    logits = np.abs(logits)
    first, second = side.sample(logits[None], state)[0], side.sample(logits[None], state)[0]
    assert [first, second] == np.argsort(-logits)[:2].tolist()
    assert np.flatnonzero(side.read(state.seen)[0]).tolist() == sorted([first, second])


def test_rows_use_their_own_parameters_and_do_not_influence_each_other(side, logits):
    batch = np.stack([logits, logits[::-1], logits])
    state = side.sampling_state(3, VOCABULARY, temperature=[0.0, 1.5, 1.5], top_k=[0, 3, 0], seed=[0, 4, 9])
    together = [side.sample(batch, state) for _ in range(10)]
    alone = [
        side.sampling_state(1, VOCABULARY, temperature=0.0),
        side.sampling_state(1, VOCABULARY, temperature=1.5, top_k=3, seed=4),
        side.sampling_state(1, VOCABULARY, temperature=1.5, seed=9),
    ]
    for row, state in enumerate(alone):
        assert [side.sample(batch[row : row + 1], state)[0] for _ in range(10)] == [
            step[row] for step in together
        ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_give_no_token(side, logits, value):
    broken = logits.copy()
    broken[4] = value
    assert side.sample(np.stack([logits, broken]), side.sampling_state(2, VOCABULARY))[1] == -1


def test_log_probabilities_are_a_log_softmax_in_falling_order(side, logits):
    ids, values = side.log_probabilities(logits[None], [17], 3)
    expected = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    assert ids[0].tolist() == [*np.argsort(-logits)[:3].tolist(), 17]
    np.testing.assert_allclose(values[0], expected[ids[0]], rtol=1e-6)


def chi_squared_limit(cells: int) -> float:
    """Return what Pearson's statistic exceeds with probability 1e-4.

    The approximation is that of Wilson and Hilferty.
    """
    free = cells - 1
    return free * (1 - 2 / (9 * free) + 3.719 * np.sqrt(2 / (9 * free))) ** 3


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{"temperature": 1.5}, {"temperature": 1.2, "top_k": 3}], ids=str)
def test_pairs_of_tokens_with_drafts_are_as_frequent_as_without(side, rules):
    """Pearson's chi-squared test of the first two tokens, of many seeds.

    The logits of a token depend on the token before. Each draft has the tokens 1 and 4: after these the first
    round samples both tokens, after others a second round samples the second one.
    """
    seeds, vocabulary = 20_000, 6
    logits = np.random.default_rng(3).standard_normal((vocabulary + 1, vocabulary)).astype(np.float32)
    logits, first = logits[:-1], logits[-1]
    scores = np.vstack([logits, first]).astype(np.float64) / rules["temperature"]
    if "top_k" in rules:
        scores[scores < np.sort(scores, axis=-1)[:, [-rules["top_k"]]]] = -np.inf
    likely = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)

    def sample_round(numbers, roots, position) -> tuple[np.ndarray, np.ndarray]:
        """Sample up to two tokens for each seed, beginning at the logits roots [B,V]."""
        batch = len(numbers)
        fields = ([0, 1, 4], [-1, 0, 0], [0, 1, 1])
        tree = DraftTree(*(side.tensor(np.tile(field, (batch, 1))) for field in fields))
        state = side.sampling_state(batch, vocabulary, seed=numbers, position=position, **rules)
        sampled, tokens, path = (side.tensor(np.zeros((batch, 2), np.int64)) for _ in range(3))
        offered = side.tensor(np.zeros(batch, np.int64))
        children = np.broadcast_to(logits[[1, 4]], (batch, 2, vocabulary))
        nodes = side.tensor(np.concatenate([roots[:, None], children], axis=1))
        side.trees.sample_path(nodes, state, tree, None, sampled, tokens, path, offered)
        return side.read(tokens), side.read(offered)

    counts = np.zeros((vocabulary, vocabulary))
    for numbers in np.split(np.arange(seeds), 10):
        tokens, offered = sample_round(numbers, np.tile(first, (len(numbers), 1)), 0)
        alone = np.flatnonzero(offered == 1)
        assert 0 < len(alone) < len(numbers)
        tokens[alone, 1] = sample_round(numbers[alone], logits[tokens[alone, 0]], 1)[0][:, 0]
        np.add.at(counts, tuple(tokens.T), 1)
    expected = seeds * likely[-1][:, None] * likely[:-1]
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert expected[possible].min() > 5
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < chi_squared_limit(possible.sum())
