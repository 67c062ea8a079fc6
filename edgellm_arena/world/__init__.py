# SPDX-License-Identifier: Apache-2.0
"""Solids on a floor, the robot's motion, and what its camera sees."""
