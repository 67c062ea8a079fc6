# SPDX-License-Identifier: Apache-2.0
"""Drive a robot by words: each line is a command; prints what the robot says.

An empty line or Ctrl-C stops the robot. Needs both nodes, edgellm with plan_on:=image:

    ros2 launch edgellm_ros edgellm.launch.py engine_dir:=... params_file:=...    # with plan_on: image
    ros2 launch edgellm_ros follower.launch.py odom_topic:=/odom cmd_vel_topic:=/cmd_vel
"""

import sys
from contextlib import suppress
from threading import Thread
from time import sleep

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import String
from std_srvs.srv import Trigger

rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C must not end ROS before the stop
node, said = rclpy.create_node("drive_by_words"), [""]
command = node.create_publisher(String, "/edgellm/command", 10)
services = {name: node.create_client(Trigger, f"/edgellm_follower/{name}") for name in ("stop", "resume")}


def say(answer: String) -> None:
    """Print an answer, unless the last plan had the same."""
    if answer.data != said.pop():
        print("robot:", answer.data, flush=True)
    said.append(answer.data)


def call(name: str) -> str:
    """Call a follower's service; again if the answer is lost, as the first one may be."""
    for _ in range(5):
        if answer := services[name].call(Trigger.Request(), timeout_sec=2.0):
            return answer.message
    raise TimeoutError(f"no answer on /edgellm_follower/{name}: is edgellm_follower running?")


node.create_subscription(String, "/edgellm/text", say, 10)
(executor := SingleThreadedExecutor()).add_node(node)
Thread(target=executor.spin).start()
try:
    if not any(command.get_subscription_count() or sleep(0.1) for _ in range(100)):
        raise TimeoutError("no subscriber of /edgellm/command: is edgellm running?")
    with suppress(KeyboardInterrupt):
        for words in map(str.strip, sys.stdin):
            if words:
                call("resume")
            command.publish(String(data=words))  # after an empty command the model plans no more
            if not words:
                print(call("stop"), flush=True)
    command.publish(String())
    print(call("stop"), flush=True)
except (KeyboardInterrupt, TimeoutError) as error:
    sys.exit(f"follower_on_a_robot.py: {str(error) or 'interrupted'}")
finally:
    executor.shutdown()
