# SPDX-License-Identifier: Apache-2.0
"""PolicyPipeline: the stages of a request to a policy.

A policy answers with actions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from edgellm_ros.diffusion.action_spaces import make_action_space
from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.diffusion.policy_config import ACTConfig, FlowPolicyConfig, PolicyConfig
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.answerer import OnlyBase
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.diffusion_engines import DiffusionEngines
from edgellm_ros.runtime.policy.direct_engine import DirectEngine
from edgellm_ros.runtime.policy.engines import PolicyEngines
from edgellm_ros.runtime.policy.flow_engines import FlowEngines
from edgellm_ros.runtime.policy.preparer import PolicyPreparer
from edgellm_ros.runtime.policy.remote_engine import RemoteEngine
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


class PolicyPipeline:
    """The engines of a policy; not thread-safe.

    Raises the errors of `LLMInferenceRuntime`.
    """

    def __init__(self, opening: Opening, policy: PolicyConfig, metrics: RuntimeMetrics) -> None:
        self.device = opening.device
        self._metrics = metrics
        self.loras = self.lm_heads = OnlyBase(no_language_model(opening.config))
        self._space = make_action_space(policy.action_space)
        self._engines = _make_engines(opening, policy, metrics)
        builder = opening.config.builder
        self._preparer = PolicyPreparer(
            policy, self._engines, builder.max_action_samples, builder.max_batch_size
        )

    def answer(
        self,
        requests: Sequence[LLMGenerationRequest],
        noise_seed: int,
        output_thinker_embeddings: bool = False,
    ) -> list[LLMGenerationResponse]:
        """Answer requests one after another; a policy has no hidden states to store.

        Raises the errors of `LLMInferenceRuntime.handle_request`.
        """
        clock = StageClock(self.device.mark)
        sequences = self._preparer.prepare(requests, noise_seed)
        clock.end("tokenize_s")
        return self._answer_all(sequences, clock)

    def prepare_one(self, request: LLMGenerationRequest, noise_seed: int) -> PolicySequence:
        """Prepare a request that is answered later, from any thread. ValueError."""
        return self._preparer.prepare([request], noise_seed)[0]

    def answer_one(self, sequence: PolicySequence) -> LLMGenerationResponse:
        """Answer a request of `prepare_one`."""
        return self._answer_all([sequence], StageClock(self.device.mark))[0]

    def _answer_all(
        self, sequences: Sequence[PolicySequence], clock: StageClock
    ) -> list[LLMGenerationResponse]:
        try:
            for sequence in sequences:
                self._answer(sequence, clock)
            seconds = clock.metrics()
        except BaseException:
            with suppress(EngineError):  # queued work must be complete before its memory is used again
                self.device.synchronize()
            raise
        self._metrics.add_seconds(seconds)
        return [sequence.response(seconds) for sequence in sequences]

    def close(self) -> None:
        """Close the connection to another computer, if the policy has one."""
        if isinstance(self._engines, RemoteEngine):
            self._engines.close()

    def capture_decoding_cuda_graph(self) -> bool:
        """Return False: engines record their runs when these repeat."""
        return False

    def _answer(self, sequence: PolicySequence, clock: StageClock) -> None:
        values = self._engines.compute(sequence, clock)
        if values is None:
            return
        actions = sequence.reference.absolute(self._space.denormalise(values))
        previous = sequence.request.previous_chunk
        if previous is not None:
            kept = previous.unchanged
            actions[:, : len(kept)] = self._space.clip(kept)
        sequence.finish(actions)
        self._metrics.action.trajectories += sequence.samples


def _make_engines(opening: Opening, policy: PolicyConfig, metrics: RuntimeMetrics) -> PolicyEngines:
    """Open the engines of a policy."""
    if isinstance(policy, FlowPolicyConfig):
        return FlowEngines(opening, policy, metrics)
    if isinstance(policy, ACTConfig):
        return DirectEngine(opening, policy, metrics)
    if isinstance(policy, OpenPiConfig):
        return RemoteEngine(policy, metrics)
    if isinstance(policy, DiffusionConfig):
        return DiffusionEngines(opening, policy, metrics)
    raise ValueError(f"unknown policy {policy.kind!r}")


def no_language_model(config: EngineConfig) -> str:
    """Return why what needs a language model fails."""
    return f"the engine is a policy ({config.model_type}): it has no language model"
