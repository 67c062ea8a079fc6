# SPDX-License-Identifier: Apache-2.0
"""Recorded bags: reading them, and writing and comparing outputs of the node.

Nothing here needs ROS; `edgellm_ros.ros.replay.replay` plays a bag into the live node.
"""
