# SPDX-License-Identifier: Apache-2.0
"""The package's message types in the bag library.

The types are compared with those that ROS has generated and compiled.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.replay.message_types import definition_folder, typestore

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "msg").glob("*.msg"))


@pytest.mark.parametrize("name", NAMES)
def test_types_have_the_hashes_that_ros_generated(name):
    module = pytest.importorskip("edgellm_ros.msg")
    share = Path(module.__file__).parents[5] / "share" / "edgellm_ros" / "msg"
    hashes = json.loads((share / f"{name}.json").read_text())["type_hashes"]
    expected = {entry["type_name"]: entry["hash_string"] for entry in hashes}
    assert typestore().hash_rihs01(f"edgellm_ros/msg/{name}") == expected[f"edgellm_ros/msg/{name}"]


def test_a_message_that_rclpy_serialized_is_read_and_written_back():
    serialization = pytest.importorskip("rclpy.serialization")
    chunk_type = importlib.import_module("edgellm_ros.msg").ActionChunk
    sent = chunk_type(names=["a", "b"], values=[1.5, -2.0], horizon=1, dt=0.1, noise_seed=7, request_id="ä")
    kind = "edgellm_ros/msg/ActionChunk"
    read = typestore().deserialize_cdr(serialization.serialize_message(sent), kind)
    assert (read.names, read.noise_seed, read.request_id) == (["a", "b"], 7, "ä")
    assert np.array_equal(read.values, [1.5, -2.0])
    back = bytes(typestore().serialize_cdr(read, kind))
    assert serialization.deserialize_message(back, chunk_type) == sent


def test_string_constants_do_not_contain_their_comments():
    assert typestore().types["edgellm_ros/msg/AudioChunk"].S16LE == "S16LE"


def test_definitions_are_those_that_ros_compiled_and_else_those_of_the_clone(tmp_path):
    clone, site = tmp_path / "clone", tmp_path / "lib" / "python3.12" / "site-packages" / "edgellm_ros"
    package = [str(clone / "edgellm_ros"), str(site)]
    with pytest.raises(FileNotFoundError, match="no message definitions"):
        definition_folder(package)
    shutil.copytree(ROOT / "msg", clone / "msg")
    assert definition_folder(package) == clone / "msg"
    (site / "msg").mkdir(parents=True)
    share = tmp_path / "share" / "edgellm_ros" / "msg"
    shutil.copytree(ROOT / "msg", share)
    assert definition_folder(package) == share
