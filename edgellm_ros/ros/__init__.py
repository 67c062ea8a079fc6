# SPDX-License-Identifier: Apache-2.0
"""The ROS side: nodes, client and replay. Of this package, only it imports rclpy."""
