# SPDX-License-Identifier: Apache-2.0
"""Prefill: fills the rows of a batch with the KV rows and states of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.speculative.drafter import Drafter
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.hidden_states import HiddenStates
from edgellm_ros.runtime.prefix_reuse import PrefixReuse, prefill_parts


class Prefill:
    """Copies reused prefixes to their rows, and computes the other tokens.

    `logits` [max batch,1,V] float32: the buffer of the results.
    """

    def __init__(
        self,
        config: EngineConfig,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        reuse: PrefixReuse,
        hidden_states: HiddenStates,
        logits: Tensor,
        drafter: Drafter | None = None,
    ) -> None:
        self._placeholders = config.image_token_id, config.video_token_id, config.audio_token_id
        self._embedder = embedder
        self._runner = runner
        self._reuse = reuse
        self._hidden_states = hidden_states
        self._logits = logits
        self._drafter = drafter

    def compute(self, sequences: Sequence[GenerationSequence], rows: range) -> tuple[Tensor, Tensor]:
        """Fill admitted sequences' rows; return inputs_embeds [B,S,H], logits [B,1,V].

        One run of the engine, and one more for each place where recurrent states are saved before a prompt's
        end; then inputs_embeds are those of the last run.
        """
        for row, sequence in zip(rows, sequences, strict=True):
            self._reuse.load(sequence, row)
        for part in prefill_parts(sequences):
            embeds, logits = self._run(sequences, rows, part)
            for row, sequence, tokens in zip(rows, sequences, part, strict=True):
                sequence.kv_length = tokens.stop
                if tokens:
                    self._reuse.save_state(sequence, row)
        return embeds, logits

    def _run(
        self, sequences: Sequence[GenerationSequence], rows: range, part: Sequence[range]
    ) -> tuple[Tensor, Tensor]:
        """Compute the tokens `part` [B] of prompts."""
        prompts, first_rows = [], []
        for sequence, tokens in zip(sequences, part, strict=True):
            prompts.append(sequence.token_ids[tokens.start : tokens.stop])
            image, video, audio = (sequence.placeholders(kind, tokens.start) for kind in self._placeholders)
            rows_before = sequence.image_row + image, sequence.video_row + video, sequence.audio_row + audio
            first_rows.append(rows_before)
        embeds, deepstack = self._embedder.embed_prompts(prompts, first_rows)
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.float32)
        for index, (sequence, tokens) in enumerate(zip(sequences, part, strict=True)):
            positions[index, :, : len(tokens)] = sequence.positions[:, tokens.start : tokens.stop]
        logits = self._logits.rows(0, len(prompts))
        self._runner.execute_prefill_step(
            embeds,
            [len(prompt) for prompt in prompts],
            positions,
            deepstack_embeds=deepstack,
            output_logits=logits,
            output_hidden_states=self._hidden_states.outputs(*embeds.shape[:2]),
            adapters=[sequence.adapter for sequence in sequences],
            rows=rows,
        )
        if self._drafter is not None:
            self._drafter.prefilled(sequences, rows, embeds, part)
        return embeds, logits
