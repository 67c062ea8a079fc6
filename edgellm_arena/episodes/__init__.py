# SPDX-License-Identifier: Apache-2.0
"""Moments and whole drives of the arena: how they are played, scored and drawn."""
