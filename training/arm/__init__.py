# SPDX-License-Identifier: Apache-2.0
"""Training of a policy for the second world's arm, with LeRobot's classes."""
