# SPDX-License-Identifier: Apache-2.0
"""Host and CUDA kernels of speculative decoding agree on random cases.

Without a GPU the CUDA sources are compiled for the host.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.kernels import DraftTable, DraftTree, RopeTable
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.kernels.tree_protocol import entries
from fixtures.device_under_test import Side, host_side
from fixtures.draft_levels import begin_accepted, begin_level
from fixtures.random_trees import random_tree

pytestmark = pytest.mark.slow
DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 heads


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def candidates(place: Side, levels: list[np.ndarray], token_of_logit=None) -> list[np.ndarray]:
    """Return tokens, scores, parents and nodes of a table as arrays on the host.

    `levels`: logits [B,R,Vd] of each level. The nodes of a level are its first ones, so that a difference of
    scores has no influence on them.
    """
    batch, top_k = len(levels[0]), levels[1].shape[1] if len(levels) > 1 else 5
    table = DraftTable.zeros(place.device, batch, top_k, len(levels))
    nodes = np.zeros(table.nodes.shape, np.int64)
    for level in range(1, len(levels)):
        nodes[:, level - 1] = np.arange(entries(top_k, level - 1), entries(top_k, level))[:top_k]
    place.device.upload(table.nodes, nodes)
    mapping = None if token_of_logit is None else place.tensor(token_of_logit)
    for level, logits in enumerate(levels, 1):
        place.trees.add_candidates(place.tensor(logits), mapping, table, level)
    return [place.read(tensor) for tensor in vars(table).values()]


def assert_same_candidates(side: Side, levels: list[np.ndarray], token_of_logit=None) -> np.ndarray:
    expected, found = (candidates(place, levels, token_of_logit) for place in (host_side(), side))
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-6, atol=1e-6)
    for theirs, ours in ((expected[0], found[0]), *zip(expected[2:], found[2:], strict=True)):
        np.testing.assert_array_equal(ours, theirs)
    return found[1]


@pytest.mark.parametrize(
    ("batch", "top_k", "vocabulary", "scale"),
    [
        (1, 10, DRAFT_VOCABULARY, 3.0),
        (1, 2, 50_001, 1.0),
        *((2, 8, 4097, scale) for scale in (0.0, 1.0, 30.0)),
        *((4, 3, 50, scale) for scale in (0.0, 30.0)),
        (1, 1, 1, 1.0),
        (1, 32, 33, 1.0),
    ],
)
def test_the_same_candidates_are_added(cuda_side, rng, batch, top_k, vocabulary, scale):
    levels = [
        (rng.standard_normal((batch, rows, vocabulary)) * scale).astype(np.float32)
        for rows in (1, top_k, top_k)
    ]
    assert_same_candidates(cuda_side, levels, rng.permutation(vocabulary * 3)[:vocabulary])


def test_the_same_candidates_are_added_where_many_are_equally_likely(cuda_side, rng):
    levels = [rng.integers(-4, 3, (2, rows, 9000)).astype(np.float32) for rows in (1, 7)]
    levels[0][rng.random(levels[0].shape) < 0.1] = -0.0
    assert_same_candidates(cuda_side, levels)


def test_logits_in_half_precision_have_the_candidates_of_the_same_values(cuda_side, rng):
    levels = [rng.standard_normal((2, rows, 9000)).astype(np.float16) * 3 for rows in (1, 4, 4)]
    levels[1][0, 1, ::2] *= np.float16(2**-20)  # subnormal numbers
    levels[2][:, :2, 100] = 65504, -65504
    levels[2][0, 2, 5], levels[2][1, 3, 7] = np.inf, np.nan
    for side in (host_side(), cuda_side):
        expected = candidates(side, [logits.astype(np.float32) for logits in levels])
        for ours, theirs in zip(candidates(side, levels), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_have_no_candidates_on_both_sides(cuda_side, rng, value):
    levels = [rng.standard_normal((3, rows, 9000)).astype(np.float32) for rows in (1, 4, 4)]
    levels[0][0, 0, 8999] = levels[1][1, 2, 4100] = levels[2][2, 0, [3, 5000]] = value
    scores = assert_same_candidates(cuda_side, levels)
    assert np.isneginf(scores[0, 1:]).all()
    assert np.isneginf(scores[1, 5 + 8 : 5 + 12]).all()


def test_other_rows_have_no_influence_on_a_row(cuda_side, rng):
    levels = [(rng.standard_normal((3, rows, 9000)) * 2).astype(np.float32) for rows in (1, 6)]
    together = candidates(cuda_side, levels)
    for row in range(3):
        alone = candidates(cuda_side, [logits[row : row + 1] for logits in levels])
        for ours, theirs in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[row])


@pytest.mark.parametrize(
    ("capacity", "size", "dtype"), [(64, 16, np.float16), (61, 16, np.float32), (40, 3, np.float16)]
)
def test_accepted_tokens(agree, rng, capacity, size, dtype):
    tokens, counts, lengths = rng.integers(-2, 1100, (3, 7)), [0, 3, 8], rng.integers(0, capacity, 3)
    deltas = rng.integers(-9, 9, 3) / 4

    def run(place: Side):
        found = begin_accepted(place, tokens, counts, lengths, capacity, size, dtype=dtype, deltas=deltas)
        return map(place.tensor, found.values())

    agree(run)


def random_table(rng, batch: int, top_k: int, levels: int, distinct: int) -> list[np.ndarray]:
    """Return tokens, scores, parents and nodes of a table with few different scores."""
    count = entries(top_k, levels)
    scores, parents = np.zeros((batch, count), np.float32), np.full((batch, count), -1)
    nodes = np.zeros((batch, levels - 1, top_k), np.int64)
    steps = -rng.integers(0, distinct, (batch, count)).astype(np.float32) / 4
    steps[rng.random(steps.shape) < 0.02] = -np.inf
    for row in range(batch):
        for level in range(1, levels + 1):
            start, stop = entries(top_k, level - 1), entries(top_k, level)
            above = [0] if level == 1 else nodes[row, level - 2]
            parents[row, start:stop] = np.repeat(above, top_k)
            scores[row, start:stop] = scores[row, parents[row, start:stop]] + steps[row, start:stop]
            if level < levels:
                order = np.argsort(-scores[row, start:stop], kind="stable")[:top_k]
                nodes[row, level - 1] = start + order
    return [rng.integers(0, 900, (batch, count)), scores, parents, nodes]


TABLES = [(1, 10, 6), (4, 8, 3), (2, 1, 5), (3, 3, 1), (1, 32, 3), (1, 9, 12)]


@pytest.mark.parametrize("distinct", [1, 4, 1000])
@pytest.mark.parametrize(("batch", "top_k", "levels"), TABLES)
def test_nodes_and_trees(agree, rng, batch, top_k, levels, distinct):
    arrays = random_table(rng, batch, top_k, levels, distinct)
    lengths, last_tokens = rng.integers(0, 30, (2, batch))
    newest, deltas = rng.integers(-1, 7, (batch, 1)), rng.integers(-9, 9, batch) / 4
    shapes = {1: (64, 16, np.float16), 4: (61, 16, np.float32), 1000: (40, 3, np.float16)}
    capacity, values, dtype = shapes[distinct]
    count = arrays[1].shape[1]

    def run(place: Side):
        table = DraftTable(*map(place.tensor, arrays))
        outs = []
        for level in range(1, levels):
            place.device.upload(table.nodes, np.where(np.arange(levels - 1)[:, None] < level, arrays[3], 0))
            found = begin_level(
                place, table, level, lengths, capacity, values, dtype, deltas=deltas, newest=newest
            )
            outs += map(place.tensor, found.values())
        for size in {1, min(2, count), min(60, count), min(count, 255)}:
            tree = DraftTree(*(place.tensor(np.full((batch, size), 77)) for _ in range(3)))
            place.trees.select_tree(table, place.tensor(last_tokens), tree)
            outs += vars(tree).values()
        return [*outs, table.nodes]

    agree(run)


@pytest.mark.parametrize("capacity", [40, 64, 97, 2048])
@pytest.mark.parametrize(("batch", "size"), [(1, 60), (4, 9), (2, 1), (1, 256)])
def test_masks_and_rotary_rows_of_trees(agree, rng, batch, size, capacity):
    tree_of = [random_tree(rng, size, 3000) for _ in range(batch)]
    fields = [np.stack(rows) for rows in zip(*tree_of, strict=True)]
    lengths = rng.integers(0, capacity + 2, batch)
    deltas = rng.integers(-60, 20, batch).astype(np.float32)
    rope = rng.standard_normal((2, 2200, 64)).astype(np.float32)
    frequencies = rng.uniform(0, 1, 64).astype(np.float32)

    def run(place: Side):
        tree = DraftTree(*(place.tensor(values) for values in fields))
        table = RopeTable(*(place.tensor(values) for values in (*rope, frequencies)))
        mask = place.tensor(np.ones((batch, 1, size, capacity), bool))
        rows = [place.tensor(np.zeros((batch, size, 64), np.float32)) for _ in range(2)]
        device_lengths = place.tensor(lengths)
        place.trees.tree_mask(tree, device_lengths, mask)
        place.trees.tree_rope_rows(table, device_lengths, place.tensor(deltas), tree.depths, *rows)
        return mask, *rows

    agree(run)


RULES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.4},
    {"temperature": 0.5, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.5, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(("batch", "vocabulary"), [(1, 9000), (4, 700), (3, 2)])
def test_the_same_paths_are_sampled(agree, rng, batch, vocabulary, rules):
    """A few likely tokens make long paths; the trees have many of them."""
    size, most = 40, 7
    likely = rng.integers(0, vocabulary, 3)
    logits = rng.standard_normal((batch, size, vocabulary)).astype(np.float32)
    logits[:, :, likely] += 9
    logits[-1, 5:, vocabulary // 2] = np.nan
    trees = [random_tree(rng, size, 3 * size) for _ in range(batch)]
    parents, depths = (np.stack([tree[place] for tree in trees]) for place in (1, 2))
    vocab_map = rng.permutation(vocabulary) + 5
    tokens = vocab_map[rng.choice(likely, (batch, size))]
    seen = rng.random((batch, vocabulary)) < 0.1

    def run(place: Side):
        tree = DraftTree(*(place.tensor(values) for values in (tokens, parents, depths)))
        state = place.sampling_state(batch, vocabulary, seen, seed=MAX_SEED, position=1000, **rules)
        outs = []
        for _ in range(2):  # the second launch finds the scratch memory of the first
            outs += [place.tensor(np.full((batch, most), 77)) for _ in range(3)]
            outs.append(place.tensor(np.full(batch, 77)))
            place.trees.sample_path(place.tensor(logits), state, tree, place.tensor(vocab_map), *outs[-4:])
        return outs

    agree(run)


def test_the_same_paths_are_sampled_along_a_chain_as_long_as_the_tree(agree, rng):
    logits = np.zeros((2, 16, 3000), np.float32)
    tokens = rng.integers(0, 3000, (2, 16))
    np.put_along_axis(logits[:, :-1], tokens[:, 1:, None], 9, axis=-1)
    places = np.broadcast_to(np.arange(16), (2, 16))

    def run(place: Side):
        tree = DraftTree(*(place.tensor(values) for values in (tokens, places - 1, places)))
        state = place.sampling_state(2, 3000, temperature=[0.0, 0.3], top_k=20, seed=[1, 2])
        outs = [place.tensor(np.full((2, 16), 77)) for _ in range(3)]
        outs.append(place.tensor(np.full(2, 77)))
        place.trees.sample_path(place.tensor(logits), state, tree, None, *outs)
        return outs

    agree(run)


@pytest.mark.only_on("cpu", reason="the number of multiprocessors of a GPU is fixed")
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_the_same_paths_are_sampled_with_any_number_of_blocks(double, rng, multiprocessors):
    from doubles.cuda_double import double_side

    logits = (rng.standard_normal((1, 6, 12_000)) * 3).astype(np.float32)
    paths = []
    for place in (host_side(), double_side(double, multiprocessors)):
        state = place.sampling_state(1, 12_000, temperature=0.2, top_p=0.9, min_p=0.001, seed=5)
        steps = place.sampling_state(1, 12_000, temperature=0.2, top_p=0.9, min_p=0.001, seed=5)
        expected = [place.sample(row[None], steps)[0] for row in logits[0]]
        chain = np.arange(6)[None]
        tree = DraftTree(*map(place.tensor, (np.array([[3, *expected[:-1]]]), chain - 1, chain)))
        outs = [place.tensor(np.full((1, 6), 77)) for _ in range(3)] + [place.tensor(np.full(1, 77))]
        place.trees.sample_path(place.tensor(logits), state, tree, None, *outs)
        assert place.read(outs[0])[0].tolist() == expected
        paths.append(expected)
    assert paths[0] == paths[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8], ids=str)
@pytest.mark.parametrize("head_size", [128, 20, 3])
def test_kv_rows_and_states(agree, rng, dtype, head_size):
    before = (rng.standard_normal((4, 5, 2, 40, head_size)) * 50).astype(dtype)
    states = (rng.standard_normal((3, 12, head_size)) * 50).astype(dtype)
    path = np.sort([rng.permutation(30)[:11] for _ in range(3)], axis=-1)
    lengths, counts = np.array([0, 4, 20]), np.array([11, 0, 9])
    index = rng.integers(-2, 15, (3, 6))
    places = np.array([rng.permutation(np.arange(-2, 15))[:6] for _ in range(3)])

    def run(place: Side):
        cache, out = place.tensor(before), place.tensor(np.zeros((3, 6, head_size), dtype))
        place.trees.move_cache_rows(cache, 1, *map(place.tensor, (lengths, path, counts)))
        place.trees.take_rows(place.tensor(states), place.tensor(index), out)
        put = place.tensor(states)
        place.trees.put_rows(out, place.tensor(places), put)
        return cache, out, put

    agree(run)


@pytest.mark.parametrize("distinct", [1, 2, 5, 50])
@pytest.mark.parametrize(("most", "least"), [(4, 2), (1, 1), (9, 3)])
def test_histories(agree, rng, distinct, most, least):
    before = rng.integers(0, distinct, (16, 1500))
    before[rng.random(before.shape) < 0.05] = -1
    lengths = np.array([0, 1, 2, 3, 1499, 1500, 1501, *rng.integers(4, 1490, 9)])
    tokens, counts = rng.integers(0, distinct, (16, 7)), rng.integers(0, 8, 16)

    def run(place: Side):
        history, device_lengths = place.tensor(before), place.tensor(lengths)
        tree = DraftTree(*(place.tensor(np.full((16, 33), 77)) for _ in range(3)))
        place.trees.append_history(place.tensor(tokens), place.tensor(counts), device_lengths, history)
        place.trees.find_continuation(history, device_lengths, most, least, tree)
        return history, *vars(tree).values()

    agree(run)


@pytest.mark.parametrize(
    ("top_k", "levels", "message"),
    [(33, 1, "expected at most 256 levels and 32 candidates"), (30, 11, "expected at most 8192")],
)
def test_tables_beyond_the_limits_are_refused(cuda_side, top_k, levels, message):
    table = DraftTable.zeros(cuda_side.device, 1, top_k, levels)
    logits = cuda_side.tensor(np.zeros((1, 1, 100), np.float32))
    with pytest.raises(ValueError, match=message):
        cuda_side.trees.add_candidates(logits, None, table, 1)


def test_trees_beyond_the_limit_are_refused(cuda_side):
    tree = DraftTree.zeros(cuda_side.device, 1, 257)
    mask = cuda_side.tensor(np.zeros((1, 1, 257, 300), bool))
    with pytest.raises(ValueError, match="a tree of 257 nodes, expected at most 256"):
        cuda_side.trees.tree_mask(tree, cuda_side.tensor([0]), mask)
