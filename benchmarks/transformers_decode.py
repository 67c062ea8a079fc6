# SPDX-License-Identifier: Apache-2.0
"""Decodes the same weights with transformers: eager or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from benchmarks.model_shapes import ModelShape
from benchmarks.random_checkpoint import MAX_POSITIONS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_RUNS = 3
WARM_UP_STEPS = 5  # a step is compiled, run and captured before it is replayed

Step = Callable[[torch.Tensor, Cache], torch.Tensor]


class TransformersDecoder:
    """The model class of a shape with the weights of a checkpoint that uses its tensor names."""

    def __init__(self, checkpoint: Path, shape: ModelShape, precision: str, device: str) -> None:
        config = AutoConfig.for_model(**asdict(shape), max_position_embeddings=MAX_POSITIONS)
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, dtype=DTYPES[precision], output_loading_info=True
        )
        unexpected = {key: names for key, names in found.items() if names and key != "error_msgs"}
        if unexpected:
            raise RuntimeError(f"the checkpoint's tensors do not match {shape.model_type}: {unexpected}")
        self._device = device
        self._model = model.to(device).eval()

    def eager(self, prompts: Sequence[Sequence[int]], tokens: int, runs: int) -> dict[str, Any]:
        """Decode greedily with a growing cache.

        Returns `token_ids` of each prompt, and `prefill_ms` and `decode_ms` per token as medians of some
        runs.
        """
        return self._decode(prompts, tokens, runs, lambda capacity: DynamicCache(), self._step)

    def compiled(self, prompts: Sequence[Sequence[int]], tokens: int, runs: int) -> dict[str, Any]:
        """Decode like `eager`, with a static cache and compiled decode steps.

        Each step is one graph; on a GPU, a CUDA graph.
        """
        torch._dynamo.reset()
        step = torch.compile(self._step, mode="reduce-overhead", fullgraph=True, dynamic=False)

        def replayable(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return step(ids, cache).clone()  # the next replay overwrites the output of this one

        def static(capacity: int) -> Cache:
            return StaticCache(config=self._model.config, max_cache_len=capacity)

        return self._decode(prompts, tokens, runs, static, replayable)

    def _step(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Append ids [B,S] to the cache and return the next tokens [B,1]."""
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits.argmax(-1)

    @torch.no_grad()
    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        runs: int,
        make_cache: Callable[[int], Cache],
        step: Step,
    ) -> dict[str, Any]:
        """Decode the prompts; prefill is never compiled, and the first run warms up.

        The clock stops when all tokens are computed. The loop does not read tokens on the way, which saves
        transformers the wait per token that `generate` has.
        """
        ids = torch.tensor(prompts, device=self._device)
        cache = make_cache(ids.shape[1] + tokens)
        prefill_s, decode_s, sampled = [], [], []
        for run in range(1 + min(runs, MAX_RUNS)):
            if isinstance(cache, StaticCache):
                cache.reset()  # the compiled step uses this cache's memory
            else:
                cache = make_cache(0)
            marks = [self._now()]
            sampled = [self._step(ids, cache)]
            marks.append(self._now())
            for _ in range(tokens - 1 if run else min(WARM_UP_STEPS, tokens - 1)):
                sampled.append(step(sampled[-1], cache))
            marks.append(self._now())
            if run:
                prefill_s.append(marks[1] - marks[0])
                decode_s.append((marks[2] - marks[1]) / (tokens - 1))
        return {
            "prefill_ms": 1e3 * median(prefill_s),
            "decode_ms": 1e3 * median(decode_s),
            "token_ids": torch.cat(sampled, 1).tolist(),
        }

    def _now(self) -> float:
        """Wait for all queued work and return the time."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
