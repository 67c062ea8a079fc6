# SPDX-License-Identifier: Apache-2.0
"""Trains a small model for speech to text, of Qwen3-ASR's layout."""
