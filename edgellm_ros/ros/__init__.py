# SPDX-License-Identifier: Apache-2.0
"""The ROS side: the node, the arena and the replay. The only folder that imports rclpy."""
