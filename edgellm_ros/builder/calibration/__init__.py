# SPDX-License-Identifier: Apache-2.0
"""Rounds weights, and searches scales with which rounding changes least."""
