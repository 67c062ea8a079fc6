# SPDX-License-Identifier: Apache-2.0
"""KV rows of earlier prompts, reused by requests with the same prefix."""
