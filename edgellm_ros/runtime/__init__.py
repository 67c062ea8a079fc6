# SPDX-License-Identifier: Apache-2.0
"""The inference runtime: text, tokens and trajectories for requests."""
