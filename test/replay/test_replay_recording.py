# SPDX-License-Identifier: Apache-2.0
"""What is in an output bag, and what is not."""

from __future__ import annotations

import hashlib
import json

import pytest
from rosbags.serde import SerdeError

from edgellm_ros.replay.bag import Bag
from edgellm_ros.replay.recording import OUTPUT_TYPES
from fixtures.made_bags import serialized
from fixtures.made_outputs import NOTHING, STAMP, TEXT, answer, chunk, frame, record

LATER = STAMP + 8 * 10**8
DONE = {"plans_completed": 1}


def contents(path) -> list[tuple[str, int, object]]:
    with Bag(path) as bag:
        return [(m.topic.name, m.time, m.decode()) for m in bag.messages(list(bag.topics))]


def files(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_the_same_outputs_make_the_same_files_under_any_name(tmp_path, storage):
    answered = [(frame(STAMP), answer(STAMP), DONE), (frame(LATER), NOTHING, {})]
    first = record(tmp_path / "first", *answered, storage=storage)
    second = record(tmp_path / "elsewhere" / "second", *answered, storage=storage)
    assert files(first) == files(second)
    assert len(files(first)) == 2


def test_messages_carry_the_stamp_of_the_input_they_answer_in_a_fixed_order(tmp_path):
    bag = record(tmp_path / "bag", (frame(LATER), answer(STAMP), DONE))
    assert [(topic, time) for topic, time, _ in contents(bag)] == [
        ("/edgellm/generation", STAMP),
        ("/edgellm/text", STAMP),
        ("/edgellm/text_stream", STAMP),
        ("/edgellm/action_chunk", STAMP),
        ("/edgellm/path", STAMP),
        ("/edgellm/replay/input", LATER),
    ]


def test_outputs_without_a_stamp_get_that_of_the_input(tmp_path):
    bag = record(tmp_path / "bag", (frame(LATER), answer(0), DONE))
    assert {time for _, time, _ in contents(bag)} == {LATER}


def test_latencies_are_left_out_and_nothing_else_is(tmp_path):
    bag = record(tmp_path / "bag", (frame(STAMP), answer(STAMP), DONE))
    generation = next(message for topic, _, message in contents(bag) if topic == "/edgellm/generation")
    assert generation.total_latency == generation.vision_latency == 0.0
    assert (generation.text, list(generation.token_ids), generation.prompt_token_count) == (TEXT, [5, 6], 90)


def test_the_pieces_of_an_answer_are_put_together(tmp_path):
    bags = [
        record(tmp_path / name, (frame(STAMP), answer(STAMP, pieces=pieces), DONE))
        for name, pieces in (("a", ("the way ", "is clear.")), ("b", ("the ", "way is", " clear.")))
    ]
    assert files(bags[0]) == files(bags[1])
    assert [m.data for topic, _, m in contents(bags[0]) if topic == "/edgellm/text_stream"] == [TEXT]


def test_the_pieces_of_an_answer_that_was_never_finished_are_left_out(tmp_path):
    begun = {**NOTHING, "text_stream": answer(STAMP)["text_stream"]}
    bag = record(tmp_path / "bag", (frame(STAMP), begun, {"plans_error": 1}))
    assert [topic for topic, _, _ in contents(bag)] == ["/edgellm/replay/input"]


def test_every_input_is_recorded_with_its_hash_and_what_became_of_it(tmp_path):
    bag = record(tmp_path / "bag", (frame(STAMP, b"abc"), NOTHING, {"plans_stale_input": 1}))
    ((_, time, message),) = contents(bag)
    assert time == STAMP
    assert json.loads(message.data) == {
        "topic": "~/image",
        "type": "sensor_msgs/msg/CompressedImage",
        "sha256": hashlib.sha256(b"abc").hexdigest(),
        "became": {"plans_stale_input": 1},
    }


def test_several_samples_keep_their_order(tmp_path):
    chunks = [chunk(STAMP, sample_index=index) for index in (0, 1, 2)]
    outputs = {**answer(STAMP), "action_chunk": serialized(OUTPUT_TYPES["action_chunk"], chunks)}
    bag = record(tmp_path / "bag", (frame(STAMP), outputs, DONE))
    found = [message.sample_index for topic, _, message in contents(bag) if topic == "/edgellm/action_chunk"]
    assert found == [0, 1, 2]


def test_a_bag_is_never_overwritten(tmp_path):
    (tmp_path / "bag").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        record(tmp_path / "bag")


def test_nothing_is_left_of_a_recording_that_failed(tmp_path):
    half = {**answer(STAMP), "path": [b"this is no path"]}
    with pytest.raises(SerdeError):
        record(tmp_path / "bag", (frame(STAMP), answer(STAMP), DONE), (frame(LATER), half, DONE))
    assert list(tmp_path.iterdir()) == []
