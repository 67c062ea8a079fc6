# SPDX-License-Identifier: Apache-2.0
"""Trajectories by flow matching over the language model's KV cache."""
