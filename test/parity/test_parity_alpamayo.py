# SPDX-License-Identifier: Apache-2.0
"""Alpamayo's published layout against transformers' Qwen3-VL.

The expert's layers are transformers' Qwen3VLTextModel too. The flow and what is around the layers are
written from their formulas.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from edgellm_ros.kernels.random import normal_noise  # noqa: E402
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.alpamayo_checkpoint import CONFIG, export_driving  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402

TOLERANCE = 1e-3  # of a standard deviation of the actions
SAMPLES, SEED = 2, 7


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what is asked of it."""

    changes: dict[str, Any] = field(default_factory=dict)  # of config.json
    text: dict[str, Any] = field(default_factory=dict)  # of the language model's configuration
    images: tuple[tuple[int, int], ...] = ()  # height and width of each camera's frames
    frames: int = 0  # of each camera, written with the names of cameras and frames; 0 = one, without names
    navigation: str = ""
    guidance: float | None = None
    steps: int | None = None  # None = those of the checkpoint

    def fields(self) -> dict[str, Any]:
        """Make the images, and the fields of a request that has them."""
        if not self.frames:
            return {"images": tuple(make_image(*size) for size in self.images)}
        parts = []
        for camera, (height, width) in enumerate(self.images):
            parts.append(TextPart(f"Camera {camera}: "))
            for frame in range(self.frames):
                parts += [TextPart(f"frame {frame} "), ImagePart(make_image(height + frame, width))]
        return {"messages": (Message("user", tuple(parts)),)}


def expert(**keys):
    return {"expert_cfg": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, **keys}}


def encoder(**keys):
    return {"action_in_proj_cfg": {**CONFIG["action_in_proj_cfg"], **keys}}


def space(**keys):
    return {"action_space_cfg": {**CONFIG["action_space_cfg"], **keys}}


def flow(steps):
    return {"diffusion_cfg": {**CONFIG["diffusion_cfg"], "num_inference_steps": steps}}


R1 = {"model_type": "alpamayo_r1"}
LEFT = "turn left in 40 m"
CASES = {
    "guided without images": Case(navigation=LEFT, guidance=1.5),
    "the expert of the language model's size": Case({**R1, "expert_cfg": None}, images=((48, 64),)),
    "guided in fp32": Case(
        {"model_dtype": "float32", **expert(hidden_size=24, num_attention_heads=2, num_hidden_layers=2)},
        images=((48, 64), (131, 33)),
        navigation=LEFT,
        guidance=3.0,
    ),
    "a history of 16 points": Case(
        {
            "keep_same_dtype": False,
            "tokens_per_history_traj": 48,
            **encoder(num_enc_layers=1, num_fourier_feats=20, max_freq=50.0),
            **space(n_waypoints=9),
        },
        images=((20, 150),),
    ),
    "four cameras with two frames": Case(
        {**R1, **expert(num_attention_heads=6, hidden_size=40), **flow(10)},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        images=((32, 48), (48, 32), (40, 40), (24, 64)),
        frames=2,
    ),
    "an instruction without guidance": Case(
        {"tokens_per_history_traj": 24, **expert(num_attention_heads=8), **space(n_waypoints=16, dt=0.2)},
        {"num_attention_heads": 8, "num_key_value_heads": 1},
        images=((48, 64), (64, 48)),
        frames=3,
        navigation="keep straight on, then take the second exit",
        steps=7,
    ),
    "a weight of 0 takes the instruction away": Case(
        {"tokens_per_history_traj": 6, **encoder(hidden_size=16, num_enc_layers=2), **flow(1)},
        {"num_key_value_heads": 4},
        images=((48, 64),),
        frames=1,
        navigation=LEFT,
        guidance=0.0,
    ),
    "half of a weight, in fp16": Case(
        {"model_dtype": "float16", **expert(intermediate_size=64, num_hidden_layers=1), **flow(3)},
        {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64},
        images=((64, 96), (33, 47), (48, 64)),
        navigation="turn right",
        guidance=0.5,
    ),
}


class Reference:
    """An Alpamayo in transformers' classes, in fp32."""

    def __init__(self, checkpoint, vocab_size):
        self.vlm_folder = checkpoint / "vlm"
        self.config = json.loads((checkpoint / "config.json").read_text())
        self.weights = {
            name: value.float() for name, value in load_file(checkpoint / "model.safetensors").items()
        }
        config = transformers.AutoConfig.from_pretrained(self.vlm_folder)
        config.text_config.vocab_size = vocab_size
        tokenizer = Tokenizer.from_file(str(checkpoint.with_name("engine") / "tokenizer.json"))
        texts = [f"<i{i}>" for i in range(self.config["traj_vocab_size"])]
        self.masked = [tokenizer.token_to_id(text) for text in (*texts, "<|image_pad|>", "<|video_pad|>")]
        self.vlm = self._filled(transformers.Qwen3VLForConditionalGeneration(config), "vlm.")
        shape = {**config.text_config.to_dict(), **(self.config["expert_cfg"] or {})}
        expert = transformers.Qwen3VLTextModel(transformers.Qwen3VLTextConfig(**shape))
        del expert.embed_tokens
        self.expert = self._filled(expert, "expert.")

    def _filled(self, model, prefix):
        found = {
            name.removeprefix(prefix): value
            for name, value in self.weights.items()
            if name.startswith(prefix)
        }
        model.load_state_dict(found)
        return model.eval().requires_grad_(False)

    def inputs(self, ids, images):
        """Make the inputs of a prompt."""
        found = {"input_ids": torch.tensor([ids])}
        found["mm_token_type_ids"] = (found["input_ids"] == self.vlm.config.image_token_id).int()
        if images:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self.vlm_folder)
            processor.size = {
                "shortest_edge": self.config["min_pixels"],
                "longest_edge": self.config["max_pixels"],
            }
            found |= processor(list(images), return_tensors="pt")
        return found

    def read(self, ids, images, answer):
        """Return logits of the answer's tokens, KV caches and the next position."""
        found = self.vlm(**self.inputs([*ids, *answer], images), use_cache=True)
        caches = [(layer.keys, layer.values) for layer in found.past_key_values.layers]
        length = len(ids) + len(answer) + (int(self.vlm.model.rope_deltas) if images else 0)
        return found.logits[0, len(ids) - 1 : -1], caches, length

    def sample(self, contexts, weights, noise, steps):
        """Euler's method from noise [n,T,A] at time 0.

        contexts: caches and the next position of each.
        """
        x = torch.from_numpy(noise)
        for step in range(steps):
            found = [self.velocity(*context, x, step / steps) for context in contexts]
            x = x + sum(weight * each for weight, each in zip(weights, found, strict=True)) / steps
        return x.numpy()

    def velocity(self, caches, position, x, time):
        samples, count = x.shape[:2]
        cache = transformers.DynamicCache()
        for layer, pair in enumerate(caches):
            cache.update(*(rows.expand(samples, -1, -1, -1) for rows in pair), layer)
        states = self.expert(
            inputs_embeds=self._steps(x, time),
            position_ids=(position + torch.arange(count)).expand(3, samples, count),
            past_key_values=cache,
            attention_mask=torch.zeros(samples, 1, count, caches[0][0].shape[2] + count),
        ).last_hidden_state
        return self._linear("action_out_proj", states)

    def _steps(self, x, time):
        encoder, trunk = self.config["action_in_proj_cfg"], "action_in_proj.encoder.trunk"
        frequencies = torch.logspace(0, math.log10(encoder["max_freq"]), encoder["num_fourier_feats"] // 2)
        if self.config["keep_same_dtype"]:
            frequencies = frequencies.to(getattr(torch, self.config["model_dtype"])).float()
        values = [x[..., 0], x[..., 1], torch.full(x.shape[:2], time)]
        angles = [value[..., None] * frequencies * 2 * math.pi for value in values]
        features = [math.sqrt(2) * part(angle) for angle in angles for part in (torch.sin, torch.cos)]
        x = self._linear(f"{trunk}.0", torch.cat(features, -1))
        for layer in range(1, encoder["num_enc_layers"] + 1):
            x = torch.nn.functional.silu(x)
            scale = self.weights[f"{trunk}.{3 * layer - 1}.weight"]
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
            x = self._linear(f"{trunk}.{3 * layer}", x)
        shift = self.weights["action_in_proj.norm.weight"], self.weights["action_in_proj.norm.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], *shift, eps=1e-5)

    def _linear(self, name, x):
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def physical(self, actions):
        space = self.config["action_space_cfg"]
        kinds = "accel", "curvature"
        std, mean = (np.array([space[f"{kind}_{name}"] for kind in kinds]) for name in ("std", "mean"))
        low, high = np.array([space[f"{kind}_bounds"] for kind in kinds]).T
        return np.clip(actions * std + mean, low, high), std


@pytest.mark.parametrize("name", CASES)
def test_words_and_trajectories_match(tmp_path, runtime_device, name):
    """Of models that take navigation, guided trajectories match too."""
    case, seed = CASES[name], list(CASES).index(name)
    tokens = case.changes.get("tokens_per_history_traj", CONFIG["tokens_per_history_traj"])
    history = np.random.default_rng(seed).normal(0, 0.3, (tokens // 3, 4)).cumsum(0)

    def request(max_tokens=200, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        fields = {**case.fields(), "history": history, "navigation": case.navigation, **fields}
        return LLMGenerationRequest(sampling=sampling, **fields)

    checkpoint, config = export_driving(
        tmp_path, request(max_tokens=12), seed, text=case.text, **case.changes
    )
    steps = case.steps or config.action.num_denoise_steps
    asked = request(action_samples=SAMPLES, noise_seed=SEED, guidance=case.guidance, denoise_steps=case.steps)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
        runtime.handle_request(request(max_tokens=1, navigation=""))
        unguided = runtime.base_model_input_token_ids[0]
        found = runtime.handle_request(asked)
        ids = runtime.base_model_input_token_ids[0]
    reference, images = Reference(checkpoint, config.llm.vocab_size), asked.prompt_images
    logits, *context = reference.read(ids, images, found.token_ids)
    logits[:, reference.masked] = -math.inf
    assert found.token_ids == logits.argmax(-1).tolist()
    contexts, weights = [context], [1.0]
    if case.guidance is not None:
        contexts.append(reference.read(unguided, images, found.token_ids)[1:])
        weights = [case.guidance, 1 - case.guidance]
    shape = SAMPLES, config.action.action_space.horizon, config.action.action_space.dim
    noise = normal_noise(SEED, SAMPLES, shape[1] * shape[2]).reshape(shape)
    expected, std = reference.physical(reference.sample(contexts, weights, noise, steps))
    np.testing.assert_allclose(found.actions / std, expected / std, atol=TOLERANCE, rtol=0)
    assert np.ptp(expected / std, axis=0).max() > 0.1
