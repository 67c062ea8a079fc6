# SPDX-License-Identifier: Apache-2.0
"""Decode steps: the loop, the methods that yield tokens, and recorded steps."""
