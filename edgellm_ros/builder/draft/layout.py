# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors of a draft head, in all spellings of its publishers.

Inside the builder a head has the names of `tensor_shapes`, such as `draft.layers.0.self_attn.q_proj.weight`.
The files of EAGLE and SpecForge call the first layer `midlayer`, those of AngelSlim, ModelOpt and speculators
`layers.0` or `midlayer.0`; some put `model.` before all names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgellm_ros.builder.graph.fusion import HEAD_MODULE

MODULE = HEAD_MODULE
D2T = f"{MODULE}.d2t"
EMBEDDING = f"{MODULE}.embed_tokens.weight"
LM_HEAD = f"{MODULE}.lm_head.weight"
FC = f"{MODULE}.fc.weight"
# What training leaves behind: masks, the base's weights, tables that follow from the config.
LEFTOVER = re.compile(r"t2d|(target_model|verifier_\w+)(\..+)?|(.+\.)?rotary_emb\.\w+")
_MIDLAYER = re.compile(r"^midlayer\.(?:(\d+)\.)?")


def canonical_names(stored: Iterable[str], where: object) -> dict[str, str]:
    """Return tensors' names in the builder -> their names in the file `where`.

    Leftovers of training are left out. ValueError if two tensors have the same name in the builder.
    """
    found: dict[str, str] = {}
    for name in stored:
        plain = name.removeprefix("model.")
        if LEFTOVER.fullmatch(plain):
            continue
        plain = _MIDLAYER.sub(lambda match: f"layers.{match[1] or 0}.", plain)
        plain = f"{MODULE}.{plain.replace('.qkv_proj.', '.')}"
        if plain in found:
            raise ValueError(f"{where}: tensors {found[plain]!r} and {name!r} are the same part of the head")
        found[plain] = name
    return found


def published_name(name: str) -> str:
    """Return the name that a tensor has in files, for errors.

    There are two names for tensors of the first layer.
    """
    plain = name.removeprefix(f"{MODULE}.")
    if plain.startswith("layers.0."):
        return f"{plain!r} (or {plain.replace('layers.0.', 'midlayer.')!r})"
    return repr(plain)


def layer(index: int) -> str:
    """Return the name of a layer's module."""
    return f"{MODULE}.layers.{index}"
