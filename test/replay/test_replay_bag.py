# SPDX-License-Identifier: Apache-2.0
"""Reading bags, whole and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgellm_ros.replay.bag import Bag, BagError
from fixtures.made_bags import ARENA, copy_bag, string, write_bag

STORAGES = ("MCAP", "SQLITE3")


def read(path: Path) -> list[tuple[str, int, bytes]]:
    with Bag(path) as bag:
        return [(m.topic.name, m.time, m.data) for m in bag.messages(list(bag.topics))]


def storage_file(bag: Path) -> Path:
    (path,) = (path for path in bag.iterdir() if path.suffix in (".mcap", ".db3"))
    return path


def test_both_storages_and_single_files_give_the_same_messages(tmp_path):
    messages = read(ARENA)
    assert [time for _, time, _ in messages] == sorted(time for _, time, _ in messages)
    for storage in STORAGES:
        copy = copy_bag(tmp_path / storage, storage=storage)
        assert read(copy) == messages
        assert read(storage_file(copy)) == messages


@pytest.mark.parametrize(
    "storage, compression",
    [("MCAP", "STORAGE"), ("MCAP", "FILE"), ("SQLITE3", "MESSAGE"), ("SQLITE3", "FILE")],
)
def test_compressed_bags_give_the_same_messages(tmp_path, storage, compression):
    copy = copy_bag(tmp_path / "bag", storage=storage, compression=compression)
    assert read(copy) == read(ARENA)


def test_topics_have_their_types_and_counts():
    with Bag(ARENA) as bag:
        topic = bag.topics["/edgellm/odom"]
        assert topic.type == "nav_msgs/msg/Odometry"
        assert topic.count == len(list(bag.messages(["/edgellm/odom"])))


def test_a_bag_that_is_not_there(tmp_path):
    with pytest.raises(BagError, match="no such bag"):
        Bag(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["bag.mcap", "bag.db3", "bag.txt"])
@pytest.mark.parametrize("content", [b"", b"this is no bag"])
def test_a_file_that_is_no_bag(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BagError, match=f"{name}: not a readable bag: "):
        Bag(tmp_path / name)


def test_a_folder_without_metadata(tmp_path):
    with pytest.raises(BagError, match=r"not a readable bag: .*metadata"):
        Bag(tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_bag_without_messages(tmp_path, storage):
    bag = copy_bag(tmp_path / "empty", keep=lambda message: False, storage=storage)
    with pytest.raises(BagError, match="the bag is empty"):
        Bag(bag)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_bag_that_was_cut_short(tmp_path, storage, share):
    bag = copy_bag(tmp_path / "bag", storage=storage)
    path = storage_file(bag)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(BagError, match="not a readable bag"):
        read(bag)


def record_starts(data: bytes) -> list[int]:
    """Where the records of an MCAP file begin."""
    starts, at = [], 8
    while at < len(data) - 8:
        starts.append(at)
        at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
    return starts


class TestTruncatedMcap:
    """The error says what is wrong with which file, and at which byte."""

    @pytest.fixture
    def cut(self, tmp_path):
        """`cut(n)`: the error for the shipped bag whose file bag.mcap is cut to n bytes."""
        bag = copy_bag(tmp_path / "bag")
        data = storage_file(bag).read_bytes()

        def run(size: int) -> str:
            storage_file(bag).write_bytes(data[:size])
            with pytest.raises(BagError) as caught:
                read(bag)
            return str(caught.value).removeprefix(f"{bag}: not a readable bag: ")

        run.data, run.starts = data, record_starts(data)
        return run

    def test_in_the_middle_of_a_record(self, cut):
        chunk = next(at for at in cut.starts if cut.data[at] == 6)
        end = cut.starts[cut.starts.index(chunk) + 1]
        for size in (chunk + 9, end - 1):
            assert cut(size) == (
                f"bag.mcap is truncated or damaged: it ends at byte {size}, inside the Chunk record "
                f"from byte {chunk} to byte {end}"
            )

    def test_between_two_records(self, cut):
        chunk = next(at for at in cut.starts if cut.data[at] == 6)
        end = cut.starts[cut.starts.index(chunk) + 1]
        for size in (end, end + 8):
            assert cut(size) == (
                f"bag.mcap is truncated: it ends at byte {size}, after the Chunk record at byte {chunk}, "
                "without its footer"
            )

    @pytest.mark.parametrize("missing", [1, 8])
    def test_in_the_last_bytes(self, cut, missing):
        assert "after the Footer record" in cut(len(cut.data) - missing)

    def test_to_nothing(self, cut):
        assert cut(0) == "bag.mcap is empty"

    def test_a_piece_that_is_missing_in_the_middle(self, cut, tmp_path):
        chunk = next(at for at in cut.starts if cut.data[at] == 6)
        end = cut.starts[cut.starts.index(chunk) + 1]
        path = tmp_path / "torn.mcap"
        path.write_bytes(cut.data[: chunk + 100] + cut.data[chunk + 1100 :])
        with pytest.raises(BagError, match=f"torn.mcap is .*damaged: .* byte {end}"):
            read(path)


@pytest.mark.parametrize("start", [0.2, 0.5])
def test_a_chunk_that_lacks_a_piece(tmp_path, start):
    bag = Path(shutil.copytree(ARENA, tmp_path / "bag"))
    path = storage_file(bag)
    data = path.read_bytes()
    at = int(start * len(data))
    path.write_bytes(data[:at] + data[at + 1000 :])
    with pytest.raises(BagError, match="not a readable bag"):
        read(bag)


def test_messages_that_are_fewer_than_the_index_says(tmp_path):
    bag = copy_bag(tmp_path / "bag", storage="SQLITE3")
    metadata = bag / "metadata.yaml"
    metadata.write_text(metadata.read_text().replace("message_count: 13\n", "message_count: 14\n"))
    with pytest.raises(BagError, match="/edgellm/image has 13 messages, expected 14"):
        read(bag)


def test_a_topic_of_two_types(tmp_path):
    texts = [("/a", "std_msgs/msg/String", 1, string("x")), ("/a", "std_msgs/msg/Bool", 2, b"\0\1\0\0\1")]
    bag = write_bag(tmp_path / "bag", texts)
    with pytest.raises(BagError, match=r"/a has several types: std_msgs/msg/Bool, std_msgs/msg/String"):
        Bag(bag)
