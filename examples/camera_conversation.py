# SPDX-License-Identifier: Apache-2.0
"""Talk with the running node about camera frames.

One question per line, each about the next frame.

The topic is `image`: `camera_conversation.py --ros-args -r image:=/camera/image_raw`.
"""

import sys

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.qos import qos_profile_sensor_data
from rclpy.wait_for_message import wait_for_message
from sensor_msgs.msg import Image

from edgellm_ros.client import PlanClient, PlanError

REMEMBERED_TURNS = 1  # with their frames; what does not fit into a prompt is an error

rclpy.init()
node = rclpy.create_node("camera_conversation")
said = []
unanswered = 0
try:
    with PlanClient(node) as client:
        for question in map(str.strip, sys.stdin):
            earlier = said[-2 * REMEMBERED_TURNS :]
            try:
                arrived, frame = wait_for_message(
                    Image, node, "image", qos_profile=qos_profile_sensor_data, time_to_wait=5.0
                )
                if not arrived:
                    raise TimeoutError(f"no frame on {node.resolve_topic_name('image')}")
                result = client.plan(
                    question, images=frame, earlier_messages=earlier, action_samples=0, timeout_s=60.0
                )
            except (PlanError, TimeoutError) as error:
                print(error, file=sys.stderr)
                unanswered += 1
                continue
            said += [("user", question, frame), ("assistant", result.text)]
            print(result.text, flush=True)
except (KeyboardInterrupt, ExternalShutdownException):
    sys.exit("camera_conversation.py: interrupted")
finally:
    rclpy.try_shutdown()
sys.exit(1 if unanswered else 0)
