# SPDX-License-Identifier: Apache-2.0
"""Reads which states of the base a draft head takes."""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES

LAYER_LIST = "eagle_aux_hidden_state_layer_ids"


def read_base_state_layers(config: ConfigSection, layers: int) -> tuple[int, ...]:
    """Return the base's layers whose input states the draft head takes.

    layers: how many the base has. Lists count outputs of layers; speculators counts inputs. Without a list
    they are the inputs of the layers 2, L // 2 and L - 3.
    """
    section = config
    if config.has("eagle_config"):
        nested = config.section("eagle_config")
        nested.one_of("use_aux_hidden_state", [True], default=True)
        section = nested if nested.data.get(LAYER_LIST) else config
    if section.data.get(LAYER_LIST) in (None, []):  # empty: ModelOpt's default
        usual = (2, layers // 2, layers - 3)
        if not usual[0] < usual[1] < usual[2]:  # of fewer than 7 layers
            raise ValueError(
                f"{config.where}: key {LAYER_LIST!r} is missing: for a language model of {layers} layers it "
                "must list the three layers whose states the head takes"
            )
        return usual
    first = 0 if section is config and is_speculators(config) else 1
    given = section.integers(LAYER_LIST)
    inputs = tuple(number + first for number in given)
    in_order = list(inputs) == sorted(set(inputs))
    if len(given) != NUM_BASE_STATES or not in_order or inputs[0] < first or inputs[-1] > layers:
        raise section.fail(
            LAYER_LIST,
            f"expected {NUM_BASE_STATES} rising layers from 0 to {layers - first} for a language model of "
            f"{layers} layers",
        )
    return inputs


def is_speculators(config: ConfigSection) -> bool:
    """Tell whether a head is in the format of speculators."""
    return config.has("speculators_model_type")
