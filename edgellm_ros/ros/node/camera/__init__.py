# SPDX-License-Identifier: Apache-2.0
"""The calibrated camera on the robot, for overlays."""
