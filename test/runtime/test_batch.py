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

    def resume(self, row, sequence) -> None:
        self.rows[row] = sequence.name


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
    return [SimpleNamespace(name=name, adapter=None, held=False) for name in names]


def order(batch) -> str:
    return "".join(sequence.name for sequence in batch.sequences)


LEFT = {"": "abcd", "a": "dbc", "b": "adc", "d": "abc", "ad": "cb", "bc": "ad", "abd": "c", "abcd": ""}


@pytest.mark.parametrize(("leaving", "staying"), LEFT.items())
def test_the_last_sequence_takes_the_row_of_an_evicted_one_in_every_state(batch, states, leaving, staying):
    members = sequences("abcd")
    batch.admit(members)
    batch.evict([sequence for sequence in members if sequence.name in leaving])
    assert order(batch) == staying
    for state in states:
        assert state.rows == dict(enumerate(staying))


OF_ADAPTERS = {"a": "cbedf", "d": "abcef", "f": "abcde", "bd": "acef"}


@pytest.mark.parametrize(("leaving", "staying"), OF_ADAPTERS.items())
def test_sequences_of_one_adapter_stay_beside_each_other(states, leaving, staying):
    batch = Batch(states, max_size=6)
    members = sequences("abcdef")
    for sequence, adapter in zip(members, ["x", "x", "x", "y", "y", "z"], strict=True):
        sequence.adapter = adapter
    batch.admit(members)
    batch.evict([sequence for sequence in members if sequence.name in leaving])
    assert order(batch) == staying
    assert states[0].rows == dict(enumerate(staying))


def test_a_held_sequence_does_not_take_a_row_of_a_step(states):
    batch, members = Batch(states, max_size=5), sequences("abc")
    batch.begin_answers(batch.admit(members))
    batch.admit(sequences("d"))  # its prompt is computed
    batch.evict(members[:1])
    assert order(batch) == "cbd"
    assert [sequence.name for sequence in batch.stepping] == ["c", "b"]


def test_each_row_moves_at_most_once(batch, states):
    members = sequences("abcde")
    batch.admit(members)
    batch.evict(members[:2])
    assert order(batch) == "dec"
    assert states[0].moves == 2


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


def test_a_sequence_admitted_at_a_row_moves_that_of_the_row_to_the_end(batch, states):
    batch.admit(sequences("abc"))
    assert batch.admit(sequences("d"), at=1) == range(1, 2)
    assert order(batch) == "adcb"
    assert batch.admit(sequences("e"), at=0) == range(1)
    assert order(batch) == "edcba"
    assert states[0].rows == dict(enumerate("edcba"))


def test_held_sequences_at_the_end_have_no_part_in_a_step(states):
    of_prompts, of_answers = states
    batch = Batch([of_prompts], 6, of_answers=[of_answers])
    members = sequences("abcd")
    batch.begin_answers(batch.admit(members))
    for sequence in members[1::2]:
        batch.hold(sequence)
    assert [sequence.name for sequence in batch.stepping] == list("abc")
    assert of_answers.rows == {0: "a", 2: "c"}
    batch.resume(members[1])
    batch.hold(members[2])
    batch.gather([members[0], members[1]])
    assert [sequence.name for sequence in batch.stepping] == list("ab")
    batch.admit(sequences("e"))
    assert [sequence.name for sequence in batch.stepping] == list("ab")
    assert of_prompts.rows == dict(enumerate("abcde"))


@pytest.mark.parametrize("wanted", ["", "d", "bd", "dc", "bcd", "abcd", "ca"])
def test_gathered_sequences_take_the_first_rows(batch, states, wanted):
    members = sequences("abcd")
    batch.admit(members)
    batch.gather([sequence for sequence in members if sequence.name in wanted])
    assert set(order(batch)[: len(wanted)]) == set(wanted)
    for state in states:
        assert state.rows == dict(enumerate(order(batch)))


def test_in_a_full_batch_no_row_is_gathered(batch, states):
    members = sequences("abcde")
    batch.admit(members)
    batch.gather(members[3:])
    assert order(batch) == "abcde"
    assert states[0].moves == 0


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
