# SPDX-License-Identifier: Apache-2.0
"""PolicyPipeline: the stages of a request to a policy.

A policy answers with actions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head
from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import PREFIX
from edgellm_ros.kernels import load_kernels
from edgellm_ros.runtime.answerer import OnlyBase
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import Opening
from edgellm_ros.runtime.policy.prefix_engine import PrefixEngine
from edgellm_ros.runtime.policy.preparer import PolicyPreparer
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.text.tokenizer import Tokenizer


class PolicyPipeline:
    """The engines of a policy; not thread-safe.

    Raises the errors of `LLMInferenceRuntime`.
    """

    def __init__(self, opening: Opening, policy: PolicyConfig, metrics: RuntimeMetrics) -> None:
        self.device = opening.device
        self._metrics = metrics
        self._policy = policy
        cuda_graphs = opening.options.cuda_graphs

        def engine(part: str) -> EngineExecutor:
            executor = opening.engine(part)
            if not cuda_graphs:
                executor.stop_recording()
            return executor

        self.loras = self.lm_heads = OnlyBase(no_language_model(opening.config))
        self._head = make_policy_head(policy)
        kernels, builder = load_kernels(self.device), opening.config.builder
        self._prefix = PrefixEngine(engine("visual"), engine(PREFIX), policy, self.device)
        self.action = ActionRunner(
            engine("action"), self._head, self.device, kernels, builder.max_action_samples
        )
        if not cuda_graphs:
            self.action.stop_recording()
        self._preparer = PolicyPreparer(
            policy,
            self._head,
            Tokenizer(opening.root / "tokenizer.json"),
            builder.max_action_samples,
            builder.max_batch_size,
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

    def capture_decoding_cuda_graph(self) -> bool:
        """Return False: engines record their runs when these repeat."""
        return False

    def _answer(self, sequence: PolicySequence, clock: StageClock) -> None:
        images = len(sequence.images)
        if not sequence.report("vision", 0):
            return
        self._prefix.encode(sequence.images)  # camera frames -> rows of the prefix
        self._metrics.multimodal.total_images += images
        self._metrics.multimodal.total_image_tokens += images * self._policy.cameras.tokens
        clock.end("vision_s")
        if not sequence.report("prefill", 0):
            return
        others = self._head.prefix_inputs(sequence.state)
        # rows, task and state -> what actions attend to
        context = self._prefix.compute(images, sequence.token_ids, others, sequence.prefix_rows)
        self._metrics.prefill.total_runs += 1
        self._metrics.prefill.computed_tokens += sequence.prefix_rows
        clock.end("prefill_s")
        samples, steps, report = sequence.samples, sequence.steps, partial(sequence.report, "action")
        # noise and context -> actions
        values = self.action.execute(context, samples, steps, sequence.noise_seed, report, sequence.condition)
        clock.end("action_s")
        if values is not None:
            actions = self._head.space.denormalise(values) + sequence.reference
            previous = sequence.request.previous_chunk
            if previous is not None:
                kept = previous.unchanged
                actions[:, : len(kept)] = self._head.space.clip(kept)
            sequence.finish(actions)
            self._metrics.action.trajectories += samples
            self._metrics.action.total_runs += steps


def no_language_model(config: EngineConfig) -> str:
    """Return why what needs a language model fails."""
    return f"the engine is a policy ({config.model_type}): it has no language model"
