# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.7 in the engines, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import lerobot_policies  # noqa: E402
from groot_cases import (  # noqa: E402
    CASES,
    CROP_SETTINGS,
    CROPS,
    DELAY,
    EXECUTED,
    SAMPLES,
    SQUARE_SETTINGS,
    SQUARED,
    STATS,
    image_key,
    picture,
)
from groot_checks import TOLERANCE, error, inside, previous_chunk, request_of  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection  # noqa: E402
from edgellm_ros.builder.policies.groot.cameras import read_crop, read_crop_of_lerobot  # noqa: E402
from edgellm_ros.builder.policies.groot.version import N1_7  # noqa: E402
from edgellm_ros.multimodal.cropped_image import cropped_image  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.groot_checkpoint import ROBOT  # noqa: E402

VECTORS = "saved statistics of vectors"  # whose images differ by roundings of PyTorch's filter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run LeRobot's model of all cases."""
    root = tmp_path_factory.mktemp("groot")
    lerobot_policies.run("0.6.1", "groot_reference.py", str(root))
    return root


@pytest.mark.parametrize("name", list(CASES))
def test_actions_are_those_of_lerobot(folder, tmp_path, name):
    case, expected = CASES[name], np.load(folder / name / "expected.npz")
    source = folder / name / ("lerobot" if case.saved else "checkpoint")
    space = export(source, tmp_path, embodiment=None if case.saved else ROBOT).policy.action_space
    assert (space.horizon, space.dim) == case.previous.shape
    previous = previous_chunk(case, space)
    with LLMInferenceRuntime(tmp_path) as runtime:
        actions = runtime.handle_request(request_of(case)).actions
        assert actions.shape == (SAMPLES, *case.previous.shape)
        assert error(space, actions, expected["actions"][:, : space.horizon]) < TOLERANCE
        assert inside(space, actions).mean() > 0.4  # limits do not hide what was computed
        found = runtime.handle_request(request_of(case, previous_chunk=previous)).actions
    assert np.abs(found - actions).max() > 0.1
    if "frozen" in expected:
        assert error(space, found, expected["frozen"]) < TOLERANCE
    else:
        kept = previous.actions[EXECUTED : EXECUTED + DELAY]
        np.testing.assert_array_equal(found[:, :DELAY], [kept] * SAMPLES)


def test_a_value_that_never_changes_is_the_one_of_the_statistics(folder):
    low, high = (STATS["action"][name][-1] for name in ("min", "max"))
    assert low == high
    assert (np.load(folder / VECTORS / "expected.npz")["actions"][..., -1] == low).all()


@pytest.mark.parametrize(("size", "letter_box"), CROPS)
def test_images_are_cropped_as_by_lerobot(folder, size, letter_box):
    settings = {**CROP_SETTINGS, "use_albumentations": True, "letter_box_transform": letter_box}
    crop = read_crop(ConfigSection(settings, "processor_config.json"), N1_7)
    expected = np.load(folder / "images.npz")[image_key("crop", size, letter_box)]
    np.testing.assert_array_equal(cropped_image(crop, picture(size)), expected)


@pytest.mark.parametrize(("size", "lerobot"), SQUARED)
def test_squares_are_those_of_pytorch_s_filters(folder, size, lerobot):
    """Bicubic by LeRobot's code, and bilinear as NVIDIA's calls torchvision.

    Pillow and PyTorch round differently; where a bicubic filter is beyond black or white they differ more.
    """
    section = ConfigSection(SQUARE_SETTINGS, "settings")
    crop = read_crop_of_lerobot(section) if lerobot else read_crop(section, N1_7)
    expected = np.load(folder / "images.npz")[image_key("square", size, lerobot)]
    found = cropped_image(crop, picture(size, 64, 192)).astype(int)
    difference = np.abs(found - expected)
    assert difference.max() <= 2
    assert difference.mean() < 0.3
