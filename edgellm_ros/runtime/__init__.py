# SPDX-License-Identifier: Apache-2.0
"""The inference runtime: from a request to words, tokens and trajectories."""
