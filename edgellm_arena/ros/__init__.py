# SPDX-License-Identifier: Apache-2.0
"""The arena as a ROS node, and the demo that runs it with the edgellm node."""
