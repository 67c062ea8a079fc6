# SPDX-License-Identifier: Apache-2.0
"""The bags of a folder and their expected outputs."""

from __future__ import annotations

import shutil

import pytest

from edgellm_ros.evaluation.bags import find_bags
from fixtures.made_bags import ARENA, EXPECTED


@pytest.fixture
def folders(tmp_path):
    """A folder with the bag `drive`, and one with its expected outputs."""
    shutil.copytree(ARENA, tmp_path / "bags" / "drive")
    shutil.copytree(EXPECTED, tmp_path / "expected" / "drive")
    return tmp_path / "bags", tmp_path / "expected"


def test_folders_and_files_are_found_and_other_files_are_not(folders):
    bags, expected = folders
    shutil.copy(ARENA / "arena.mcap", bags / "apart.mcap")
    shutil.copytree(EXPECTED, expected / "apart")
    (bags / "notes.txt").write_text("")
    (bags / "empty").mkdir()
    found = find_bags(*folders)
    assert [(bag.name, bag.bag.name, bag.expect.name) for bag in found] == [
        ("apart", "apart.mcap", "apart"),
        ("drive", "drive", "drive"),
    ]


@pytest.mark.parametrize("side", [0, 1])
def test_another_recording_or_expectation_is_another_item(folders, side):
    (before,) = find_bags(*folders)
    (path,) = (folders[side] / "drive").glob("*.mcap")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (after,) = find_bags(*folders)
    assert before.name == after.name
    assert before.item != after.item


def test_the_same_files_elsewhere_are_the_same_item(folders, tmp_path):
    (before,) = find_bags(*folders)
    shutil.copytree(tmp_path / "bags", tmp_path / "moved")
    (after,) = find_bags(tmp_path / "moved", folders[1])
    assert before.item == after.item


def test_two_bags_of_one_name_are_refused(folders):
    shutil.copy(ARENA / "arena.mcap", folders[0] / "drive.mcap")
    with pytest.raises(ValueError, match=r"drive.mcap and drive have the same name"):
        find_bags(*folders)


def test_a_bag_without_expected_outputs_is_refused(folders):
    shutil.copytree(ARENA, folders[0] / "second")
    with pytest.raises(ValueError, match="no expected outputs of second: "):
        find_bags(*folders)


@pytest.mark.parametrize("side", [0, 1])
def test_outputs_in_the_place_of_bags_are_refused(folders, side):
    outputs = folders[side] / ".." / folders[side].name
    with pytest.raises(ValueError, match="the outputs would overwrite these bags, name another --out"):
        find_bags(*folders, outputs)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_lies_in_the_place_of_an_output_bag_is_refused(folders, tmp_path, kind):
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    if kind == "file":
        (outputs / "drive").touch()
    else:
        (outputs / "drive").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"outputs/drive: is in the place of an output bag, remove it or"):
        find_bags(*folders, outputs)


def test_output_bags_may_be_overwritten(folders, tmp_path):
    (tmp_path / "outputs" / "drive").mkdir(parents=True)
    (tmp_path / "outputs" / "other").touch()
    assert [bag.name for bag in find_bags(*folders, tmp_path / "outputs")] == ["drive"]


def test_a_folder_without_bags_is_refused(folders, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(
        ValueError, match=r"none: no bags, expected folders with metadata\.yaml or \.mcap or \.db3"
    ):
        find_bags(tmp_path / "none", folders[1])


def test_a_folder_that_is_not_there_is_refused(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        find_bags(folders[0], tmp_path / "nowhere")
