# SPDX-License-Identifier: Apache-2.0
"""Streams of a server as the benchmark `served_beside` reads them."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks.served_beside import Answer, read_stream

STREAM = b"""data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}

data: {"choices": [{"delta": {"content": "Once"}, "finish_reason": null}], "usage": null}

data: {"choices": [{"delta": {"content": " upon"}, "finish_reason": null}]}

data: {"choices": [{"delta": {}, "finish_reason": "length"}]}

data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}

data: [DONE]

"""


def read(stream: bytes) -> Answer:
    seconds = count()
    return read_stream(stream.splitlines(keepends=True), lambda: next(seconds))


def test_only_events_with_text_are_pieces():
    assert read(STREAM).arrived == [1, 2]


def test_tokens_are_those_of_the_usage():
    answer = read(STREAM)
    assert (answer.tokens, answer.reason, answer.is_complete) == (3, "length", True)


def test_a_stream_that_ends_early_is_not_complete():
    assert not read(STREAM.partition(b"data: [DONE]")[0]).is_complete


def test_the_time_between_tokens_counts_tokens_without_a_piece():
    answer = Answer(arrived=[2.0, 2.2, 3.0], tokens=5)
    assert answer.between == pytest.approx(0.25)
