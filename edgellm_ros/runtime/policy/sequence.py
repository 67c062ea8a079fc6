# SPDX-License-Identifier: Apache-2.0
"""PolicySequence: the state of one request to a policy while it is executed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgellm_ros.diffusion.affine_space import ActionReference
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress


@dataclass(eq=False)
class PolicySequence:
    """Inputs and actions of one request."""

    request: LLMGenerationRequest
    # in the order of the policy's cameras: [H,W,3], of several observations [O,H,W,3]
    images: tuple[np.ndarray, ...]
    token_ids: list[int]  # of the task; empty for a policy without text
    # [O, model_dim] float32, normalised, of O observations; None for a policy without a state
    state: np.ndarray | None
    samples: int
    noise_seed: int
    prefix_rows: int  # that actions attend to: images, task and state
    reference: ActionReference  # of the state
    finish_reason: str = ""  # "stop" or "cancelled"; empty until finished
    actions: np.ndarray | None = None  # [n, T, A] in physical units

    @property
    def condition(self) -> ChunkCondition | None:
        """Return the previous chunk, relative to this plan's reference."""
        previous = self.request.previous_chunk
        if previous is None:
            return None
        return replace(previous, actions=self.reference.relative(previous.actions))

    def report(self, stage: str, step: int) -> bool:
        """Report progress to the client; return False if the request is cancelled."""
        if self.finish_reason:
            return False
        if self.request.on_progress is not None:
            self.request.on_progress(Progress(stage, "", 0, step))
        if self.request.cancel is not None and self.request.cancel.is_set():
            self.finish_reason = "cancelled"
            return False
        return True

    def finish(self, actions: np.ndarray) -> None:
        """Finish the request with its actions."""
        self.actions, self.finish_reason = actions, "stop"

    def response(self, metrics: dict[str, float]) -> LLMGenerationResponse:
        """Make the response of the finished request."""
        return LLMGenerationResponse(
            text="",
            token_ids=[],
            finish_reason=self.finish_reason,
            prompt_tokens=self.prefix_rows,
            logprobs=None,
            actions=self.actions,
            paths=None,
            noise_seed=self.noise_seed,
            lora="",
            metrics=metrics,
        )
