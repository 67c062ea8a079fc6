# SPDX-License-Identifier: Apache-2.0
"""Drive a robot by words: each line is a command.

An empty line or Ctrl-C stops the robot. Needs both nodes, edgellm with plan_on:=image:

    ros2 launch edgellm_ros edgellm.launch.py engine_dir:=... params_file:=...    # with plan_on: image
    ros2 launch edgellm_ros follower.launch.py odom_topic:=/odom cmd_vel_topic:=/cmd_vel
"""

import sys

import rclpy
from rclpy.client import Client
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import String
from std_srvs.srv import Trigger

rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C must not end ROS before the stop
node = rclpy.create_node("drive_by_words")
command = node.create_publisher(String, "/edgellm/command", 10)
stop = node.create_client(Trigger, "/edgellm_follower/stop")
resume = node.create_client(Trigger, "/edgellm_follower/resume")


def call(client: Client) -> str:
    """Call a follower's service; again if the answer is lost, as the first one may be."""
    client.wait_for_service()
    while True:
        future = client.call_async(Trigger.Request())
        rclpy.spin_until_future_complete(node, future, timeout_sec=2.0)
        if future.done():
            return future.result().message


while command.get_subscription_count() == 0:
    rclpy.spin_once(node, timeout_sec=0.1)
try:
    call(resume)  # from the last stop
    for line in sys.stdin:
        words = line.strip()
        if words:
            call(resume)
            command.publish(String(data=words))
        else:
            command.publish(String())  # the model plans no more
            print(call(stop), flush=True)
except KeyboardInterrupt:
    pass
finally:
    command.publish(String())
    print(call(stop), flush=True)
    rclpy.shutdown()
