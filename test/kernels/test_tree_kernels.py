# SPDX-License-Identifier: Apache-2.0
"""The kernels of speculative decoding, against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels import DraftTable, DraftTree, RopeTable, load_tree_kernels
from fixtures.device_under_test import Side
from fixtures.draft_levels import begin_accepted, begin_level, rope_table
from fixtures.random_trees import random_tree


@pytest.fixture
def side(each_side) -> Side:
    return each_side


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    distances = logits.astype(np.float64) - logits.max()
    return distances - np.log(np.exp(distances).sum())


def draft(side: Side, table: DraftTable, logits_of, token_of_logit=None) -> list[dict[str, np.ndarray]]:
    """Fill a table by level; return the draft's inputs on each level but the last.

    logits_of(level): logits [B,R,Vd] of the draft.
    """
    batch = table.tokens.shape[0]
    mapping = None if token_of_logit is None else side.tensor(token_of_logit, np.int64)
    runs = []
    for level in range(1, table.levels + 1):
        side.trees.add_candidates(side.tensor(logits_of(level), np.float32), mapping, table, level)
        if level < table.levels:
            runs.append(begin_level(side, table, level, np.zeros(batch, np.int64)))
    return runs


def random_logits(rng, batch: int, top_k: int, vocabulary: int):
    """Function that returns random logits of the draft for a level."""

    def of(level: int) -> np.ndarray:
        rows = 1 if level == 1 else top_k
        return (rng.standard_normal((batch, rows, vocabulary)) * 2).astype(np.float32)

    return of


def eagle_tree(logits_of, top_k: int, levels: int, size: int) -> list[tuple[tuple[int, ...], float]]:
    """Return paths and scores of the tree of EAGLE's `topK_genrate`, for one sequence.

    A path is the tokens from the root's child on. Source: SafeAILab/EAGLE, eagle/model/cnets.py.
    """
    found: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    level = [((), 0.0)]
    for depth in range(1, levels + 1):
        logits = logits_of(depth)
        candidates = []
        for row, (path, score) in enumerate(level):
            values = log_softmax(logits[0, row])
            best = sorted(range(len(values)), key=lambda token: (-values[token], token))[:top_k]
            candidates += [((*path, token), score + values[token]) for token in best]
        found += candidates
        level = sorted(candidates, key=lambda candidate: -candidate[1])[:top_k]
    return sorted(found, key=lambda candidate: -candidate[1])[:size]


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """Return the tokens on the way from the root to each node [M], without the root's."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize(
    ("top_k", "levels", "size"), [(8, 6, 60), (10, 4, 30), (3, 3, 22), (1, 5, 6), (4, 1, 5), (2, 2, 1)]
)
def test_the_tree_is_that_of_the_eagle_authors(side, rng, top_k, levels, size):
    logits = {}
    logits_of = random_logits(rng, 1, top_k, 50)
    for level in range(1, levels + 1):
        logits[level] = logits_of(level)
    table, tree = DraftTable.zeros(side.device, 1, top_k, levels), DraftTree.zeros(side.device, 1, size)
    draft(side, table, logits.__getitem__)
    side.trees.select_tree(table, side.tensor([400]), tree)
    tokens, parents, depths = (side.read(x)[0] for x in (tree.tokens, tree.parents, tree.depths))

    paths = paths_of(tokens, parents)
    assert tokens[0] == 400
    assert parents[0] == -1
    assert sorted(paths) == sorted(path for path, _ in eagle_tree(logits.__getitem__, top_k, levels, size))
    assert depths.tolist() == [len(path) for path in paths]
    assert (parents[1:] < np.arange(1, size)).all()


def test_the_nodes_of_a_level_come_with_the_rows_of_their_parents(side, rng):
    table = DraftTable.zeros(side.device, 2, 3, 3)
    runs = draft(side, table, random_logits(rng, 2, 3, 40))
    tokens, parents, scores, nodes = map(side.read, (table.tokens, table.parents, table.scores, table.nodes))
    for row in range(2):
        assert nodes[row, 0].tolist() == [1, 2, 3]
        assert runs[0]["states"][row].tolist() == [[0] * 4] * 3
        level = range(4, 13)
        assert nodes[row, 1].tolist() == sorted(level, key=lambda entry: -scores[row, entry])[:3]
        for place, entry in enumerate(nodes[row, 1]):
            [parent_row] = {*runs[1]["states"][row, place].astype(int)}
            assert nodes[row, 0, parent_row] == parents[row, entry]
            assert {*runs[1]["embeds"][row, place]} == {tokens[row, entry]}


def test_scores_are_sums_of_log_probabilities_of_mapped_tokens(side, rng):
    logits_of, token_of_logit = random_logits(rng, 1, 3, 40), rng.permutation(900)[:40]
    levels = {level: logits_of(level) for level in (1, 2)}
    table = DraftTable.zeros(side.device, 1, 3, 2)
    draft(side, table, levels.__getitem__, token_of_logit)
    tokens, scores, parents = (side.read(x)[0] for x in (table.tokens, table.scores, table.parents))
    assert (tokens[0], scores[0], parents[0]) == (-1, 0, -1)
    first = log_softmax(levels[1][0, 0])
    best = np.argsort(-first)[:3]
    assert tokens[1:4].tolist() == token_of_logit[best].tolist()
    np.testing.assert_allclose(scores[1:4], first[best], rtol=1e-5)
    for node in range(3):
        second = log_softmax(levels[2][0, node])
        children, place = np.argsort(-second)[:3], slice(4 + 3 * node, 7 + 3 * node)
        assert tokens[place].tolist() == token_of_logit[children].tolist()
        assert parents[place].tolist() == [1 + node] * 3
        np.testing.assert_allclose(scores[place], scores[1 + node] + second[children], rtol=1e-5)


def test_equally_likely_candidates_rank_by_their_place(side):
    table, tree = DraftTable.zeros(side.device, 1, 3, 2), DraftTree.zeros(side.device, 1, 7)
    draft(side, table, lambda level: np.zeros((1, 1 if level == 1 else 3, 9)))
    assert side.read(table.tokens)[0].tolist() == [-1] + 4 * [0, 1, 2]
    assert side.read(table.nodes)[0, 0].tolist() == [1, 2, 3]
    side.trees.select_tree(table, side.tensor([8]), tree)
    assert side.read(tree.tokens)[0].tolist() == [8, 0, 1, 2, 0, 1, 2]
    assert side.read(tree.parents)[0].tolist() == [-1, 0, 0, 0, 1, 1, 1]


def test_candidates_of_logits_that_are_not_finite_and_their_children_are_no_tokens(side):
    logits = {1: np.zeros((2, 1, 9)), 2: np.zeros((2, 3, 9))}
    logits[1][0, 0, 5] = np.nan
    logits[2][1, 1, 7] = np.inf
    table = DraftTable.zeros(side.device, 2, 3, 2)
    draft(side, table, logits.__getitem__)
    tokens, scores = side.read(table.tokens), side.read(table.scores)
    assert tokens[0].tolist() == [-1] * 13
    assert tokens[1].tolist() == [-1, 0, 1, 2, 0, 1, 2, -1, -1, -1, 0, 1, 2]
    assert np.isneginf(scores[0, 1:]).all()
    assert np.flatnonzero(np.isneginf(scores[1])).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("shape", "level", "message"),
    [
        ((1, 3, 9), 1, "level 1 of 3 with 3 rows of logits: expected 1 row for level 1"),
        ((1, 1, 9), 2, "level 2 of 3 with 1 rows of logits: expected .* 4 for each further level"),
        ((1, 4, 9), 4, "level 4 of 3"),
        ((1, 1, 3), 1, "4 candidates for each node of a draft with 3 tokens"),
    ],
)
def test_logits_that_do_not_fit_the_level_are_refused(side, shape, level, message):
    table = DraftTable.zeros(side.device, 1, 4, 3)
    with pytest.raises(ValueError, match=message):
        side.trees.add_candidates(side.tensor(np.zeros(shape, np.float32)), None, table, level)


def test_a_run_on_the_last_level_is_refused(side):
    table = DraftTable.zeros(side.device, 1, 4, 3)
    with pytest.raises(ValueError, match="a run of the draft on level 3 of 3"):
        begin_level(side, table, 3, [0])


def test_a_tree_larger_than_its_table_is_refused(side):
    table, tree = DraftTable.zeros(side.device, 1, 2, 2), DraftTree.zeros(side.device, 1, 8)
    with pytest.raises(ValueError, match="a tree of 8 nodes from a table of 7 entries"):
        side.trees.select_tree(table, side.tensor([0]), tree)


def test_kernels_of_trees_of_an_unknown_device_are_an_error():
    class Other:
        name, memory = "abacus", "beads"

    with pytest.raises(EngineError, match=r"'beads' \(device 'abacus'\)"):
        load_tree_kernels(Other())


def put_tree(side: Side, *fields: np.ndarray) -> DraftTree:
    return DraftTree(*(side.tensor(values, np.int64) for values in fields))


def chain(*tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    places = np.arange(len(tokens))
    return np.array([tokens]), places[None] - 1, places[None]


def sample_path(side: Side, logits, state, tree, most, vocab_map=None) -> dict[str, np.ndarray]:
    """Sample at most `most` tokens of each sequence."""
    batch = len(logits)
    outs = {name: side.tensor(np.full((batch, most), 99)) for name in ("sampled", "tokens", "path")}
    outs["offered"] = side.tensor(np.full(batch, 99))
    mapping = None if vocab_map is None else side.tensor(vocab_map)
    side.trees.sample_path(side.tensor(logits, np.float32), state, tree, mapping, **outs)
    return {name: side.read(out) for name, out in outs.items()}


RULES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.7},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_tokens_of_a_path_are_those_of_steps_without_a_draft(side, rng, rules):
    vocabulary, length = 50, 6
    logits = (rng.standard_normal((length, vocabulary)) * 2).astype(np.float32)
    seen = rng.random((1, vocabulary)) < 0.1
    for seed in range(2):
        steps = side.sampling_state(1, vocabulary, seen, seed=seed, position=11, **rules)
        expected = [side.sample(row[None], steps)[0] for row in logits]
        tree = put_tree(side, *chain(3, *expected[:-1]))
        state = side.sampling_state(1, vocabulary, seen, seed=seed, position=11, **rules)
        found = sample_path(side, logits[None], state, tree, length)
        assert found["tokens"][0].tolist() == found["sampled"][0].tolist() == expected
        assert found["path"][0].tolist() == list(range(length))
        assert found["offered"].tolist() == [length]
        np.testing.assert_array_equal(side.read(state.seen), seen)
        assert side.read(state.position).tolist() == [11]


def test_a_path_ends_where_no_child_has_the_token(side):
    logits = np.zeros((2, 4, 8), np.float32)
    logits[:, [0, 1, 2, 3], [5, 6, 7, 1]] = 9
    tokens, parents, depths = [[0, 4, 5, 6], [0, 2, 3, 4]], [[-1, 0, 0, 2]] * 2, [[0, 1, 1, 2]] * 2
    state = side.sampling_state(2, 8, temperature=0.0)
    found = sample_path(side, logits, state, put_tree(side, tokens, parents, depths), 3)
    assert found["tokens"].tolist() == [[5, 7, -1], [5, -1, -1]]
    assert found["path"].tolist() == [[0, 2, 2], [0, 0, 0]]
    assert found["offered"].tolist() == [2, 1]


def test_a_path_ends_at_logits_that_are_not_finite_also_if_a_child_has_no_token(side):
    logits = np.zeros((1, 3, 8), np.float32)
    logits[0, 0, 2] = np.nan
    state = side.sampling_state(1, 8, temperature=0.0)
    found = sample_path(side, logits, state, put_tree(side, *chain(4, -1, 0)), 3)
    assert found["tokens"].tolist() == [[-1, -1, -1]]
    assert found["offered"].tolist() == [1]


def test_a_path_has_at_most_as_many_tokens_as_its_outputs(side):
    logits = np.zeros((1, 5, 8), np.float32)
    logits[..., 6] = 9
    state = side.sampling_state(1, 8, temperature=0.0)
    found = sample_path(side, logits, state, put_tree(side, *chain(6, 6, 6, 6, 6)), 3)
    assert found["tokens"].tolist() == [[6, 6, 6]]
    assert found["path"].tolist() == [[0, 1, 2]]
    assert found["offered"].tolist() == [3]


def test_a_path_has_at_most_as_many_tokens_as_its_sequence_may_take(side):
    logits = np.zeros((3, 4, 8), np.float32)
    logits[..., 6] = 9
    state = side.sampling_state(3, 8, temperature=0.0, path_limit=[1, 2, 9])
    tree = put_tree(side, *(np.tile(field, (3, 1)) for field in chain(6, 6, 6, 6)))
    found = sample_path(side, logits, state, tree, 3)
    assert found["tokens"].tolist() == [[6, -1, -1], [6, 6, -1], [6, 6, 6]]
    assert found["path"].tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]
    assert found["offered"].tolist() == [1, 2, 3]


def test_the_first_of_two_children_with_the_same_token_counts(side):
    logits = np.zeros((1, 3, 8), np.float32)
    logits[..., 6] = 9
    tree = put_tree(side, [[1, 6, 6]], [[-1, 0, 0]], [[0, 1, 1]])
    found = sample_path(side, logits, side.sampling_state(1, 8, temperature=0.0), tree, 3)
    assert found["path"].tolist() == [[0, 1, 1]]


def test_a_path_compares_the_token_ids_of_a_smaller_vocabulary(side):
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, [0, 1, 2], [3, 0, 2]] = 9
    tree = put_tree(side, [[5, 3, 700]], [[-1, 0, 0]], [[0, 1, 1]])
    state = side.sampling_state(1, 4, temperature=0.0)
    found = sample_path(side, logits, state, tree, 3, vocab_map=np.array([100, 300, 500, 700]))
    assert found["sampled"].tolist() == [[3, 2, -1]]
    assert found["tokens"].tolist() == [[700, 500, -1]]
    assert found["path"].tolist() == [[0, 2, 2]]


def is_above(parents: np.ndarray, upper: int, node: int) -> bool:
    while node not in (upper, -1):
        node = int(parents[node])
    return node == upper


@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_a_node_sees_the_committed_rows_its_ancestors_and_itself(side, rng, size):
    fields = [np.stack(rows) for rows in zip(*(random_tree(rng, size, 300) for _ in range(3)), strict=True)]
    lengths, capacity = [0, 5, 17], 61
    out = side.tensor(np.ones((3, 1, size, capacity), bool))
    side.trees.tree_mask(put_tree(side, *fields), side.tensor(lengths), out)
    for row, length in enumerate(lengths):
        for node in range(size):
            expected = [
                slot < length or (slot < length + size and is_above(fields[1][row], slot - length, node))
                for slot in range(capacity)
            ]
            np.testing.assert_array_equal(side.read(out)[row, 0, node], expected)


def test_rope_rows_of_a_tree_follow_the_depths(side, rng):
    cos, sin = (side.tensor(rng.standard_normal((20, 8)), np.float32) for _ in "cs")
    table = RopeTable(cos, sin, side.tensor(rng.uniform(0, 1, 8), np.float32))
    cos, sin = (side.tensor(np.zeros((2, 4, 8), np.float32)) for _ in "cs")
    depths = side.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])
    side.trees.tree_rope_rows(table, side.tensor([5, 9]), side.tensor([0, -4], np.float32), depths, cos, sin)
    positions = [[5, 6, 6, 7], [5, 6, 7, 8]]
    np.testing.assert_array_equal(side.read(cos), side.read(table.cos)[positions])
    np.testing.assert_array_equal(side.read(sin), side.read(table.sin)[positions])


def test_a_node_of_the_draft_sees_the_committed_rows_its_ancestors_and_itself(side, rng):
    top_k, lengths, capacity = 3, [4, 0], 17
    table = DraftTable.zeros(side.device, 2, top_k, 4)
    draft(side, table, random_logits(rng, 2, top_k, 40))
    parents, nodes = side.read(table.parents), side.read(table.nodes)
    for level in (1, 2, 3):
        found = begin_level(side, table, level, lengths, capacity)
        for row, length in enumerate(lengths):
            slots = {
                int(entry): length + depth * top_k + place
                for depth in range(level)
                for place, entry in enumerate(nodes[row, depth])
            }
            for place in range(top_k):
                expected = np.arange(capacity) < length
                entry = int(nodes[row, level - 1, place])
                while entry > 0:
                    expected[slots[entry]] = True
                    entry = int(parents[row, entry])
                np.testing.assert_array_equal(found["mask"][row, 0, place], expected)


def test_the_first_level_continues_the_state_of_the_newest_token(side, rng):
    table = DraftTable.zeros(side.device, 3, 2, 2)
    draft(side, table, random_logits(rng, 3, 2, 40))
    found = begin_level(side, table, 1, [0, 0, 0], newest=[[3], [0], [9]])
    assert found["states"][:, :, 0].tolist() == [[3, 3], [0, 0], [4, 4]]


def test_the_nodes_of_a_level_follow_the_committed_rows(side, rng):
    table, rope, lengths = DraftTable.zeros(side.device, 2, 3, 4), rope_table(side), [5, 20]
    draft(side, table, random_logits(rng, 2, 3, 40))
    for level in (1, 2, 3):
        found = begin_level(side, table, level, lengths, rope=rope, deltas=[0, -4])
        positions = np.array([5, 16]) + level - 1
        for name in ("cos", "sin"):
            expected = np.repeat(side.read(getattr(rope, name))[positions][:, None], 3, axis=1)
            np.testing.assert_array_equal(found[name], expected)
        assert found["write_index"].tolist() == [length + 3 * (level - 1) for length in lengths]
        assert found["filled"].tolist() == [length + 3 * level for length in lengths]


def test_inputs_that_an_engine_lacks_are_left_out(side, rng):
    table = DraftTable.zeros(side.device, 1, 2, 2)
    draft(side, table, random_logits(rng, 1, 2, 40))
    everything = begin_level(side, table, 1, [3])
    for name in ("mask", "write_index", "filled"):
        found = begin_level(side, table, 1, [3], lacks=(name,))
        assert found.keys() == everything.keys() - {name}
        for other, values in found.items():
            np.testing.assert_array_equal(values, everything[other])


def test_accepted_tokens_follow_the_committed_rows(side):
    rope, lengths = rope_table(side), [5, 20]
    found = begin_accepted(side, [[7, 8, -1], [9, 2000, 3]], [2, 3], lengths, 40, rope=rope, deltas=[0, -4])
    assert found["embeds"][..., 0].tolist() == [[7, 8, 0], [9, 999, 3]]
    for row, first in enumerate((5, 16)):
        for name in ("cos", "sin"):
            expected = side.read(getattr(rope, name))[first : first + 3]
            np.testing.assert_array_equal(found[name][row], expected)
        slots = lengths[row] + np.arange(3)
        np.testing.assert_array_equal(found["mask"][row, 0], np.arange(40) <= slots[:, None])
    assert found["filled"].tolist() == [8, 23]


def test_the_newest_accepted_token_is_the_last_that_counts(side):
    found = begin_accepted(side, np.zeros((4, 3), np.int64), [0, 1, 3, 4], [1, 2, 3, 4])
    assert found["newest"].tolist() == [[0], [0], [2], [2]]


def test_inputs_that_an_engine_lacks_are_left_out_for_accepted_tokens(side):
    everything = begin_accepted(side, [[1, 2]], [2], [3])
    for name in ("mask", "filled"):
        found = begin_accepted(side, [[1, 2]], [2], [3], lacks=(name,))
        assert found.keys() == everything.keys() - {name}
        for other, values in found.items():
            np.testing.assert_array_equal(values, everything[other])


def test_a_candidate_without_a_token_has_the_first_embedding(side):
    logits = {1: np.full((1, 1, 9), np.nan), 2: np.zeros((1, 2, 9))}
    table = DraftTable.zeros(side.device, 1, 2, 2)
    runs = draft(side, table, logits.__getitem__)
    assert runs[0]["embeds"].tolist() == [[[0] * 4] * 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_kv_rows_of_every_rising_path_move_in_place(side, rng, dtype):
    size, length, capacity = 6, 3, 12
    paths = [(0, *rest) for count in range(size) for rest in combinations(range(1, size), count)]
    before = rng.standard_normal((2, len(paths) + 1, 2, capacity, 4)).astype(dtype)
    cache = side.tensor(before)
    path = np.array([(*nodes, *[nodes[-1]] * (size - len(nodes))) for nodes in paths])
    counts = [len(nodes) for nodes in paths]
    lengths = np.full(len(paths), length)
    side.trees.move_cache_rows(cache, 1, *map(side.tensor, (lengths, path, np.array(counts))))
    expected = before.copy()
    for row, nodes in enumerate(paths):
        slots = length + np.array(nodes)
        expected[:, 1 + row, :, length : length + len(nodes)] = before[:, 1 + row][:, :, slots]
    np.testing.assert_array_equal(side.read(cache), expected)


def test_rows_of_states_are_taken_by_index(side, rng):
    source = rng.standard_normal((2, 5, 7)).astype(np.float16)
    out = side.tensor(np.zeros((2, 3, 7), np.float16))
    side.trees.take_rows(side.tensor(source), side.tensor([[0, 4, 4], [3, 9, -2]]), out)
    expected = np.stack([source[0, [0, 4, 4]], source[1, [3, 4, 0]]])
    np.testing.assert_array_equal(side.read(out), expected)


def test_accepted_tokens_are_kept_with_the_states_of_their_path(side, rng):
    states = rng.standard_normal((2, 5, 7)).astype(np.float16)
    tokens, path = np.array([[9, 8, 7], [6, 5, 4]]), np.array([[0, 2, 4], [0, 1, 1]])
    kept = [side.tensor(np.zeros_like(each)) for each in (tokens, states[:, :3], tokens[:, 0])]
    given = side.tensor(tokens), side.tensor(states), side.tensor(path), side.tensor(np.array([3, 2]))
    lengths = side.tensor(np.array([20, 30]))
    side.trees.take_accepted(*given, *kept, lengths)
    found_tokens, found_states, found_counts = map(side.read, kept)
    np.testing.assert_array_equal(found_tokens, tokens)
    np.testing.assert_array_equal(found_states, np.stack([states[0, path[0]], states[1, path[1]]]))
    np.testing.assert_array_equal(found_counts, [3, 2])
    np.testing.assert_array_equal(side.read(lengths), [20, 30])


def test_a_sequence_without_accepted_tokens_keeps_those_that_it_had(side, rng):
    states, had = (rng.standard_normal((3, count, 7)).astype(np.float16) for count in (5, 2))
    tokens, path, counts = np.array([[9, 8], [6, 5], [3, 2]]), np.array([[0, 2]] * 3), np.array([0, 2, 0])
    given = map(side.tensor, (tokens, states, path, counts))
    kept = list(map(side.tensor, (tokens + 100, had, np.array([1, 1, 2]))))
    lengths = side.tensor(np.array([20, 30, 40]))
    side.trees.take_accepted(*given, *kept, lengths)
    found_tokens, found_states, found_counts = map(side.read, kept)
    np.testing.assert_array_equal(found_tokens, [[109, 108], [6, 5], [103, 102]])
    np.testing.assert_array_equal(found_states, np.stack([had[0], states[1, path[1]], had[2]]))
    np.testing.assert_array_equal(found_counts, [1, 2, 2])
    np.testing.assert_array_equal(side.read(lengths), [19, 30, 38])


def test_rows_of_states_are_put_by_index(side, rng):
    before = rng.standard_normal((2, 5, 7)).astype(np.float16)
    source = rng.standard_normal((2, 3, 7)).astype(np.float16)
    out = side.tensor(before)
    side.trees.put_rows(side.tensor(source), side.tensor([[0, 4, 2], [5, 3, -1]]), out)
    expected = before.copy()
    expected[0, [0, 4, 2]], expected[1, 3] = source[0], source[1, 1]
    np.testing.assert_array_equal(side.read(out), expected)


def continuation(side: Side, entries: list[int], size: int, most=3, least=2, capacity=32) -> list[int]:
    history = np.full((1, capacity), 900)
    history[0, : len(entries)] = entries
    tree = DraftTree.zeros(side.device, 1, size)
    side.trees.find_continuation(side.tensor(history), side.tensor([len(entries) - 1]), most, least, tree)
    assert side.read(tree.parents)[0].tolist() == list(range(-1, size - 1))
    assert side.read(tree.depths)[0].tolist() == list(range(size))
    return side.read(tree.tokens)[0].tolist()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 1, 2], [2, 3, 4, 5], id="one occurrence"),
        pytest.param([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [2, 4, 9, 1], id="the latest occurrence"),
        pytest.param([7, 1, 2, 3, 9, 8, 1, 2, 4, 7, 1, 2], [2, 3, 9, 8], id="the longest n-gram"),
        pytest.param([6, 7, 1, 2, 3, 8, 7, 1, 2, 4, 6, 7, 1, 2], [2, 4, 6, 7], id="no longer than most"),
        pytest.param([1, 2, 3, 4, 2], [2, -1, -1, -1], id="shorter than least"),
        pytest.param([5, 8, 8, 8], [8, 8, 8, 8], id="an occurrence that overlaps"),
        pytest.param([1, 2, 3, 1, 2], [2, 3, 1, 2], id="a history that ends and follows once more"),
        pytest.param([4], [4, -1, -1, -1], id="a single token"),
        pytest.param([-1, -1, 3, 9, -1, -1, 3], [3, -1, -1, -1], id="entries that are not text"),
        pytest.param([1, 2, -1, 4, 1, 2], [2, -1, 4, 1], id="a continuation that is not text"),
    ],
)
def test_the_chain_continues_as_after_the_occurrence(side, entries, expected):
    assert continuation(side, entries, 4) == expected


def test_an_n_gram_of_one_token_may_be_allowed(side):
    assert continuation(side, [1, 2, 3, 4, 2], 3, most=4, least=1) == [2, 3, 4]


def test_a_chain_without_a_place_for_the_newest_token_is_empty(side):
    tree = DraftTree.zeros(side.device, 1, 3)
    history = side.tensor([[5, 5, 5, 5]])
    side.trees.find_continuation(history, side.tensor([4]), 3, 1, tree)
    assert side.read(tree.tokens)[0].tolist() == [-1, -1, -1]


def test_the_last_new_token_becomes_the_newest_entry_of_the_history(side):
    history = side.tensor(np.zeros((4, 6), np.int64))
    tokens = side.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33], [41, 42, 43]])
    side.trees.append_history(tokens, side.tensor([2, 0, 3, 3]), side.tensor([4, 2, 6, 1]), history)
    assert side.read(history).tolist() == [
        [0, 0, 0, 11, 12, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 31, 32],
        [42, 43, 0, 0, 0, 0],
    ]
