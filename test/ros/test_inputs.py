# SPDX-License-Identifier: Apache-2.0
"""Which jobs the callbacks of the input topics submit, without a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from std_msgs.msg import String

from edgellm_ros.ros.node.inputs import Inputs
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.planning.command_trigger import CommandTrigger
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from fixtures.node_limits import limits
from fixtures.peer import image_message

NOW = SimpleNamespace(nanoseconds=20 * 10**9)
PIXELS = np.zeros((2, 2, 3), np.uint8)


class Topics:
    """The callbacks of `Inputs` by topic, and the texts that they submit."""

    def __init__(self, plan_on: str) -> None:
        self.submitted: list[tuple[str, bool]] = []  # texts, each with `preempt`
        self._callbacks: dict[str, Any] = {}
        node = SimpleNamespace(
            get_clock=lambda: SimpleNamespace(now=lambda: NOW), create_subscription=self._subscribe
        )
        parameters = SimpleNamespace(
            plan_on=plan_on, image_transport="raw", audio_transport="chunk", input_reliability="reliable",
            frame_interval=0.5, future_stamp_tolerance=1.0, limits=limits(),
        )  # fmt: skip
        worker = SimpleNamespace(
            submit_topic=lambda job, preempt: self.submitted.append((job, preempt)),
            stop_topic=lambda message: None,
        )
        Inputs(
            node,
            SimpleNamespace(current=parameters),
            worker=worker,
            jobs=SimpleNamespace(from_command=lambda command, frame: command.text),
            odometry=None,
            trigger=CommandTrigger(plan_on),
            frames=FrameHistory(1),
            cameras=Cameras(()),
            joints=None,
            speech=SimpleNamespace(on_stamp=lambda header: [], silence_robot=lambda: None),
            metrics=NodeMetrics(),
        ).open()

    def _subscribe(self, message_type: type, topic: str, callback: Any, *_: Any, **__: Any) -> None:
        self._callbacks[topic] = callback

    def frame(self) -> None:
        self._callbacks["~/image"](image_message(PIXELS))

    def command(self, text: str) -> None:
        self._callbacks["~/command"](String(data=text))


def test_a_command_before_any_frame_is_submitted_as_a_command_with_the_first_frame():
    topics = Topics("image")
    topics.command("go")
    assert not topics.submitted
    topics.frame()
    topics.frame()
    assert topics.submitted == [("go", True), ("go", False)]


@pytest.mark.parametrize("plan_on", ["image", "command"])
def test_a_command_after_a_frame_is_submitted_as_a_command(plan_on):
    topics = Topics(plan_on)
    topics.frame()
    topics.command("go")
    assert topics.submitted == [("go", True)]
