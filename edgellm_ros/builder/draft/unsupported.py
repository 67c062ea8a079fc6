# SPDX-License-Identifier: Apache-2.0
"""Recognises drafters that are not supported, so that errors name the kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.unsupported import refuse_quantised
from edgellm_ros.builder.weights.weights import FILE, INDEX

SUPPORTED = "supported are heads of EAGLE-3 and DFlash"
CONFIG_KEYS = {  # of config.json, at any depth
    "dspark_config": "a DSpark drafter",
    "kv_lora_rank": "a head with latent attention (MLA)",
}
TENSORS = {  # found anywhere in the name of a tensor
    "mask_hidden": "a P-EAGLE head",
    "kv_a_proj_with_mqa": "a head with latent attention (MLA)",
    "kv_b_proj": "a head with latent attention (MLA)",
    "pre_fc_norm_hidden": "an MTP head, which is read with its checkpoint",
    "medusa_head": "Medusa heads",
    "weight_scale": "a quantised head; supported are weights of F16, BF16 and F32",
    "input_scale": "a quantised head; supported are weights of F16, BF16 and F32",
    "pre_quant_scale": "a quantised head; supported are weights of F16, BF16 and F32",
    "qweight": "a quantised head; supported are weights of F16, BF16 and F32",
}
NAMES = re.compile("(dflash|dspark|jetspec|domino|p-?eagle|mtp|medusa)", re.IGNORECASE)
TITLES = {"dflash": "DFlash", "dspark": "DSpark", "jetspec": "JetSpec", "mtp": "MTP"}


def refuse_files(directory: Path) -> None:
    """Raise FileNotFoundError for weights that are a pickle of PyTorch.

    Pickles are not read.
    """
    pickled = directory / "pytorch_model.bin"
    if pickled.is_file() and not any((directory / name).is_file() for name in (FILE, INDEX)):
        raise FileNotFoundError(
            f"{pickled}: a PyTorch pickle, which can run code when it is read; supported is {FILE}: convert "
            "it where PyTorch is, with torch.load(..., weights_only=True) and safetensors.torch.save_file"
        )


def refuse_config(config: ConfigSection) -> None:
    """Raise ValueError for the configuration of an unsupported drafter.

    Unsupported are quantised heads and other kinds of drafters.
    """
    refuse_quantised(config)
    for section in config.nested():
        for key, kind in CONFIG_KEYS.items():
            if section.has(key):
                raise section.fail(key, f"{kind}; {SUPPORTED}")


def refuse_tensors(stored: Iterable[str], where: object) -> None:
    """Raise ValueError if the tensor names belong to another kind of drafter."""
    for name in sorted(stored):
        for part, kind in TENSORS.items():
            if part in name:
                raise ValueError(f"{where}: tensor {name!r}: {kind}; {SUPPORTED}")


def describe(config: ConfigSection) -> str:
    """Name the kind of drafter that a configuration claims to be.

    "" if it claims none that is known.
    """
    claims = [config.data.get("speculators_model_type"), config.data.get("model_type")]
    architectures = config.data.get("architectures")
    claims += architectures if isinstance(architectures, list) else []
    for claim in claims:
        found = NAMES.search(claim) if isinstance(claim, str) else None
        if found:
            return f"{TITLES.get(found[1].lower(), found[1])} by its config ({claim!r})"
    return ""
