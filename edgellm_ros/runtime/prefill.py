# SPDX-License-Identifier: Apache-2.0
"""Prefill: fills the rows of a batch with the KV rows and states of prompts.

What a run reads from the host is one upload; all that follows is recorded as one graph, with the draft head's
part, and replayed when a run of the same kind comes again:

  host     token ids, positions, lengths -> upload
  device   lengths -> embeddings -> rotary rows, lengths, masks -> engine -> commit -> draft head's rows
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields, PackedArrays, PackedBuffer
from edgellm_ros.engine.recorded_work import Part, RecordedWork
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import MIN_PREFILL, EngineConfig
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.decoding.speculative.guarded_drafter import GuardedDrafter
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.engines.prompt_inputs import PromptInputs, PromptRun, prompt_fields, write_prompts
from edgellm_ros.runtime.prefix_reuse import PART_TOKENS, PrefixReuse, prefill_parts
from edgellm_ros.runtime.prompt.buckets import bucket_of, buckets

logger = logging.getLogger(__name__)

WARM_TOKENS = 1024  # of the longest prompt that is run in advance
KEPT_GRAPHS = 16  # of each row, besides those of prompts that are run in advance


class Prefill:
    """Copies reused prefixes to their rows, and computes the other tokens.

    - logits [max batch,1,V] float32: the buffer of the results
    - pads: whether runs have as many tokens as a bucket (prompt/buckets.py)

    `recorded`: the graphs of runs, once it is active.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        embedder: InputEmbedder,
        runner: LLMEngineRunner,
        reuse: PrefixReuse,
        logits: Tensor,
        drafter: GuardedDrafter | None = None,
        pads: bool = False,
    ) -> None:
        self._placeholders = config.image_token_id, config.video_token_id, config.audio_token_id
        self._embedder = embedder
        self._runner = runner
        self._reuse = reuse
        self._logits = logits
        self._drafter = drafter
        self._pads = pads
        self._max_tokens = config.max_supported_input_length
        self._is_warm = False
        self._inputs = PackedBuffer(device, self._fields(config.builder.max_batch_size, self._max_tokens))
        self._rows = config.builder.max_batch_size
        kinds = ["prefills", *(["prompts of the draft head"] if drafter else [])]
        self.recorded = RecordedWork(device, *kinds, kept=KEPT_GRAPHS * self._rows)

    def compute(self, sequences: Sequence[GenerationSequence], rows: range) -> None:
        """Fill admitted sequences' rows; the batch does not change meanwhile."""
        for _ in self.parts(sequences, lambda: rows):
            pass

    def parts(
        self,
        sequences: Sequence[GenerationSequence],
        rows_of: Callable[[], range],
        may_pad: bool = True,
        most: int | None = None,
    ) -> Generator[tuple[Tensor, Tensor, bool]]:
        """Fill admitted sequences' rows; yield after each part.

        Yields the part's inputs_embeds [B,S,H], logits [B,1,V] and whether it was the last one. A part is one
        run of the engine: of at most `most` tokens of each row (None = those of `tokens_of_runs`), and up to
        a place where recurrent states are saved. Before a part but the first, progress is reported; if all
        sequences are cancelled then, it and the next ones are left out. Without `may_pad`, S is the length of
        the longest part. rows_of: returns the rows of the sequences, before each part.
        """
        pads = self._pads and may_pad
        for row, sequence in zip(rows_of(), sequences, strict=True):
            self._reuse.load(sequence, row)
        parts = prefill_parts(sequences, min(most or self._reuse.run_tokens, self._max_tokens))
        for run, part in enumerate(parts):
            if run and not any([sequence.report("prefill", run) for sequence in sequences]):
                for sequence in sequences:
                    sequence.prefix_keys = []  # of a prompt that is not complete nothing is stored
                size = len(sequences)
                yield self._embedder.prompt_embeds(size, MIN_PREFILL), self._logits.rows(0, size), True
                return
            tokens, rows = self._bucket(part) if pads else MIN_PREFILL, rows_of()
            embeds, logits = self._run(sequences, rows, part, tokens)
            for row, sequence, each in zip(rows, sequences, part, strict=True):
                sequence.kv_length = each.stop
                if each:
                    self._reuse.save_state(sequence, row)
            yield embeds, logits, run == len(parts) - 1

    def warm_up(self, device: Device) -> None:
        """Run and record a prompt of each bucket, so that a user's first is not slow.

        Then libraries have chosen their kernels: for the base model and the draft head, one prompt at a time,
        up to WARM_TOKENS in the first row, where a prompt alone is computed. Of longer prompts this is a
        small part of the time. Prompts join a batch in the other rows too, part by part, so parts of up to
        PART_TOKENS are recorded for all rows where fused kernels compute them. ONNX Runtime cannot record a
        run with new addresses before it has run once. Plans of TensorRT are left out, because each of their
        recorded runs takes memory of its own. The log has time and memory, or why a prompt could not run. A
        second call does nothing. No batch may run: prompts are computed in its rows, which are cleared.
        Without padding, there are no buckets to run.
        """
        if not self._pads or self._is_warm or self._runner.prefill_executor.is_plan:
            return
        self._is_warm = True
        before, start = device.memory_info()[0], time.perf_counter()
        sizes = buckets(min(WARM_TOKENS, self._max_tokens, self._runner.kv_cache.capacity))
        try:
            for tokens in sizes:
                self._record(self._padding(tokens, 0), is_new=True)
            if self._runner.fuses_prompts:
                self._record_parts([tokens for tokens in sizes if tokens <= PART_TOKENS])
            device.synchronize()
        except DeviceLostError:
            raise
        except EngineError as error:
            logger.warning("prompts of %d and more tokens are not run in advance: %s", tokens, error)
            return
        finally:
            self._clear_rows(device)
        logger.info(
            "ran prompts of %d lengths up to %d tokens in %.1f s, %.0f MB",
            len(sizes),
            sizes[-1],
            time.perf_counter() - start,
            max(0, before - device.memory_info()[0]) / 1e6,
        )

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the graphs of a removed adapter."""
        self.recorded.drop(lambda key: adapter in key[0].adapters)

    def _record_parts(self, sizes: Sequence[int]) -> None:
        """Record parts of prompts of these sizes for all rows.

        Prompts of them have run in the first row.
        """
        for row in range(self._rows):
            runs = [self._padding(tokens, row) for tokens in sizes]
            if sizes[-1] == PART_TOKENS:  # of longer prompts: their first parts, and those that follow
                following = [replace(run, first=(False,), continues=True) for run in runs]
                runs += [*following, *(replace(run, ends=False) for run in (runs[-1], following[-1]))]
            for run in runs:
                if self._key(run) not in self.recorded:
                    self._record(run)

    def _record(self, run: PromptRun, is_new: bool = False) -> None:
        """Record a run on a prompt of padding, alone in its row.

        is_new: whether libraries have not chosen their kernels for it. Then the prompt is computed before;
        with a draft head always, because ONNX Runtime may compute its part.
        """
        inputs = self._inputs.layout(self._fields(1, run.tokens))
        parts = self._parts(run, inputs, guards=False)  # a failure is that of the warm-up alone
        if is_new or self._drafter is not None:
            for array in inputs.arrays.values():
                array.fill(0)
            self._embedder.write_ids(inputs.arrays["token_ids"], [[]], [(0, 0, 0)])
            write_prompts(inputs.arrays, [run.tokens], [np.zeros((3, 0), np.float32)], [0], [0])
            inputs.upload()
            for queue in parts:
                queue()
        self.recorded.record(self._key(run), *parts)

    def _padding(self, tokens: int, row: int) -> PromptRun:
        """Return the run of a prompt of the base model, alone in a row."""
        return PromptRun(tokens, range(row, row + 1), (self._runner.loras.base,), first=(True,))

    def _clear_rows(self, device: Device) -> None:
        caches = [self._runner.kv_cache]
        if self._drafter is not None and self._drafter.kv_cache is not None:
            caches.append(self._drafter.kv_cache)
        for cache in caches:
            device.fill_zero(cache.lengths(range(self._rows)))
            cache.clear()
        if self._runner.recurrent is not None:
            self._runner.recurrent.clear()

    def _bucket(self, part: Sequence[range]) -> int:
        """Return the tokens of a run of `part` [B]: a bucket, if every row has room."""
        room = self._runner.kv_cache.capacity - max(tokens.start for tokens in part)
        return min(bucket_of(max(map(len, part))), room, self._max_tokens)

    def _run(
        self, sequences: Sequence[GenerationSequence], rows: range, part: Sequence[range], tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the tokens `part` [B] of prompts, in a run of at least `tokens` per row."""
        tokens = max(MIN_PREFILL, tokens, *map(len, part))
        self._runner.check_room(rows, tokens)
        starts = [each.start for each in part]
        run = PromptRun(
            tokens,
            rows,
            tuple(sequence.adapter for sequence in sequences),
            first=tuple(not start for start in starts),
            continues=any(
                start > sequence.reused_tokens for start, sequence in zip(starts, sequences, strict=True)
            ),
            ends=all(
                each.stop == len(sequence.token_ids) for each, sequence in zip(part, sequences, strict=True)
            ),
        )
        inputs = self._inputs.layout(self._fields(len(rows), tokens))
        self._write(inputs.arrays, sequences, rows, part)
        inputs.upload()
        parts = self._parts(run, inputs)
        executor = self._runner.prefill_executor
        # A plan's run of another adapter changes the shapes of a context, which a graph cannot record, and a
        # recorded run of a plan takes memory of its own.
        is_queued = executor.is_plan and (rows.start > 0 or len(set(run.adapters)) > 1)
        if is_queued or executor.is_observed:
            for queue in parts:
                queue()
        else:
            self.recorded.run(self._key(run), *parts)
        return self._embedder.prompt_embeds(len(rows), tokens), self._logits.rows(0, len(rows))

    def _fields(self, batch: int, tokens: int) -> Fields:
        """Return the arrays of a run on B prompts of S tokens."""
        of_head = self._drafter.prompt_fields(batch, tokens) if self._drafter is not None else {}
        return {"token_ids": ((batch, tokens), np.int64), **prompt_fields(batch, tokens), **of_head}

    def _key(self, run: PromptRun) -> tuple[Any, ...]:
        """Return a key of all that decides what a run queues; the run comes first.

        So parts of long prompts have the graphs of short ones, where what is cached of a row is only read.
        """
        drafts = self._drafter is not None and not self._drafter.failed
        if self._drafter is None:
            begins = self._runner.depends_on_first(run.adapters)
            run = replace(run, first=run.first if begins else (), continues=False, ends=True)
        return run, drafts, self._runner.fuses_prompts, *self._runner.shared

    def _write(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Write the arrays of a run."""
        prompts, first_rows, positions = [], [], []
        for sequence, each in zip(sequences, part, strict=True):
            prompts.append(sequence.token_ids[each.start : each.stop])
            image, video, audio = (sequence.placeholders(kind, each.start) for kind in self._placeholders)
            rows_before = sequence.image_row + image, sequence.video_row + video, sequence.audio_row + audio
            first_rows.append(rows_before)
            positions.append(sequence.positions[:, each.start : each.stop])
        self._embedder.write_ids(arrays["token_ids"], prompts, first_rows)
        starts, deltas = [each.start for each in part], [sequence.rope_delta for sequence in sequences]
        write_prompts(arrays, list(map(len, part)), positions, starts, deltas)
        if self._drafter is not None:
            self._drafter.write_prompts(arrays, sequences, rows, part)

    def _parts(self, run: PromptRun, inputs: PackedArrays, guards: bool = True) -> list[Part]:
        """Return what queues the parts of a run, whose arrays have been uploaded.

        guards: whether a failure of the drafter ends drafting, and not the run.
        """
        parts: list[Part] = [partial(self._queue, run, inputs.tensors)]
        if self._drafter is not None:
            drafter = self._drafter if guards else self._drafter.drafter
            embeds = self._embedder.prompt_embeds(len(run.rows), run.tokens)
            parts.append(partial(drafter.prefilled, run, embeds, inputs.tensors))
        return parts

    def _queue(self, run: PromptRun, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Queue the language model's part of a run; return the runs of the engine."""
        batch, runner = len(run.rows), self._runner
        embeds, deepstack = self._embedder.embed_prompts(inputs["token_ids"])
        return runner.execute_prefill_step(
            embeds,
            PromptInputs.of(inputs),
            run,
            deepstack_embeds=deepstack,
            output_logits=self._logits.rows(0, batch),
            output_hidden_states=runner.prompt_states.outputs(batch, run.tokens, runner.state_layers),
        )
