# SPDX-License-Identifier: Apache-2.0
"""Steps of processors against LeRobot's own classes, each by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import lerobot_policies  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection  # noqa: E402
from edgellm_ros.builder.policies.lerobot import ACTION, STATE, camera_names  # noqa: E402
from edgellm_ros.builder.policies.processors import check_steps  # noqa: E402
from edgellm_ros.builder.policies.statistics import NEEDED, Normalisation  # noqa: E402
from edgellm_ros.builder.weights.weights import Weights  # noqa: E402
from edgellm_ros.diffusion.affine_space import AffineActionSpace, model_state  # noqa: E402
from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, StateConfig  # noqa: E402

CAMERA = "observation.images.top"
SIZES = {STATE: 5, ACTION: 4, CAMERA: 3}
KINDS = {STATE: "STATE", ACTION: "ACTION", CAMERA: "VISUAL"}


@pytest.fixture(scope="module")
def steps():
    """Import LeRobot's normalisers and the step that renames."""
    lerobot_policies.smolvla()
    from lerobot.processor import normalize_processor, rename_processor

    return normalize_processor, rename_processor


def write_folder(folder, normalisers, way: str, epsilon: float, rename_map=None):
    """Save LeRobot's normalisers; some ranges and standard deviations are 0."""
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.processor.pipeline import DataProcessorPipeline

    rng, stats = np.random.default_rng(7), {}
    for name, size in SIZES.items():
        low, width = rng.normal(size=size) * 3, rng.uniform(0.1, 4, size)
        width[1] = 0
        columns = {"mean": low, "std": width, "min": low - 1, "max": low - 1 + width}
        columns |= {"q01": low, "q99": low + width, "q10": low + 0.1, "q90": low + 0.1 + width}
        shape = (size, 1, 1) if name == CAMERA else (size,)
        stats[name] = {each: value.astype(np.float32).reshape(shape) for each, value in columns.items()}
    shapes = {name: (3, 6, 7) if name == CAMERA else (size,) for name, size in SIZES.items()}
    features = {name: PolicyFeature(FeatureType(KINDS[name]), shape) for name, shape in shapes.items()}
    ways = {FeatureType(kind): NormalizationMode(way) for kind in KINDS.values()}
    own = {"features": features, "norm_map": ways, "stats": stats, "eps": epsilon}
    before = [normalisers.NormalizerProcessorStep(**own)]
    if rename_map is not None:
        from lerobot.processor.rename_processor import RenameObservationsProcessorStep

        before.insert(0, RenameObservationsProcessorStep(rename_map))
    after = [normalisers.UnnormalizerProcessorStep(**own)]
    DataProcessorPipeline(before, name="policy_preprocessor").save_pretrained(folder)
    DataProcessorPipeline(after, name="policy_postprocessor").save_pretrained(folder)
    inputs = {name: {"type": KINDS[name], "shape": list(shapes[name])} for name in (CAMERA, STATE)}
    config = {
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": list(shapes[ACTION])}},
        "normalization_mapping": dict.fromkeys(KINDS.values(), way),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return ConfigSection(config, str(folder / "config.json")), stats, before[-1], after[-1]


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
@pytest.mark.parametrize("way", [*NEEDED, "IDENTITY"])
def test_normalised_values_are_those_of_lerobot(steps, tmp_path, way, epsilon):
    config, stats, before, after = write_folder(tmp_path, steps[0], way, epsilon)
    assert check_steps(tmp_path, config) == {}
    saved = Normalisation(tmp_path, config, Weights(tmp_path), None)
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
    rng = np.random.default_rng(3)
    values = rng.normal(size=SIZES[STATE]).astype(np.float32) * 4
    lower = NEEDED.get(way, ("min",))[0]
    values[1] = stats[STATE][lower][1]  # any other value explodes where the range is 0
    image = rng.uniform(size=(3, 6, 7)).astype(np.float32)
    image[1] = stats[CAMERA][lower][1]
    found = before._normalize_observation({STATE: torch.tensor(values), CAMERA: torch.tensor(image)}, False)
    np.testing.assert_allclose(model_state(values, state)[0, :5], found[STATE].numpy(), rtol=2e-6, atol=1e-6)
    assert way == "IDENTITY" or lower == "mean" or model_state(values, state)[0, 1] == -1
    camera = affine[CAMERA]
    ours = (image - camera.offset[:, None, None]) / camera.scale[:, None, None] - camera.shift[:, None, None]
    np.testing.assert_allclose(ours, found[CAMERA].numpy(), rtol=2e-6, atol=1e-6)

    chunk = rng.normal(size=(6, 8)).astype(np.float32) * 2
    expected = after._normalize_action(torch.tensor(chunk[:, : SIZES[ACTION]]), True).numpy()
    actions = AffineActionSpace(space)
    np.testing.assert_allclose(actions.denormalise(chunk), expected, rtol=1e-6, atol=1e-6)


def test_renamed_observations_are_those_of_lerobot(steps, tmp_path):
    renames = {"observation.images.front": CAMERA, "pose": STATE}
    config, *_ = write_folder(tmp_path, steps[0], "MEAN_STD", 1e-8, renames)
    renamed = check_steps(tmp_path, config)
    given = {"observation.images.front": 1, "pose": 2, "other": 3}
    expected = steps[1].RenameObservationsProcessorStep(renames).observation(given)
    assert {name: given[renamed.get(name, name)] for name in expected} == expected
    assert camera_names(config, renamed) == ("front",)
