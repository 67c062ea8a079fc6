# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafted tokens, which the base model verifies in one run."""
