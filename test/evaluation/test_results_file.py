# SPDX-License-Identifier: Apache-2.0
"""The results file: nothing counts twice, and nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import signal

import pytest

from edgellm_ros.evaluation.results_file import ResultsFile, read_results

OPTIONS = {"seed": 1, "engine": "ab"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "results.jsonl"


def outcome(value: int) -> dict:
    return {"result": value, "measured": {}}


def write(path, *items: int, options=OPTIONS) -> None:
    with ResultsFile(path, "arena", options) as file:
        for item in items:
            file.add(str(item), outcome(item))


def test_what_was_written_is_read(path):
    write(path, 3, 4)
    results = read_results(path)
    assert (results.kind, results.options) == ("arena", OPTIONS)
    assert results.finished == {"3": outcome(3), "4": outcome(4)}


def test_a_name_that_is_not_utf8_is_read_as_it_was(path):
    name, result = "f\udcfcr@12", {"result": {"name": "f\udcfcr \\ ü"}, "measured": {}}
    with ResultsFile(path, "bags", {"remap": name}) as file:
        file.add(name, result)
    results = read_results(path)
    assert (results.options, results.finished) == ({"remap": name}, {name: result})
    assert "ü" in path.read_text(encoding="utf-8")
    with ResultsFile(path, "bags", {"remap": name}) as file:
        assert dict(file.finished) == {name: result}


def test_an_item_counts_once(path):
    with ResultsFile(path, "arena", OPTIONS) as file:
        assert file.add("3", outcome(9))
        before = path.read_bytes()
        assert not file.add("3", outcome(9))
    assert path.read_bytes() == before


def test_an_interruption_during_the_write_keeps_the_outcome(path, monkeypatch):
    with ResultsFile(path, "arena", OPTIONS) as file:
        monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            file.add("3", outcome(3))
        assert dict(file.finished) == {"3": outcome(3)}
    assert read_results(path).finished == {"3": outcome(3)}


def test_an_evaluation_goes_on_where_it_was_interrupted(path):
    write(path, 3)
    with ResultsFile(path, "arena", OPTIONS) as file:
        assert dict(file.finished) == {"3": outcome(3)}
        file.add("4", outcome(4))
    assert list(read_results(path).finished) == ["3", "4"]


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_torn_last_line_is_ignored_and_removed(path, cut):
    write(path, 3)
    whole = path.read_bytes()
    write(path, 4)
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_results(path).finished) == ["3"]
    write(path)
    assert path.read_bytes() == whole


def test_a_torn_header_is_begun_again(path):
    write(path, 3)
    path.write_bytes(path.read_bytes()[:20])
    write(path, 4)
    assert list(read_results(path).finished) == ["4"]


def test_zeros_at_the_end_are_ignored(path):
    write(path, 3)
    with path.open("ab") as file:
        file.write(bytes(100) + b"\n")
    assert list(read_results(path).finished) == ["3"]


def test_damage_before_the_last_line_is_an_error(path):
    write(path, 3, 4)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:-3], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 is not one of an evaluation's results"):
        read_results(path)


@pytest.mark.parametrize("content", ["notes", "notes\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_something_else_is_left_alone(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match="line 1 is not one of an evaluation's results"):
        write(path, 3)
    assert path.read_text() == content


def test_results_with_other_options_are_refused(path):
    write(path, 3)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r'\(seed is 2, there 1; lora is "de", there null\): .*--restart'):
        write(path, 4, options={**OPTIONS, "seed": 2, "lora": "de"})
    assert path.read_bytes() == before


def test_results_of_another_kind_are_refused(path):
    write(path, 3)
    with pytest.raises(ValueError, match="results of `evaluate arena`"), ResultsFile(path, "bags", OPTIONS):
        pass


def test_results_with_other_options_can_be_discarded(path):
    write(path, 3)
    with ResultsFile(path, "arena", {"seed": 2}, restart=True) as file:
        assert not file.finished
        file.add("4", outcome(4))
    assert list(read_results(path).finished) == ["4"]


def test_two_evaluations_do_not_write_to_one_file(path):
    with (
        ResultsFile(path, "arena", OPTIONS),
        pytest.raises(ValueError, match="another evaluation is writing"),
    ):
        write(path, 3)


def test_an_item_that_failed_is_executed_again(path):
    with ResultsFile(path, "arena", OPTIONS) as file:
        file.add("3", {"failed": "no memory"})
        assert "3" not in file.finished
    assert read_results(path).failed == {"3": "no memory"}
    write(path, 3)
    results = read_results(path)
    assert (results.finished, results.failed) == ({"3": outcome(3)}, {})


def test_a_line_that_cannot_be_written_leaves_the_file_as_it_was(path, monkeypatch):
    with ResultsFile(path, "arena", OPTIONS) as file:
        file.add("3", outcome(3))
        before = path.read_bytes()
        whole = os.write
        calls = []

        def write_a_part(handle, data):
            calls.append(data)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
            return whole(handle, data[:7])

        monkeypatch.setattr(os, "write", write_a_part)
        with pytest.raises(OSError, match="No space left"):
            file.add("4", outcome(4))
        monkeypatch.undo()
        assert path.read_bytes() == before
        file.add("4", outcome(4))
    assert list(read_results(path).finished) == ["3", "4"]


def test_a_newer_format_is_refused(path):
    write(path, 3)
    header = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**header, "format_version": 99}) + "\n")
    with pytest.raises(ValueError, match="format version 99, expected 1"):
        read_results(path)
