# SPDX-License-Identifier: Apache-2.0
"""Differences between the runtime and a reference in one arena scene.

The scene passes through the engines and the runtime, and through transformers and PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from engine_graphs import Encoders, Graph, LanguageModel
from expert_reference import ExpertReference
from thinker_reference import Answer, Prompt, ThinkerReference
from unseen_scenes import MAX_TOKENS, Scene

from edgellm_ros.builder import export
from edgellm_ros.engine.device import Device
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

LOGPROBS = 8


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences in one scene.

    `actions`: of normalised actions, after the runtime's Euler steps.
    """

    tokens: tuple[list[int], list[int]]  # engines, reference
    logits: float
    logprobs: float
    velocities: float
    actions: float
    has_actions: bool


class Comparison:
    """The engines of a directory against the checkpoint that they are exported from.

    The runtime works on `device`, the graphs alone on the CPU.
    """

    def __init__(
        self, engine: Path, device: str | Device, thinker: ThinkerReference, expert: ExpertReference
    ) -> None:
        self.thinker = thinker
        self.expert = expert
        self.runtime = LLMInferenceRuntime(engine, device)
        self.language_model = LanguageModel(engine)
        self.encoders = Encoders(engine)
        self.action = Graph(engine / "action" / "model.onnx")

    @classmethod
    def export(cls, checkpoint: Path, engine: Path, device: str | Device) -> Comparison:
        """Export to the directory `engine` first."""
        export(checkpoint, engine)
        expert = ExpertReference.load(checkpoint / "action_expert")
        return cls(engine, device, ThinkerReference(checkpoint), expert)

    def compare(self, scene: Scene) -> Differences:
        prompt = self.thinker.prompt(scene.prompt, image=scene.image, history=scene.history)
        answer = self.thinker.answer(prompt, MAX_TOKENS)
        response = self.runtime.handle_request(scene.request(LOGPROBS))
        velocities, trajectory = self._velocities(answer, scene.noise_seed)
        return Differences(
            tokens=(response.token_ids, answer.token_ids),
            logits=self._logits(prompt, answer),
            logprobs=_logprobs(response.logprobs, answer),
            velocities=velocities,
            actions=self._actions(response.actions, answer, trajectory),
            has_actions=response.actions is not None,
        )

    def _logits(self, prompt: Prompt, answer: Answer) -> float:
        """Graphs alone, fed with the reference's tokens: all logits of all steps."""
        model, thinker = self.language_model, self.thinker
        logits = [model.prefill(thinker, self.encoders, prompt)]
        for token in answer.token_ids[:-1]:
            position = torch.full((3, 1, 1), model.length + answer.delta)
            logits.append(model.step(model.embedding[[token]], *thinker.rope_rows(position)))
        return _largest(np.concatenate(logits) - answer.logits.numpy())

    def _velocities(self, answer: Answer, noise_seed: int) -> tuple[float, torch.Tensor]:
        """Return the largest difference of the action graph's velocities.

        The graph runs alone: at every Euler step it takes the reference's cache and trajectory. Also returns
        the reference's last trajectory [T, A], the normalised actions.
        """
        length, start = self._start(answer)
        shape = self.action.inputs["key_cache_0"].shape
        caches = {}
        for i, pair in enumerate(answer.cache):
            for kind, rows in zip(("key", "value"), pair, strict=True):
                caches[f"{kind}_cache_{i}"] = np.zeros((1, *shape[1:]), np.float32)
                caches[f"{kind}_cache_{i}"][0, :, :length] = rows
        trajectory = self._noise(noise_seed)
        positions = (start + torch.arange(trajectory.shape[0])).expand(3, 1, -1)
        cos, sin = self.thinker.rope_rows(positions)
        steps = self.expert.config["num_denoise_steps"]
        worst = 0.0
        for step in range(steps):
            expected = self.expert.velocity(trajectory, step / steps, answer.cache, start)
            found = self.action(
                trajectory=trajectory[None],
                time=np.full(self.action.inputs["time"].shape, step / steps),
                rope_cos=cos,
                rope_sin=sin,
                kv_length=[length],
                cache_rows=np.arange(length),
                **caches,
            )
            worst = max(worst, _largest(found["velocity"][0] - expected.numpy()))
            trajectory = trajectory + expected / steps
        return worst, trajectory

    def _actions(self, actions: np.ndarray | None, answer: Answer, expected: torch.Tensor) -> float:
        if answer.token_ids[-1] != self.expert.config["future_start_token_id"]:
            return 0.0 if actions is None else float("inf")
        if actions is None:
            return float("inf")
        std = np.asarray(self.expert.config["action_space"]["std"])
        return _largest((actions[0] - self.expert.physical(expected).numpy()) / std)

    def _start(self, answer: Answer) -> tuple[int, int]:
        length = answer.cache[0][0].shape[1]
        return length, length + answer.delta

    def _noise(self, seed: int) -> torch.Tensor:
        space = self.expert.config["action_space"]
        steps, values = space["horizon"], len(space["names"])
        return torch.from_numpy(normal_noise(seed, 1, steps * values).reshape(steps, values))


def _logprobs(found: list[list[tuple[int, float]]], answer: Answer) -> float:
    """Return the largest difference of log-probabilities from the reference's.

    The runtime's are those that it reports for its most likely tokens, against the reference's for the same
    tokens.
    """
    expected = torch.log_softmax(answer.logits.double(), dim=-1).numpy()
    pairs = zip(found, expected, strict=False)  # where the tokens differ, the lengths may
    return max(abs(value - row[token]) for entries, row in pairs for token, value in entries)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max())
