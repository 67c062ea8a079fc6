# SPDX-License-Identifier: Apache-2.0
"""The ROS side: node, arena and replay. The only folder that imports rclpy."""
