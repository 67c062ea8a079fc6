# SPDX-License-Identifier: Apache-2.0
"""Runs the same weights with transformers: eager or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, Cache, DynamicCache, StaticCache

from benchmarks.model_shapes import ModelShape
from benchmarks.published_models import PublishedModel
from benchmarks.random_checkpoint import MAX_POSITIONS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_RUNS = 3
WARM_UP_STEPS = 5  # a step is compiled, run and captured before it is replayed


@dataclass(frozen=True)
class _Stages:
    """The stages of a request, eager or compiled."""

    encode: Callable[..., Any]
    prefill: Callable[..., torch.Tensor]
    step: Callable[..., torch.Tensor]


class TransformersDecoder:
    """The model class of a shape, with the weights of a checkpoint.

    The checkpoint uses the tensor names of the model class.
    """

    def __init__(
        self, checkpoint: Path, shape: ModelShape | PublishedModel, precision: str, device: str
    ) -> None:
        if isinstance(shape, PublishedModel):
            config = AutoConfig.from_pretrained(checkpoint)
        else:
            config = AutoConfig.for_model(**asdict(shape), max_position_embeddings=MAX_POSITIONS)
        sees = isinstance(shape, PublishedModel) and shape.processor is not None
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model, found = kind.from_pretrained(
            checkpoint, config=config, dtype=DTYPES[precision], output_loading_info=True
        )
        unexpected = {key: names for key, names in found.items() if names and key != "error_msgs"}
        if unexpected:
            raise RuntimeError(f"the checkpoint's tensors do not match {shape.model_type}: {unexpected}")
        self._device = device
        self._model = model.to(device).eval()
        # the decoder without its head, and the whole model's parts that only some have
        self._decoder = model.model.language_model if sees else model.base_model
        self._image_token: int = config.image_token_id if sees else -1
        self._processor = AutoImageProcessor.from_pretrained(checkpoint) if sees else None

    def eager(
        self, prompts: Sequence[Sequence[int]], images: Sequence[np.ndarray], tokens: int, runs: int
    ) -> dict[str, Any]:
        """Encode the images and decode greedily with a growing cache.

        There is one image for each prompt, or none. A prompt has one token for each row of its image. Returns
        `token_ids` of each prompt, and as medians of some runs `pixels_ms` (image processor), `vision_ms`
        (vision tower), `prefill_ms`, and `decode_ms` per token.
        """

        def growing(capacity: int) -> Cache:
            return DynamicCache(config=self._decoder.config)

        return self._run(prompts, images, tokens, runs, growing, lambda stage, whole: stage)

    def compiled(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[np.ndarray],
        tokens: int,
        runs: int,
        prefill: bool = True,
    ) -> dict[str, Any]:
        """Run like `eager`, with a static cache and compiled stages.

        A decode step is one graph; on a GPU, a CUDA graph. Vision and prefill are compiled without CUDA
        graphs; prefill: whether it is compiled.
        """
        torch._dynamo.reset()

        def compile_stage(stage: Callable[..., Any], whole: bool) -> Callable[..., Any]:
            if stage == self._prefill and not prefill:
                return stage
            if not whole:
                return torch.compile(stage, dynamic=False)
            step = torch.compile(stage, mode="reduce-overhead", fullgraph=True, dynamic=False)

            def replayable(*inputs: Any) -> torch.Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return step(*inputs).clone()  # the next replay overwrites the output of this one

            return replayable

        def static(capacity: int) -> Cache:
            return StaticCache(config=self._decoder.config, max_cache_len=capacity)

        return self._run(prompts, images, tokens, runs, static, compile_stage)

    def _encode(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the rows of all images [R,H], and what the first layers add to them."""
        found = self._model.model.get_image_features(**inputs)
        rows = _joined(getattr(found, "pooler_output", found))
        deepstack = getattr(found, "deepstack_features", None)
        return rows, {} if deepstack is None else {"deepstack_visual_embeds": [_joined(x) for x in deepstack]}

    def _prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        rows: torch.Tensor | None,
        deepstack: dict[str, Any],
        cache: Cache,
    ) -> torch.Tensor:
        """Put prompts [B,S] with image rows into the cache; return the next tokens [B,1]."""
        embeds = self._model.get_input_embeddings()(ids)
        places = ids == self._image_token
        if rows is not None:
            embeds = embeds.masked_scatter(places[..., None], rows.to(embeds.dtype))
        if deepstack:
            deepstack = {"visual_pos_masks": places, **deepstack}
        return self._next(cache, positions, inputs_embeds=embeds, **deepstack)

    def _step(self, ids: torch.Tensor, positions: torch.Tensor | None, cache: Cache) -> torch.Tensor:
        """Append ids [B,1] to the cache and return the next tokens [B,1]."""
        return self._next(cache, positions, input_ids=ids)

    def _next(self, cache: Cache, positions: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        if positions is not None:
            inputs["position_ids"] = positions
        out = self._decoder(past_key_values=cache, use_cache=True, **inputs).last_hidden_state
        return self._model.get_output_embeddings()(out[:, -1:]).argmax(-1)

    @torch.no_grad()
    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[np.ndarray],
        tokens: int,
        runs: int,
        make_cache: Callable[[int], Cache],
        compile_stage: Callable[[Callable[..., Any], bool], Callable[..., Any]],
    ) -> dict[str, Any]:
        """Run the stages; the first run warms up.

        The clock stops when all tokens are computed. The loop does not read tokens on the way, which saves
        transformers the wait per token that `generate` has.
        """
        stages = _Stages(
            *(compile_stage(stage, False) for stage in (self._encode, self._prefill)),
            compile_stage(self._step, True),
        )
        ids = torch.tensor(prompts, device=self._device)
        cache = make_cache(ids.shape[1] + tokens)
        if isinstance(cache, StaticCache):  # a graph needs its memory before it is recorded
            self._request(_Stages(self._encode, self._prefill, self._step), ids, images, 1, cache, {})
        seconds: dict[str, list[float]] = {}
        sampled: list[torch.Tensor] = []
        for run in range(1 + min(runs, MAX_RUNS)):
            if isinstance(cache, StaticCache):
                cache.reset()
            else:
                cache = make_cache(0)
            count = tokens if run else min(1 + WARM_UP_STEPS, tokens)
            sampled = self._request(stages, ids, images, count, cache, seconds if run else {})
        times = {f"{stage}_ms": 1e3 * median(values) for stage, values in seconds.items()}
        times["decode_ms"] /= tokens - 1
        return {**times, "token_ids": torch.cat(sampled, 1).tolist()}

    def _request(
        self,
        stages: _Stages,
        ids: torch.Tensor,
        images: Sequence[np.ndarray],
        tokens: int,
        cache: Cache,
        seconds: dict[str, list[float]],
    ) -> list[torch.Tensor]:
        """Return the next tokens [B,1], and put the time of each stage into `seconds`."""
        inputs: dict[str, torch.Tensor] = {}
        rows, deepstack = None, {}
        if images:
            with self._measured("pixels", seconds):
                inputs = self._pixels(images)
            with self._measured("vision", seconds):
                rows, deepstack = stages.encode(inputs)
        positions, following = self._positions(ids, inputs, tokens)
        with self._measured("prefill", seconds):
            sampled = [stages.prefill(ids, positions, rows, deepstack, cache)]
        with self._measured("decode", seconds):
            for place in following[:-1]:
                sampled.append(stages.step(sampled[-1], place, cache))
        return sampled

    def _pixels(self, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        found = self._processor(images=list(images), return_tensors="pt").to(self._device)
        inputs = {key: found[key] for key in ("pixel_values", "image_grid_thw") if key in found}
        return inputs | {"pixel_values": inputs["pixel_values"].to(self._model.dtype)}

    def _positions(
        self, ids: torch.Tensor, inputs: dict[str, torch.Tensor], tokens: int
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """Return the positions of the prompts [3,B,S], and of each new token [3,B,1].

        None where the model counts them itself.
        """
        if "image_grid_thw" not in inputs:
            return None, [None] * tokens
        kinds = (ids == self._image_token).int()
        positions, deltas = self._model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=inputs["image_grid_thw"]
        )
        start = ids.shape[1] + deltas.reshape(1, -1, 1).to(ids.device)
        return positions, [(start + index).expand(3, -1, -1).clone() for index in range(tokens)]

    @contextmanager
    def _measured(self, stage: str, seconds: dict[str, list[float]]) -> Iterator[None]:
        """Note the seconds of the work within, from and to the end of all queued work."""
        start = self._now()
        yield
        seconds.setdefault(stage, []).append(self._now() - start)

    def _now(self) -> float:
        """Wait for all queued work and return the time."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _joined(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows [R,H] of all images, which may be one tensor for each."""
    return rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat(tuple(rows))
