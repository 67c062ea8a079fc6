# SPDX-License-Identifier: Apache-2.0
"""What the robot senses: images, odometry and joint states, with their times."""
