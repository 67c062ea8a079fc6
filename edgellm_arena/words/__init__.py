# SPDX-License-Identifier: Apache-2.0
"""Commands to the robot, and its answers, in English and German."""
