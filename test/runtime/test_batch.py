# SPDX-License-Identifier: Apache-2.0
"""Batch alone owns the order of rows: it opens, moves and closes all states alike."""

from types import SimpleNamespace

import pytest

from edgellm_ros.runtime.batch.batch import Batch


class Names:
    """A RowState that stores the name of the sequence of each row."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self.moves = 0

    def open(self, row, sequence) -> None:
        self.rows[row] = sequence.name

    def move(self, source, target) -> None:
        self.rows[target] = self.rows[source]
        self.moves += 1

    def close(self, row) -> None:
        del self.rows[row]

    def commit(self, counts) -> None:
        self.committed = counts


@pytest.fixture
def states() -> list[Names]:
    return [Names(), Names()]


@pytest.fixture
def batch(states) -> Batch:
    return Batch(states, max_size=5)


def test_the_state_of_answers_is_opened_later(states):
    of_prompts, of_answers = states
    batch = Batch([of_prompts], 5, of_answers=[of_answers])
    batch.begin_answers(batch.admit(sequences("ab")))
    rows = batch.admit(sequences("cd"))
    assert list(of_prompts.rows.values()) == list("abcd")
    assert list(of_answers.rows.values()) == list("ab")
    batch.begin_answers(rows)
    assert of_answers.rows == of_prompts.rows


def sequences(names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=name) for name in names]


def order(batch) -> str:
    return "".join(sequence.name for sequence in batch.sequences)


@pytest.mark.parametrize("leaving", ["", "a", "b", "d", "ad", "bc", "abd", "abcd"])
def test_rows_behind_evicted_ones_move_up_in_every_state(batch, states, leaving):
    members = sequences("abcd")
    batch.admit(members)
    batch.evict([sequence for sequence in members if sequence.name in leaving])
    staying = "".join(sorted(set("abcd") - set(leaving)))
    assert order(batch) == staying
    for state in states:
        assert state.rows == dict(enumerate(staying))


def test_each_row_moves_at_most_once(batch, states):
    members = sequences("abcde")
    batch.admit(members)
    batch.evict(members[:2])
    assert states[0].moves == 3


def test_a_sequence_is_admitted_behind_the_others(batch, states):
    members = sequences("abc")
    assert batch.admit(members) == range(3)
    batch.evict(members[1:2])
    assert batch.admit(sequences("de")) == range(2, 4)
    assert states[1].rows == dict(enumerate("acde"))


def test_a_batch_that_does_not_fit_is_an_error_and_nothing_changes(batch, states):
    batch.admit(sequences("abc"))
    with pytest.raises(ValueError, match="a batch of 6 sequences; this engine takes at most 5"):
        batch.admit(sequences("def"))
    assert order(batch) == "abc"
    assert states[0].rows == dict(enumerate("abc"))


def test_evicting_a_sequence_that_is_not_in_the_batch_is_an_error(batch):
    batch.admit(sequences("ab"))
    with pytest.raises(ValueError, match="not in the batch"):
        batch.evict(sequences("a"))
    assert order(batch) == "ab"


def test_a_commit_reaches_every_state(batch, states):
    batch.commit("counts")
    assert [state.committed for state in states] == ["counts"] * 2


def test_clearing_closes_every_row(batch, states):
    batch.admit(sequences("abc"))
    batch.clear()
    assert order(batch) == ""
    assert states[0].rows == states[1].rows == {}
