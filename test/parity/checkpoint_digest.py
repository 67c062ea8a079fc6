# SPDX-License-Identifier: Apache-2.0
"""Tells one checkpoint from another."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checkpoint_digest(checkpoint: Path) -> str:
    """Return the SHA-256 of the weights and tokens of a checkpoint.

    A draft head is left out, because it changes no answer.
    """
    digest, draft = hashlib.sha256(), checkpoint / "draft"
    weights = [path for path in checkpoint.rglob("*.safetensors") if draft not in path.parents]
    for path in sorted([*weights, checkpoint / "tokenizer.json"]):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
