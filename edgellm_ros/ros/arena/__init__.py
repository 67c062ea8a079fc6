# SPDX-License-Identifier: Apache-2.0
"""The demo on ROS topics: the arena as a node, and the episodes driven in it."""
