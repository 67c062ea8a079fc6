# SPDX-License-Identifier: Apache-2.0
"""From the language model's KV cache to trajectories: flow matching, action space, trajectory history."""
