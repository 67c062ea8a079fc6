# SPDX-License-Identifier: Apache-2.0
"""What clients may ask for."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHOICES = 8  # answers to one prompt, and answers of one client that are computed at a time
MAX_PROMPTS = 128  # of /v1/completions and /v1/embeddings
MAX_STOPS = 16
MAX_TOOLS = 128


@dataclass(frozen=True)
class Limits:
    """Limits that options set."""

    max_body_bytes: int = 32 << 20
    max_images: int = 16  # of one request, frames of videos included
    max_pixels: int = 1 << 25  # of one image
    max_tokens: int = 1 << 20  # of one answer; the engine's KV cache may have room for fewer
    max_requests: int = 16  # at a time, those that wait included
    body_s: float = 30.0  # within which a body must arrive
