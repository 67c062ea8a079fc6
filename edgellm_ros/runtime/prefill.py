# SPDX-License-Identifier: Apache-2.0
"""Prefill: fills the rows of a batch with the KV rows and states of prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import MIN_PREFILL, EngineConfig
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.speculative.drafter import Drafter
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.hidden_states import HiddenStates
from edgellm_ros.runtime.prefix_reuse import PrefixReuse, prefill_parts
from edgellm_ros.runtime.prompt.buckets import bucket_of, buckets

logger = logging.getLogger(__name__)

WARM_TOKENS = 1024  # of the longest prompt that is run in advance


class Prefill:
    """Copies reused prefixes to their rows, and computes the other tokens.

    - logits [max batch,1,V] float32: the buffer of the results
    - pads: whether runs have as many tokens as a bucket (prompt/buckets.py)
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
        pads: bool = False,
    ) -> None:
        self._placeholders = config.image_token_id, config.video_token_id, config.audio_token_id
        self._embedder = embedder
        self._runner = runner
        self._reuse = reuse
        self._hidden_states = hidden_states
        self._logits = logits
        self._drafter = drafter
        self._pads = pads
        self._max_tokens = config.max_supported_input_length
        self._is_warm = False

    def compute(
        self, sequences: Sequence[GenerationSequence], rows: range, may_pad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Fill admitted sequences' rows; return inputs_embeds [B,S,H], logits [B,1,V].

        One run of the engine; more for prompts of more than max_input_len tokens, and one more for each place
        where recurrent states are saved before a prompt's end. Then inputs_embeds are those of the last run.
        Between two runs, progress is reported; if all sequences are cancelled then, the next runs are left
        out. Without `may_pad`, S is the length of the longest prompt.
        """
        pads = self._pads and may_pad
        for row, sequence in zip(rows, sequences, strict=True):
            self._reuse.load(sequence, row)
        for run, part in enumerate(prefill_parts(sequences, self._max_tokens)):
            if run and not any([sequence.report("prefill", run) for sequence in sequences]):
                for sequence in sequences:
                    sequence.prefix_keys = []  # of a prompt that is not complete nothing is stored
                break
            tokens = self._bucket(part) if pads else MIN_PREFILL
            embeds, logits = self._run(sequences, rows, part, tokens)
            for row, sequence, each in zip(rows, sequences, part, strict=True):
                sequence.kv_length = each.stop
                if each:
                    self._reuse.save_state(sequence, row)
        return embeds, logits

    def warm_up(self, device: Device) -> None:
        """Run and record a prompt of each bucket, so that a user's first is not slow.

        Then libraries have chosen their kernels: for the base model, one prompt at a time, up to WARM_TOKENS.
        Of longer prompts this is a small part of the time. Plans of TensorRT are left out, because each of
        their recorded runs takes memory of its own. The log has time and memory, or why a prompt could not
        run. A second call does nothing. No batch may run: the prompts are computed in the first row, which is
        cleared. Without padding, there are no buckets to run.
        """
        if not self._pads or self._is_warm or self._runner.prefill_executor.is_plan:
            return
        self._is_warm = True
        before, start = device.memory_info()[0], time.perf_counter()
        sizes = buckets(min(WARM_TOKENS, self._max_tokens, self._runner.kv_cache.capacity))
        try:
            for tokens in sizes:
                self._run_padding(tokens)
                device.fill_zero(self._runner.kv_cache.lengths(range(1)))
                self._runner.record_prefill()  # runs again, from the row's begin
            device.synchronize()
        except DeviceLostError:
            raise
        except EngineError as error:
            logger.warning("prompts of %d and more tokens are not run in advance: %s", tokens, error)
            return
        finally:
            self._clear_first_row(device)
        logger.info(
            "ran prompts of %d lengths up to %d tokens in %.1f s, %.0f MB",
            len(sizes),
            sizes[-1],
            time.perf_counter() - start,
            max(0, before - device.memory_info()[0]) / 1e6,
        )

    def _run_padding(self, tokens: int) -> None:
        """Compute a prompt of padding in the first row."""
        embeds, deepstack = self._embedder.embed_prompts([[]], [(0, 0, 0)], tokens)
        self._runner.execute_prefill_step(
            embeds,
            [tokens],
            np.zeros((1, 3, embeds.shape[1]), np.float32),
            deepstack_embeds=deepstack,
            output_logits=self._logits.rows(0, 1),
            output_hidden_states=self._hidden_states.outputs(*embeds.shape[:2]),
            rows=range(1),
        )

    def _clear_first_row(self, device: Device) -> None:
        cache, recurrent = self._runner.kv_cache, self._runner.recurrent
        device.fill_zero(cache.lengths(range(1)))
        cache.clear_row(0)
        if recurrent is not None:
            recurrent.clear()

    def _bucket(self, part: Sequence[range]) -> int:
        """Return the tokens of a run of `part` [B]: a bucket, if every row has room."""
        room = self._runner.kv_cache.capacity - max(tokens.start for tokens in part)
        return min(bucket_of(max(map(len, part))), room, self._max_tokens)

    def _run(
        self, sequences: Sequence[GenerationSequence], rows: range, part: Sequence[range], tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the tokens `part` [B] of prompts, in a run of at least `tokens` per row."""
        prompts, first_rows = [], []
        for sequence, each in zip(sequences, part, strict=True):
            prompts.append(sequence.token_ids[each.start : each.stop])
            image, video, audio = (sequence.placeholders(kind, each.start) for kind in self._placeholders)
            rows_before = sequence.image_row + image, sequence.video_row + video, sequence.audio_row + audio
            first_rows.append(rows_before)
        embeds, deepstack = self._embedder.embed_prompts(prompts, first_rows, tokens)
        positions = np.zeros((len(prompts), 3, embeds.shape[1]), np.float32)
        for index, (sequence, each) in enumerate(zip(sequences, part, strict=True)):
            positions[index, :, : len(each)] = sequence.positions[:, each.start : each.stop]
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
