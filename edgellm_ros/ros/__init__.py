# SPDX-License-Identifier: Apache-2.0
"""The ROS side: the node and what it needs. The only folder that imports rclpy."""
