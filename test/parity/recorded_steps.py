# SPDX-License-Identifier: Apache-2.0
"""Steps of processors that LeRobot has saved, against what the runtime computes.

The module needs neither PyTorch nor LeRobot.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import read_section
from edgellm_ros.builder.policies.lerobot import ACTION, STATE
from edgellm_ros.builder.policies.processors import check_steps, relative_actions
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.affine_space import ActionReference, AffineActionSpace, model_state
from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, StateConfig

VALUES = "values.npz"
CAMERA = "observation.images.top"
SHAPES = {STATE: (5,), ACTION: (4,), CAMERA: (3, 6, 7)}
SIZES = {name: shape[0] for name, shape in SHAPES.items()}
KINDS = {STATE: "STATE", ACTION: "ACTION", CAMERA: "VISUAL"}
NAMES = ("pan", "lift", "left_gripper.pos", "roll")  # of the actions


def compare_normalisers(folder: Path) -> None:
    """Compare normalised states and images, and physical actions."""
    config, values = read_section(folder / "config.json"), np.load(folder / VALUES)
    assert check_steps(folder, config) == {}
    saved = Normalisation(folder, config, Weights(folder), None)
    affine = {name: saved.affine(name, size) for name, size in SIZES.items()}
    features = {
        name: {
            "names": tuple(f"{i}" for i in range(SIZES[name])),
            "units": ("",) * SIZES[name],
            "offset": tuple(affine[name].offset.tolist()),
            "scale": tuple(affine[name].scale.tolist()),
            "shift": tuple(affine[name].shift.tolist()),
        }
        for name in (STATE, ACTION)
    }
    state, space = (
        StateConfig(**features[STATE], model_dim=8),
        AffineSpaceConfig(**features[ACTION], dt=0.1, horizon=6, model_dim=8, relative=(False,) * 4),
    )
    close = {"rtol": 2e-6, "atol": 1e-6}
    found = model_state(values["state"], state)[0, : SIZES[STATE]]
    np.testing.assert_allclose(found, values["normalised_state"], **close)
    camera = affine[CAMERA]
    image = (values["image"] - camera.offset[:, None, None]) / camera.scale[:, None, None]
    np.testing.assert_allclose(image - camera.shift[:, None, None], values["normalised_image"], **close)
    actions = AffineActionSpace(space).denormalise(values["chunk"])
    np.testing.assert_allclose(actions, values["physical_chunk"], **close)


def compare_relative_actions(folder: Path) -> None:
    """Compare the absolute actions of a chunk that is relative to a state."""
    config, values = read_section(folder / "config.json"), np.load(folder / VALUES)
    check_steps(folder, config)
    size = SIZES[ACTION]
    relative = relative_actions(folder, size)
    assert relative == tuple("gripper" not in name for name in NAMES)
    zeros, ones = (0.0,) * size, (1.0,) * size
    space = AffineSpaceConfig(
        names=NAMES, units=("",) * size, offset=zeros, scale=ones, shift=zeros, dt=0.1, horizon=6,
        model_dim=size, relative=relative,
    )  # fmt: skip
    found = ActionReference(values["state"], space).absolute(values["chunk"])
    np.testing.assert_allclose(found, values["absolute_chunk"], rtol=1e-6, atol=1e-6)
