# SPDX-License-Identifier: Apache-2.0
"""pi0 and pi0.5 in the engines, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import lerobot_policies  # noqa: E402
from pi_cases import DELAY, GUIDANCE, NOISE_SEED, SAMPLES, SHAPES, TASK, Observation  # noqa: E402
from pi_old_inputs import write_old_inputs  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.diffusion.chunking import ChunkCondition  # noqa: E402
from edgellm_ros.diffusion.heads.prompt_text import state_bins  # noqa: E402
from edgellm_ros.multimodal.padded_image import padded_image  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402

TOLERANCE = 1e-3  # of the range of the actions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run LeRobot's models of all shapes."""
    root = tmp_path_factory.mktemp("pi")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        if shape.lerobot == "0.4":
            write_old_inputs(shape, root / name, seed)
    lerobot_policies.run("0.6.1", "pi_reference.py", str(root))
    return root


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    range_ = expected.max() - expected.min()
    assert range_ > 0.5
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * range_)


@pytest.mark.parametrize("name", list(SHAPES))
def test_actions_are_those_of_lerobot(folder, tmp_path, name):
    shape, case = SHAPES[name], folder / name
    seen, expected = Observation(shape, list(SHAPES).index(name)), np.load(case / "expected.npz")
    options = {"vlm": case / "vlm"}
    if shape.lerobot == "0.4":
        with pytest.raises(ValueError, match=r"nothing in the folder tells .*--lerobot 0\.4"):
            export(case / "checkpoint", tmp_path, **options)
        options["lerobot"] = "0.4"
    config = export(case / "checkpoint", tmp_path, **options).policy
    assert (config.kind, config.cameras.names) == (shape.kind, tuple(shape.cameras))
    inputs = {"state": seen.state, "action_samples": SAMPLES, "noise_seed": NOISE_SEED}
    frames, last = seen.frames, list(seen.frames)[-1]
    space = config.action_space
    shift, scale, offset = (np.array(each, np.float32) for each in (space.shift, space.scale, space.offset))
    condition = ChunkCondition(
        actions=(seen.previous + shift) * scale + offset,
        executed=1,
        delay=DELAY,
        horizon=space.horizon - 2,
        max_guidance_weight=GUIDANCE,
    )
    every = LLMGenerationRequest(TASK, images=tuple(frames.values()), **inputs)
    with LLMInferenceRuntime(tmp_path) as runtime:
        actions = runtime.handle_request(every).actions
        check(actions, expected["all"])
        request = LLMGenerationRequest(TASK, images=(frames[last],), cameras=(last,), **inputs)
        found = runtime.handle_request(request).actions
        check(found, expected["last"])
        assert len(frames) == 1 or np.abs(found - actions).max() > 0.01 * np.ptp(actions)
        request = LLMGenerationRequest(
            TASK, images=tuple(frames.values()), previous_chunk=condition, **inputs
        )
        found = runtime.handle_request(request).actions
        check(found, expected["guided"])
        assert np.abs(found - actions).max() > 0.01 * np.ptp(actions)


@pytest.mark.parametrize("size", [(480, 640), (33, 77), (56, 56), (17, 9)])
def test_images_are_filled_up_as_by_lerobot_0_4(size):
    modeling = lerobot_policies.pi("pi05")[1]
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels = torch.tensor(image)[None].float() / 255
    same = size == (56, 56)
    expected = (pixels if same else modeling.resize_with_pad_torch(pixels, 56, 56))[0] * 2 - 1
    found = padded_image(image, 56, -3.0, centred=True)
    np.testing.assert_allclose(found, expected.permute(2, 0, 1).numpy(), atol=1e-5)


def test_bins_of_the_state_are_those_of_lerobot():
    edges = np.arange(-160, 160) / np.float32(128)
    near = [np.nextafter(edges, np.float32(side) * np.inf) for side in (-1, 1)]
    values = np.concatenate([edges, *near]).astype(np.float32)
    expected = np.digitize(torch.tensor(values).numpy(), bins=np.linspace(-1, 1, 256 + 1)[:-1]) - 1
    assert state_bins(values) == expected.tolist()
