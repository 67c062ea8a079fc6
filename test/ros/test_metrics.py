# SPDX-License-Identifier: Apache-2.0
"""Counters of the node: all of them are there before the first event."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgellm_ros.ros import node
from edgellm_ros.ros.node.diagnostics import INPUT_VALUES
from edgellm_ros.ros.node.metrics import COUNTERS, NodeMetrics
from edgellm_ros.ros.node.outputs.outputs import TOPICS

SOURCES = [path.read_text() for path in Path(node.__file__).parent.glob("*.py")]


def test_every_counter_is_0_before_its_first_event():
    values = NodeMetrics().values()
    assert {name: values.get(name) for name in COUNTERS} == dict.fromkeys(COUNTERS, 0.0)


def test_every_counter_in_the_code_is_in_the_table():
    counted = {name for source in SOURCES for name in re.findall(r'(?:count|_refuse)\("(\w+)"', source)}
    assert len(counted) >= 10
    assert counted | {f"{topic}_published" for topic in TOPICS} <= set(COUNTERS)


def test_values_of_inputs_on_diagnostics_are_counted_or_measured():
    measured = {"image_rate", "odometry_rate", "joint_state_rate", "audio_rate", "utterances_dropped"}
    assert set(INPUT_VALUES) <= set(COUNTERS) | measured


def test_a_counter_that_is_not_in_the_table_is_an_error():
    with pytest.raises(KeyError):
        NodeMetrics().count("frames_recieved")
