# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference between two output bags, and how it is told."""

from __future__ import annotations

import pytest
from rosbags.typesys import Stores, get_typestore

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.replay import recording
from edgellm_ros.replay.bag import BagError
from edgellm_ros.replay.comparison import Comparison, compare, read_output_bag
from edgellm_ros.replay.inputs import InputMessage
from edgellm_ros.replay.message_types import typestore
from edgellm_ros.replay.recording import OUTPUT_TYPES
from fixtures.made_bags import ARENA, EXPECTED, serialized
from fixtures.made_outputs import NOTHING, STAMP, answer, chunk, frame, path, record, utterance

LATER = STAMP + 8 * 10**8
DONE = {"plans_completed": 1}
BOTH = [(frame(STAMP), answer(STAMP), DONE), (frame(LATER), answer(LATER), DONE)]


@pytest.fixture
def compared(tmp_path):
    """Compares made-up outputs with `BOTH`."""

    def run(*answered, tolerance: float = 1e-3, **options) -> Comparison:
        expected = read_output_bag(record(tmp_path / "expected", *BOTH))
        return compare(expected, read_output_bag(record(tmp_path / "got", *answered, **options)), tolerance)

    return run


def first(comparison: Comparison) -> tuple:
    found = comparison.first
    return found.topic, found.stamp, found.field, found.expected, found.got


def test_the_shipped_outputs_are_those_of_the_engine_that_export_makes(arena_engine):
    """If not, `make expected` records them again."""
    fresh = {entry.path: entry.sha256 for entry in EngineConfig.load(arena_engine).files}
    assert read_output_bag(EXPECTED).engine == fresh


def test_equal_bags_are_equal_in_either_storage(compared):
    comparison = compared(*BOTH, storage="sqlite3")
    assert comparison == Comparison(messages=12, differing=0, first=None, deviation=0.0, engine_files=())
    assert comparison.report("E", 1e-3) == "all 12 messages are equal to those of E, exactly"


def test_another_text_is_a_difference(compared):
    comparison = compared(BOTH[0], (frame(LATER), answer(LATER, "a box is in the way."), DONE))
    assert first(comparison) == (
        "~/generation", LATER, "text", '"the way is clear."', '"a box is in the way."',
    )  # fmt: skip
    assert comparison.differing == 2  # ~/generation and ~/text


def test_the_report_says_where_and_what(compared):
    report = compared(BOTH[0], (frame(LATER), answer(LATER, "stop"), DONE)).report("old/bag", 1e-3)
    assert report.splitlines() == [
        "2 of 12 messages differ from old/bag; the first:",
        "  topic     ~/generation",
        "  stamp     12.800000000",
        "  field     text",
        '  expected  "the way is clear."',
        '  got       "stop"',
    ]


@pytest.mark.parametrize("tolerance, differing", [(0.02, 0), (0.005, 1), (0.0, 1)])
def test_actions_may_differ_within_the_tolerance(compared, tolerance, differing):
    moved = answer(STAMP, chunk=chunk(STAMP, (0.1, 0.2, 0.31, 0.4)))
    comparison = compared((frame(STAMP), moved, DONE), BOTH[1], tolerance=tolerance)
    assert comparison.differing == differing
    assert comparison.deviation == pytest.approx(0.01, abs=1e-6)
    if differing:
        topic, stamp, field, expected, got = first(comparison)
        assert (topic, stamp, field, expected[:4]) == ("~/action_chunk", STAMP, "values[2]", "0.30")
        assert got.endswith("(they differ by 0.01)")


def test_paths_may_differ_within_the_tolerance(compared):
    moved = answer(STAMP, path=path(STAMP, x=0.6))
    comparison = compared((frame(STAMP), moved, DONE), BOTH[1])
    assert first(comparison)[:3] == ("~/path", STAMP, "poses[0].pose.position.x")


@pytest.mark.parametrize("other, differing", [((0.5, -0.2501), 0), ((0.5, -0.26), 1), ((0.5,), 1)])
def test_sound_that_was_heard_may_differ_within_the_tolerance(tmp_path, other, differing):
    def heard(name: str, samples: tuple[float, ...]):
        sound = serialized(OUTPUT_TYPES["utterance"], [utterance(STAMP, samples)])
        outputs = {**answer(STAMP), "utterance": sound}
        return read_output_bag(record(tmp_path / name, (frame(STAMP), outputs, DONE)))

    comparison = compare(heard("expected", (0.5, -0.25)), heard("got", other), 1e-3)
    assert comparison.differing == differing
    if differing:
        assert (comparison.first.topic, comparison.first.field[:4]) == ("~/utterance", "data")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_difference(compared, value):
    broken = answer(STAMP, chunk=chunk(STAMP, (0.1, 0.2, value, 0.4)))
    assert first(compared((frame(STAMP), broken, DONE), BOTH[1], tolerance=1e9))[2] == "values[2]"


def test_a_noise_seed_is_told_before_the_actions_that_it_changed(compared):
    other = answer(STAMP, chunk=chunk(STAMP, (1, 2, 3, 4), noise_seed=9))
    found = first(compared((frame(STAMP), other, DONE), BOTH[1]))
    assert found == ("~/action_chunk", STAMP, "noise_seed", "0", "9")


def test_fewer_actions_are_a_difference(compared):
    short = answer(STAMP, chunk=chunk(STAMP, (0.1, 0.2)))
    found = first(compared((frame(STAMP), short, DONE), BOTH[1]))
    assert found == ("~/action_chunk", STAMP, "values, length", "4", "2")


def test_the_number_of_the_request_does_not_matter(compared):
    other = answer(STAMP, chunk=chunk(STAMP, request_id="command-7"))
    assert compared((frame(STAMP), other, DONE), BOTH[1]).differing == 0


def test_an_input_that_was_dropped_is_told_before_its_outputs(compared):
    comparison = compared(BOTH[1])
    topic, stamp, field, expected, got = first(comparison)
    assert (topic, stamp, field, got) == ("~/image", STAMP, "message", "nothing")
    assert expected.startswith("sensor_msgs/msg/CompressedImage with SHA-256 ")
    assert comparison.differing == 6


def test_an_input_that_was_dropped_is_told_before_outputs_of_an_earlier_stamp(compared):
    """A command that is planned with the frame before, because its own is missing."""
    again = InputMessage("command", "std_msgs/msg/String", b"go", LATER + 1, LATER + 1)
    comparison = compared(BOTH[0], (again, answer(STAMP), DONE))
    assert first(comparison)[:2] == ("~/image", LATER)
    assert comparison.differing == 12


def test_outputs_that_were_not_expected_are_differences(compared):
    more = frame(LATER + 1)
    comparison = compared(*BOTH, (more, answer(LATER + 1), DONE))
    assert first(comparison)[:4] == ("~/image", LATER + 1, "message", "nothing")
    assert comparison.differing == 6


def test_an_input_that_is_not_the_same_is_a_difference(compared):
    comparison = compared((frame(STAMP, b"other"), BOTH[0][1], DONE), BOTH[1])
    assert first(comparison)[:3] == ("~/image", STAMP, "sha256")
    assert comparison.differing == 1


def test_what_became_of_an_input_is_compared(compared):
    comparison = compared(BOTH[0], (frame(LATER), NOTHING, {"plans_stale_input": 1}))
    assert first(comparison) == ("~/image", LATER, "became.plans_completed", "1", '"nothing"')


def test_another_engine_is_named_but_no_difference_by_itself(compared):
    comparison = compared(*BOTH, engine={"llm/model.onnx": "11", "config.json": "22"})
    assert comparison.first is None
    assert comparison.engine_files == ("config.json", "llm/model.onnx")
    assert "the engine differs from that of E: config.json, llm/model.onnx" in comparison.report("E", 1e-3)


@pytest.mark.slow
def test_an_output_bag_of_an_earlier_version_is_read_with_its_own_definitions(tmp_path, monkeypatch):
    """When answers had no lora yet, and were stored without it."""
    earlier = get_typestore(Stores.ROS2_JAZZY)
    for kind, (constants, fields) in typestore().fielddefs.items():
        if kind.startswith("edgellm_ros/"):
            earlier.register({kind: (constants, [field for field in fields if field[0] != "lora"])})
    new = read_output_bag(record(tmp_path / "new", *BOTH))

    def in_short(name: str, data: bytes):
        message = typestore().deserialize_cdr(data, OUTPUT_TYPES[name])
        if name != "generation":
            return message
        values = {field: getattr(message, field) for field in vars(message) if field != "lora"}
        return earlier.types[OUTPUT_TYPES[name]](**values)

    monkeypatch.setattr(recording, "typestore", lambda: earlier)
    monkeypatch.setattr(recording, "_decode", in_short)
    old = read_output_bag(record(tmp_path / "old", *BOTH))
    assert not hasattr(old.messages[STAMP, "~/generation"][0], "lora")
    for expected, got in ((old, new), (new, old)):
        assert compare(expected, got, 0.0).first is None


def test_a_bag_that_is_no_output_bag():
    with pytest.raises(BagError, match="not an output bag of `edgellm replay`: no record of the engine"):
        read_output_bag(ARENA)
