# SPDX-License-Identifier: Apache-2.0
"""The world as a ROS node, and `edgellm demo --arm`."""
