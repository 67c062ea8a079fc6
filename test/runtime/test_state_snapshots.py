# SPDX-License-Identifier: Apache-2.0
"""Where states are saved, which of them are found, and which make room."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Page, Prefix
from edgellm_ros.runtime.prefix.state_snapshots import SPACING, StateSnapshots, save_points
from edgellm_ros.runtime.prefix_reuse import fits, prefill_parts

ROWS, LAYERS = 4, 2


def points(tokens, computed_from=0, shared=0, encoder_ends=(), places=8) -> list[int]:
    return save_points(tokens, computed_from, shared, encoder_ends, places)


class TestSavePoints:
    def test_a_short_prompt_that_shares_nothing_has_none(self):
        assert points(SPACING) == points(300, shared=PAGE - 1) == []

    def test_a_prompt_that_leaves_an_earlier_one_has_one_at_the_start_of_the_page(self):
        assert points(300, shared=3 * PAGE + 7) == [3 * PAGE]
        assert points(300, shared=3 * PAGE) == [3 * PAGE]

    def test_an_image_that_ends_after_the_start_of_the_page_is_not_cut(self):
        assert points(300, shared=3 * PAGE + 7, encoder_ends=[40, 3 * PAGE + 5, 200]) == [3 * PAGE + 5]
        assert points(300, shared=3 * PAGE + 7, encoder_ends=[40, 3 * PAGE - 5]) == [3 * PAGE]

    def test_less_than_a_page_after_the_reused_tokens_is_not_worth_a_run(self):
        assert points(300, computed_from=70, shared=3 * PAGE + 7) == []
        assert points(300, computed_from=64, shared=3 * PAGE + 7) == [3 * PAGE]

    def test_a_long_prompt_has_more_at_a_fixed_spacing(self):
        assert points(3 * SPACING, places=16) == [SPACING, 2 * SPACING]
        assert points(3 * SPACING, computed_from=SPACING, places=16) == [2 * SPACING]
        assert points(2 * SPACING + 5, shared=100) == [96, SPACING]

    def test_they_take_at_most_a_quarter_of_the_pool(self):
        assert points(9 * SPACING, places=8) == [4 * SPACING, 8 * SPACING]
        assert points(9 * SPACING, places=4) == [8 * SPACING]
        assert points(9 * SPACING, places=3) == []

    def test_a_pool_for_one_state_has_only_that_at_the_end(self):
        assert points(3 * SPACING, shared=200, places=1) == []


def sequence(reused: int, points: list[int], tokens: int) -> SimpleNamespace:
    return SimpleNamespace(reused_tokens=reused, state_points=points, token_ids=[7] * tokens)


class TestPrefillParts:
    def test_all_prompts_end_in_the_last_run(self):
        parts = prefill_parts([sequence(0, [32, 64, 100], 100), sequence(20, [90], 90)], 320)
        assert parts == [
            [range(0, 32), range(20, 20)],
            [range(32, 64), range(20, 20)],
            [range(64, 100), range(20, 90)],
        ]

    def test_a_prompt_without_points_is_one_run(self):
        assert prefill_parts([sequence(0, [], 5), sequence(3, [], 9)], 320) == [[range(0, 5), range(3, 9)]]

    def test_a_long_piece_is_several_runs_of_which_the_first_is_the_short_one(self):
        runs = [run for (run,) in prefill_parts([sequence(3, [50], 137)], 40)]
        assert [(run.start, run.stop) for run in runs] == [(3, 10), (10, 50), (50, 57), (57, 97), (97, 137)]

    def test_no_run_has_one_token_only(self):
        assert prefill_parts([sequence(0, [], 81)], 40) == [[range(0, 2)], [range(2, 41)], [range(41, 81)]]

    def test_a_padded_run_of_a_long_prompt_fits_where_the_prompt_does(self):
        for tokens in range(3, 200):
            for other in range(1, 41):
                parts = prefill_parts([sequence(0, [], tokens), sequence(0, [], other)], 40)
                assert fits(parts, 1 + max(tokens, other))  # an answer needs a slot, too

    def test_padding_needs_slots_too(self):
        parts = prefill_parts([sequence(0, [32], 100), sequence(0, [], 120)], 320)  # 120 tokens after 32
        assert fits(parts, 152)
        assert not fits(parts, 151)
        assert not fits([[range(9, 10)]], 10)  # a run has at least two tokens


@pytest.fixture
def state(device, kernels) -> RecurrentState:
    config = RecurrentConfig("mamba2", LAYERS, num_heads=2, key_dim=3, value_dim=4, conv_dim=5, conv_kernel=4)
    return RecurrentState(device, kernels, config, max_batch_size=ROWS, conv_dtype=np.dtype(np.float16))


@pytest.fixture
def snapshots(device, state) -> StateSnapshots:
    return StateSnapshots(device, state, 2 * state.row_bytes)


def fill(device, state, row: int, value: float) -> None:
    """Set all values of a row."""
    for tensor in state.committed:
        values = device.download(tensor)
        values[:, row] = value
        device.upload(tensor, values)


def value_of(device, state, row: int) -> float:
    """Return the value of a row; all of its values must be the same."""
    (value,) = {float(v) for tensor in state.committed for v in device.download(tensor)[:, row].ravel()}
    return value


def prefix(length: int) -> Prefix:
    return Prefix(tuple(Page(i, (), None) for i in range(-(-length // PAGE))), length)


class TestPool:
    def test_a_prompt_reuses_the_longest_prefix_with_a_state(self, device, state, snapshots):
        keys = list(range(100))
        for value, length in ((10, 40), (30, 70)):
            fill(device, state, 0, value)
            snapshots.insert("", keys[:length], 0)
        found = snapshots.match("", keys, prefix(99))
        assert (found.length, len(found.pages)) == (70, 3)
        assert snapshots.match("", keys, prefix(69)).length == 40
        assert snapshots.match("", keys, prefix(99), longest=69).length == 40
        assert snapshots.match("", keys, prefix(39)).length == 0
        assert snapshots.match("another adapter", keys, prefix(99)).length == 0
        assert snapshots.match("", [*keys[:30], -5, *keys[31:]], prefix(99)).length == 0
        snapshots.load("", keys, 40, 3)
        assert [value_of(device, state, row) for row in range(ROWS)] == [30, 0, 0, 10]

    def test_the_least_recently_used_state_makes_room(self, snapshots):
        for first in (1, 2):
            snapshots.begin_batch()
            snapshots.insert("", [first, 5], 0)
        snapshots.begin_batch()
        snapshots.match("", [1, 5, 6], prefix(2))
        snapshots.insert("", [3, 5], 0)
        assert [snapshots.has("", [first, 5]) for first in (1, 2, 3)] == [True, False, True]
        assert len(snapshots) == 2

    def test_prompts_of_a_large_batch_do_not_replace_the_state_that_they_share(self, snapshots):
        snapshots.insert("", [1, 5], 0)
        snapshots.begin_batch()
        snapshots.match("", [1, 5, 6], prefix(2))
        for last in (6, 7, 8, 9):
            snapshots.insert("", [1, 5, last], 0)
        assert snapshots.has("", [1, 5])
        assert snapshots.has("", [1, 5, 9])

    def test_a_state_that_later_prompts_will_need_outlives_one_at_the_end_of_a_prompt(self, snapshots):
        snapshots.insert("", [1], 0, expected=True)
        snapshots.insert("", [1, 2], 0)
        snapshots.insert("", [1, 3], 0)
        assert [snapshots.has("", keys) for keys in ([1], [1, 2], [1, 3])] == [True, False, True]

    def test_a_pinned_state_makes_no_room(self, snapshots):
        snapshots.insert("", [1], 0)
        snapshots.pin("", [1])
        for last in (2, 3, 4):
            snapshots.begin_batch()
            snapshots.insert("", [last], 0)
        assert [snapshots.has("", [key]) for key in (1, 2, 3, 4)] == [True, False, False, True]
        assert snapshots.free_places == 1
        snapshots.pin("", [4])
        snapshots.insert("", [5], 0)
        assert not snapshots.has("", [5])
        snapshots.pin("", [1], -1)
        snapshots.insert("", [5], 0)
        assert [snapshots.has("", [key]) for key in (1, 4, 5)] == [False, True, True]

    def test_states_of_a_removed_adapter_are_dropped(self, snapshots):
        snapshots.insert("a", [1], 0)
        snapshots.insert("b", [1], 0)
        snapshots.remove("a")
        assert not snapshots.has("a", [1])
        assert snapshots.has("b", [1])

    def test_a_budget_below_one_state_stores_nothing(self, device, state):
        snapshots = StateSnapshots(device, state, state.row_bytes - 1)
        snapshots.insert("", [1, 2], 0)
        assert snapshots.match("", [1, 2, 3], prefix(2)).length == 0
