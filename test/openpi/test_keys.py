# SPDX-License-Identifier: Apache-2.0
"""Keys of observations: defaults, maps in maps, images and states of all forms."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.openpi.keys import ObservationKeys, default_image_key, make_keys
from edgellm_ros.openpi.observation import read_observation

IMAGE = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
KEYS = ObservationKeys(("top",), ("observation/image",), ("observation/state",))
OBSERVATION = {"observation/image": IMAGE, "observation/state": np.arange(3.0), "prompt": "go"}


@pytest.mark.parametrize(
    ("camera", "key"),
    [
        ("top", "observation/top"),
        ("observation.images.top", "observation/top"),
        ("observation.image", "observation/image"),
        ("observation.image2", "observation/image2"),
    ],
)
def test_default_keys_of_images(camera, key):
    assert default_image_key(camera) == key


def test_given_keys_replace_the_defaults():
    keys = make_keys(("top", "wrist"), images={"wrist": "w"}, state=["a", "b"], prompt="task", has_state=True)
    assert keys == ObservationKeys(("top", "wrist"), ("observation/top", "w"), ("a", "b"), "task")
    assert make_keys(("top",), images={}, state=[], prompt="", has_state=False).state == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": {"left": "x"}}, "unknown camera 'left'; the policy has top, wrist"),
        ({"images": {"top": "x", "wrist": "x"}}, "keys must be different and not empty"),
        ({"state": ["prompt"]}, "keys must be different and not empty"),
        ({"state": ["x"], "has_state": False}, "this policy takes no state, but 'x' is a key of it"),
    ],
)
def test_keys_that_do_not_fit_are_refused(changes, message):
    options = {"images": {}, "state": [], "prompt": "", "has_state": True, **changes}
    with pytest.raises(ValueError, match=message):
        make_keys(("top", "wrist"), **options)


def test_an_observation_with_flat_names():
    found = read_observation(OBSERVATION, KEYS)
    np.testing.assert_array_equal(found.images["top"], IMAGE)
    assert (found.state.tolist(), found.state.dtype, found.prompt) == ([0, 1, 2], np.float32, "go")


def test_an_observation_with_maps_and_channels_first():
    keys = ObservationKeys(("top", "wrist"), ("images/cam_high", "images/cam_low"), ("state",))
    found = read_observation({"images": {"cam_high": IMAGE.transpose(2, 0, 1)}, "state": [1, 2.5]}, keys)
    np.testing.assert_array_equal(found.images["top"], IMAGE)
    assert (list(found.images), found.state.tolist(), found.prompt) == (["top"], [1, 2.5], "")


def test_a_state_in_parts():
    keys = ObservationKeys(("top",), ("i",), ("joints", "gripper", "on"))
    observation = {"i": IMAGE, "joints": np.array([1, 2], np.int16), "gripper": np.float64(0.5), "on": True}
    assert read_observation(observation, keys).state.tolist() == [1, 2, 0.5, 1]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ([], "an observation must be a map, got list"),
        ({"state": 1}, "no image: expected observation/image; the observation has state"),
        ({"observation/image": 3}, "must be an image uint8 .* got int"),
        ({"observation/image": IMAGE.astype(float)}, r"got float64 \[4, 6, 3\]"),
        ({"observation/image": IMAGE[..., :2]}, r"got uint8 \[4, 6, 2\]"),
        ({"observation/image": IMAGE[:0]}, r"got uint8 \[0, 6, 3\]"),
        ({**OBSERVATION, "observation/state": None}, "observation/state is missing; the observation has"),
        ({**OBSERVATION, "observation/state": "a"}, "must be a number or numbers .* got str"),
        ({**OBSERVATION, "observation/state": [[1]]}, "must be a number or numbers .* got list"),
        ({**OBSERVATION, "observation/state": np.zeros((1, 3))}, r"got float64 \[1, 3\]"),
        ({**OBSERVATION, "prompt": 5}, "prompt must be a text, got int"),
    ],
)
def test_what_an_observation_lacks_is_named(observation, message):
    with pytest.raises(ValueError, match=message):
        read_observation(observation, KEYS)
