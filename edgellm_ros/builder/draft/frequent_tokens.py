# SPDX-License-Identifier: Apache-2.0
"""Chooses what a draft head without a vocabulary of its own drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm_ros.engine_directory.schema import read_json


def frequent_tokens(tokenizer: Path, vocabulary: int, count: int) -> np.ndarray | None:
    """Choose the tokens that a head drafts, rising, i64; None = all.

    `count` of them, or a few more. Those that a byte pair encoder merges first are the most frequent ones of
    the text that it was made of; special tokens and tokens that no merge makes are always among them. Other
    kinds of tokenizers have no such order: of these the first ids. Each level of a draft reads the LM head's
    rows of these tokens.
    """
    if count >= vocabulary:
        return None
    data = read_json(tokenizer)
    model = data.get("model", {})
    ids = model.get("vocab")
    added = {entry["id"] for entry in data.get("added_tokens", [])}
    chosen = {token for token in added if token < vocabulary}
    if isinstance(ids, dict) and model.get("merges"):
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        merged = ["".join(pair) for pair in pairs]
        later = {ids[token] for token in merged if token in ids}
        chosen |= {token for token in ids.values() if token not in later and token < vocabulary}
        order = [ids[token] for token in merged if token in ids]
    else:
        order = list(range(vocabulary))
    for token in order:
        if len(chosen) >= count:
            break
        if token < vocabulary:
            chosen.add(token)
    return np.array(sorted(chosen), np.int64)
