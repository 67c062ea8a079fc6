# SPDX-License-Identifier: Apache-2.0
"""SmolVLA in the engines, against LeRobot's own code with random weights."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import lerobot_policies  # noqa: E402
from policy_shapes import SMOLVLA_SHAPES, SmolVLAShape  # noqa: E402
from recorded_policies import SEED, TASK, compare, frames_of, noise  # noqa: E402
from smolvla_reference import SmolVLAReference, record_smolvla  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.diffusion.chunking import ChunkCondition  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.engine.tensor import Tensor  # noqa: E402
from edgellm_ros.multimodal.padded_image import padded_image  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402

TOLERANCE = 1e-3  # of velocities and physical actions of a size of some units
IN_DETAIL, OTHERS = list(SMOLVLA_SHAPES)[:3], list(SMOLVLA_SHAPES)[3:]


class Case:
    """A random SmolVLA of LeRobot, its engine, and one observation."""

    def __init__(self, shape: SmolVLAShape, folder) -> None:
        self.reference = SmolVLAReference(shape, folder, seed=len(shape.cameras))
        self.engine = folder / "engine"
        self.config = export(self.reference.save(), self.engine)
        self.frames, _ = frames_of(shape.cameras, seed=1)
        self.state = np.random.default_rng(1).normal(size=shape.state).astype(np.float32)
        self.samples = 3
        horizon, values = self.config.action.action_space.horizon, self.config.action.action_space.model_dim
        self.noise = noise(self.samples, horizon, values)

    def expected(self, **frames: np.ndarray) -> np.ndarray:
        return self.reference.actions(
            self.reference.batch(TASK, self.state, frames or self.frames), self.noise
        )

    def request(self, **changes) -> LLMGenerationRequest:
        inputs = {"images": tuple(self.frames.values()), "state": self.state, "noise_seed": SEED}
        return LLMGenerationRequest(TASK, action_samples=self.samples, **(inputs | changes))

    def run(self, part: str, dims: dict[str, int], **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Run one engine."""
        device = CpuDevice()
        engine = EngineExecutor.open(self.engine / part / "model.onnx", device)
        tensors = {name: Tensor.from_array(np.ascontiguousarray(array)) for name, array in inputs.items()}
        outputs = [binding for binding in engine.bindings.values() if not binding.is_input]
        for each in outputs:
            shape = tuple(dim if isinstance(dim, int) else dims[dim] for dim in each.shape)
            tensors[each.name] = device.empty(shape, each.dtype)
        engine.prepare(0, dims, tensors)
        engine.execute()
        return {each.name: tensors[each.name].array for each in outputs}


@pytest.fixture(scope="module", params=IN_DETAIL)
def case(request, tmp_path_factory) -> Case:
    return Case(SMOLVLA_SHAPES[request.param], tmp_path_factory.mktemp("smolvla"))


@pytest.fixture(scope="module")
def runtime(case):
    with LLMInferenceRuntime(case.engine) as runtime:
        yield runtime


def test_keys_values_and_velocities_are_those_of_lerobot(case):
    reference, cameras = case.reference, case.config.action.cameras
    batch = reference.batch(TASK, case.state, case.frames)
    embeds, padding, cache = prefix = reference.prefix(batch)
    pixels = np.stack([padded_image(frame, cameras.image_size) for frame in case.frames.values()])
    rows = len(case.frames) * cameras.tokens
    images = case.run("visual", {"N": len(pixels), "R": rows}, pixel_values=pixels)["image_embeds"]
    np.testing.assert_allclose(images, embeds[0, :rows].numpy(), atol=TOLERANCE)

    kept = padding[0].numpy()
    tokens = batch["observation.language.tokens"][batch["observation.language.attention_mask"]].numpy()
    state = reference.policy.prepare_state(batch).numpy()
    dims = {"I": rows, "L": len(tokens), "S": int(kept.sum())}
    context = case.run("prefix", dims, image_embeds=images, token_ids=tokens, state=state)
    found = 0
    for layer, own in enumerate(reference.self_layers):
        if own:
            for name, key in (("key_states", "key"), ("value_states", "value")):
                expected = cache[layer][name][0, kept].transpose(0, 1).numpy()
                np.testing.assert_allclose(context[f"context_{key}_{layer}"][0], expected, atol=TOLERANCE)
                found += 1
    assert found

    for time in (1.0, 0.4, 0.1):
        times = np.full(case.noise.shape[1], time, np.float32)
        velocity = case.run(
            "action", {"n": case.samples, "S": dims["S"]}, trajectory=case.noise, time=times, **context
        )["velocity"]
        np.testing.assert_allclose(velocity, reference.velocity(prefix, case.noise, time), atol=TOLERANCE)


def test_actions_are_those_of_lerobot(case, runtime):
    response = runtime.handle_request(case.request())
    expected = case.expected()
    assert response.actions.shape == expected.shape
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(response.actions, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", OTHERS)
def test_actions_of_further_sizes_are_those_of_lerobot(name, tmp_path):
    record_smolvla(name, tmp_path)
    compare(tmp_path, tmp_path / "engine")


def test_actions_from_the_last_camera_alone_are_those_of_lerobot(case, runtime):
    name = list(case.frames)[-1]
    response = runtime.handle_request(case.request(images=(case.frames[name],), cameras=(name,)))
    np.testing.assert_allclose(response.actions, case.expected(**{name: case.frames[name]}), atol=TOLERANCE)


def test_guided_chunks_are_those_of_lerobot(case, runtime):
    """The correction of LeRobot is the error itself.

    LeRobot computes the velocity before it asks for gradients.
    """
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    policy, space = case.reference.policy, case.config.action.action_space
    delay, end = 1, space.horizon - 2
    rng = np.random.default_rng(2)
    normalised = rng.normal(size=(space.horizon, space.dim)).astype(np.float32)
    shift, scale, offset = (np.array(each, np.float32) for each in (space.shift, space.scale, space.offset))
    chunk = (normalised + shift) * scale + offset
    condition = ChunkCondition(actions=chunk, executed=1, delay=delay, horizon=end, max_guidance_weight=10.0)
    found = runtime.handle_request(case.request(previous_chunk=condition)).actions
    policy.config.rtc_config = RTCConfig(
        enabled=True,
        prefix_attention_schedule=RTCAttentionSchedule.LINEAR,
        max_guidance_weight=10.0,
        execution_horizon=end,
    )
    policy.init_rtc_processor()
    try:
        batch = case.reference.batch(TASK, case.state, case.frames)
        left = torch.tensor(normalised[1:]).expand(case.samples, -1, -1)
        expected = case.reference.actions(
            batch, case.noise, inference_delay=delay, prev_chunk_left_over=left, execution_horizon=end
        )
    finally:
        policy.config.rtc_config = None
        policy.init_rtc_processor()
        policy.model.rtc_processor = None
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("size", [(480, 640), (33, 77), (64, 64), (17, 9)])
def test_images_are_resized_and_filled_up_as_by_lerobot(size):
    modeling = lerobot_policies.smolvla()[0]
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels = torch.tensor(image).permute(2, 0, 1)[None].float() / 255
    expected = modeling.resize_with_pad(pixels, 64, 64, pad_value=0)[0] * 2 - 1
    np.testing.assert_allclose(padded_image(image, 64), expected.numpy(), atol=1e-5)


def test_actions_with_an_adapter_of_peft_are_those_of_lerobot(tmp_path):
    """The folder is that of `lerobot-train` with PEFT: no weights of its own."""
    peft = pytest.importorskip("peft")
    case = Case(SMOLVLA_SHAPES["two cameras"], tmp_path / "base")
    reference, folder = case.reference, tmp_path / "adapter"
    reference.policy.name_or_path = str(reference.checkpoint)  # as LeRobot's wrap_with_peft
    modules = "model.vlm_with_expert.lm_expert.*.(q|v)_proj|model.(state_proj|action_out_proj)"
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=modules, init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(reference.policy, config)
    wrapped.save_pretrained(folder)
    reference.config.use_peft = True
    reference.config.save_pretrained(folder)
    for step in (reference.before, reference.after):
        step.save_pretrained(folder)
    engine = tmp_path / "merged"
    export(folder, engine, vlm=reference.vlm)
    expected = case.expected()
    with LLMInferenceRuntime(engine) as runtime:
        found = runtime.handle_request(case.request()).actions
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    with LLMInferenceRuntime(case.engine) as runtime:  # the base alone answers otherwise
        assert np.abs(runtime.handle_request(case.request()).actions - expected).max() > 10 * TOLERANCE
