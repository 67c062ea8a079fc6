# SPDX-License-Identifier: Apache-2.0
"""Bags: what a robot recorded, read message by message; what the node made of it, written and compared.

Nothing here needs ROS. `edgellm_ros.ros.replay.replay` plays a bag into the live node.
"""
