# SPDX-License-Identifier: Apache-2.0
"""What steps of LeRobot's processors save and compute, each by itself.

A folder has the processors, the files of a policy around them, and the values before and after a step.
"""

from __future__ import annotations

import json
from pathlib import Path

import lerobot_policies
import numpy as np
import torch
from recorded_steps import CAMERA, KINDS, NAMES, SHAPES, SIZES, VALUES
from safetensors.numpy import save_file

from edgellm_ros.builder.policies.lerobot import ACTION, STATE
from edgellm_ros.builder.policies.statistics import NEEDED


def record_normalisers(way: str, epsilon: float, folder: Path) -> None:
    """Save normalisers, and what they make of a state, an image and a chunk."""
    lerobot_policies.act()
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.processor.normalize_processor import NormalizerProcessorStep, UnnormalizerProcessorStep

    stats = _statistics()
    own = {
        "features": {name: PolicyFeature(FeatureType(KINDS[name]), SHAPES[name]) for name in SIZES},
        "norm_map": {FeatureType(kind): NormalizationMode(way) for kind in KINDS.values()},
        "stats": stats,
        "eps": epsilon,
    }
    before, after = NormalizerProcessorStep(**own), UnnormalizerProcessorStep(**own)
    _save(folder, [before], [after], way)
    rng, lower = np.random.default_rng(3), NEEDED.get(way, ("min",))[0]
    state, image = rng.normal(size=SHAPES[STATE]) * 4, rng.uniform(size=SHAPES[CAMERA])
    state[1] = stats[STATE][lower][1]  # any other value explodes where the range is 0
    image[1] = stats[CAMERA][lower][1]
    chunk = rng.normal(size=(6, SIZES[ACTION])) * 2
    given = {name: torch.tensor(array, dtype=torch.float32) for name, array in zip(
        (STATE, CAMERA, ACTION), (state, image, chunk), strict=True
    )}  # fmt: skip
    found = before._normalize_observation({STATE: given[STATE], CAMERA: given[CAMERA]}, False)
    np.savez(
        folder / VALUES,
        state=given[STATE].numpy(),
        image=given[CAMERA].numpy(),
        chunk=given[ACTION].numpy(),
        normalised_state=found[STATE].numpy(),
        normalised_image=found[CAMERA].numpy(),
        physical_chunk=after._normalize_action(given[ACTION], True).numpy(),
    )


def record_renames(renames: dict[str, str], folder: Path) -> dict[str, int]:
    """Save the step that renames, and return what it makes of numbered observations."""
    lerobot_policies.act()
    from lerobot.processor.rename_processor import RenameObservationsProcessorStep

    step = RenameObservationsProcessorStep(renames)
    _save(folder, [step], [], "IDENTITY")
    return step.observation({name: number for number, name in enumerate([*renames, "other"])})


def record_relative_actions(folder: Path) -> None:
    """Save the steps of relative actions, and the absolute actions that they compute."""
    lerobot_policies.act()
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
    from lerobot.processor.pipeline import DataProcessorPipeline
    from lerobot.processor.relative_action_processor import (
        AbsoluteActionsProcessorStep,
        RelativeActionsProcessorStep,
    )

    relative = RelativeActionsProcessorStep(True, ["GRIP", ""], list(NAMES))
    absolute = AbsoluteActionsProcessorStep(True, relative)
    _save(folder, [relative], [absolute], "IDENTITY")
    rng = np.random.default_rng(4)
    state, chunk = (
        rng.normal(size=size).astype(np.float32) for size in (SIZES[STATE], (1, 6, SIZES[ACTION]))
    )
    DataProcessorPipeline([relative])({STATE: torch.tensor(state)[None]})
    after = DataProcessorPipeline(
        [absolute], to_transition=policy_action_to_transition, to_output=transition_to_policy_action
    )
    found = after(torch.tensor(chunk)).numpy()
    np.savez(folder / VALUES, state=state, chunk=chunk[0], absolute_chunk=found[0])


def _statistics() -> dict[str, dict[str, np.ndarray]]:
    """Make statistics of all features; some ranges and standard deviations are 0."""
    rng, stats = np.random.default_rng(7), {}
    for name, size in SIZES.items():
        low, width = rng.normal(size=size) * 3, rng.uniform(0.1, 4, size)
        width[1] = 0
        columns = {"mean": low, "std": width, "min": low - 1, "max": low - 1 + width}
        columns |= {"q01": low, "q99": low + width, "q10": low + 0.1, "q90": low + 0.1 + width}
        shape = (size, 1, 1) if name == CAMERA else (size,)
        stats[name] = {each: value.astype(np.float32).reshape(shape) for each, value in columns.items()}
    return stats


def _save(folder: Path, before: list, after: list, way: str) -> None:
    from lerobot.processor.pipeline import DataProcessorPipeline

    for name, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        DataProcessorPipeline(steps, name=name).save_pretrained(folder)
    features = {name: {"type": KINDS[name], "shape": list(SHAPES[name])} for name in SIZES}
    config = {
        "input_features": {name: features[name] for name in (CAMERA, STATE)},
        "output_features": {ACTION: features[ACTION]},
        "normalization_mapping": dict.fromkeys(KINDS.values(), way),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
