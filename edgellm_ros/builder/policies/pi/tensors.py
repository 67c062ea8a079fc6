# SPDX-License-Identifier: Apache-2.0
"""Gives the tensors of a pi0 or pi0.5 the same names, whoever saved them.

LeRobot's names begin with "model.", those of openpi do not. transformers has had two names of the vision
tower. Of PaliGemma's embedding, which is its LM head too, files have one copy or two.

Source: LeRobot 0.6.1, PI05Policy._fix_pytorch_state_dict_keys.
"""

from __future__ import annotations

from edgellm_ros.builder.policies.pi.architecture import EMBEDDING, MODEL, PALIGEMMA, TOWER
from edgellm_ros.builder.weights.weights import Weights

LM_HEAD = f"{PALIGEMMA}.lm_head.weight"
TIME, ACTION_TIME = f"{MODEL}.time_mlp_", f"{MODEL}.action_time_mlp_"


def canonical_weights(weights: Weights, adaptive: bool) -> Weights:
    """Return the tensors under the names of LeRobot's model.

    adaptive: whether it is a pi0.5. ValueError for two tensors of one name.
    """
    names: dict[str, str] = {}
    for stored in weights:
        name = stored if stored.startswith(f"{MODEL}.") else f"{MODEL}.{stored}"
        if name.startswith(f"{TOWER}.vision_model."):
            name = f"{TOWER}.{name.removeprefix(f'{TOWER}.vision_model.')}"
        given, wanted = (ACTION_TIME, TIME) if adaptive else (TIME, ACTION_TIME)
        if name.startswith(given):
            name = f"{wanted}{name.removeprefix(given)}"
        if name in names:
            raise ValueError(f"{weights.where}: {stored!r} and {names[name]!r} are the same tensor")
        names[name] = stored
    if LM_HEAD in names:
        names.setdefault(EMBEDDING, names[LM_HEAD])
    return weights.renamed(names)


def matrix_shape(weights: Weights, name: str) -> tuple[int, int]:
    """Return the shape of a matrix.

    ValueError for a tensor that is missing, or no matrix.
    """
    shape = weights.shape(name)
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{weights.where}: tensor {name!r} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]
