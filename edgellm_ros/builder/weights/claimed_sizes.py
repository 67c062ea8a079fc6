# SPDX-License-Identifier: Apache-2.0
"""Compares sizes of a configuration with the tensors that the checkpoint has.

Families compare them before they compute anything from them: a list of 10**9 layers, or the frequencies of a
head of that size, would take all memory before the first missing tensor is looked up.
"""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.weights.weights import Weights

# Each is at most a dimension of some tensor of a decoder. Frequencies are computed from them; other sizes are
# first compared with the shape of a tensor. Nemotron-H has had both names of a head's size.
DIMENSIONS = ("hidden_size", "head_dim", "attention_head_dim")


def check_decoder_sizes(text: ConfigSection, weights: Weights, prefix: str) -> None:
    """Raise ValueError if the checkpoint lacks tensors of a decoder section's sizes.

    prefix: of the decoder's tensors, such as "model".
    """
    check_layers(text, "num_hidden_layers", weights, f"{prefix}.layers")
    check_dimensions(text, weights)


def check_layers(
    section: ConfigSection, key: str, weights: Weights, modules: str, default: int | None = None
) -> None:
    """Raise ValueError if a section has layers of which the checkpoint lacks tensors.

    modules: the list of the layers in the names of tensors, such as "model.layers".
    """
    stored = weights.list_length(modules)
    if section.size(key, default) <= stored:
        return
    if stored:
        raise section.fail(key, f"the last layer in {weights.where.name} is '{modules}.{stored - 1}'")
    longer = weights.longer_name(f"{modules}.0.")
    there = f", but {longer!r}" if longer else ""
    raise section.fail(key, f"{weights.where.name} has no tensors of '{modules}.0'{there}")


def check_no_more_layers(
    section: ConfigSection, key: str, count: int, weights: Weights, modules: str
) -> None:
    """Raise ValueError if the checkpoint has tensors of further layers.

    count: of the section's layers, whose key is `key`; modules: as for `check_layers`.
    """
    stored = weights.list_length(modules)
    if count < stored:
        raise section.fail(key, f"{weights.where.name} has {stored} layers of {modules}")


def check_dimensions(section: ConfigSection, weights: Weights) -> None:
    """Raise ValueError if a section's size exceeds all dimensions of the tensors.

    The tensors are those of the checkpoint.
    """
    for key in DIMENSIONS:
        if section.has(key) and section.size(key) > weights.largest_dimension:
            has = f"{weights.where.name} has no tensor with a dimension above {weights.largest_dimension}"
            raise section.fail(key, has)
