# SPDX-License-Identifier: Apache-2.0
"""Writes transcripts with transformers' eager `generate`, and times its stages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class TransformersTranscriber:
    """The published model class with the weights of a checkpoint."""

    def __init__(self, checkpoint: Path, precision: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        model, found = Qwen3ASRForConditionalGeneration.from_pretrained(
            checkpoint, dtype=DTYPES[precision], output_loading_info=True
        )
        wrong = {key: names for key, names in found.items() if names and key != "error_msgs"}
        if wrong:
            raise RuntimeError(f"the checkpoint's tensors do not match {type(model).__name__}: {wrong}")
        self._device = device
        self._model = model.to(device).eval().requires_grad_(False)
        self._extractor = Qwen3ASRFeatureExtractor.from_pretrained(checkpoint)
        self._marks: list[float] = []
        model.model.audio_tower.register_forward_pre_hook(self._mark)
        model.model.multi_modal_projector.register_forward_hook(self._mark)

    def answer(
        self, prompt: list[int], samples: np.ndarray, tokens: int
    ) -> tuple[list[int], dict[str, float]]:
        """Return the tokens of the greedy answer, and seconds by stage.

        The stages are those of `benchmarks.speech`; log-mel features are part of the encoder's time.

        - prompt: with one placeholder for each row of the sound
        - samples: [N] float32 at 16 kHz
        - tokens: length of the answer
        """
        self._marks.clear()
        times = _TokenTimes()
        start = self._now()
        features = self._extractor(
            samples, sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="pt"
        )
        featured = time.perf_counter()
        ids = torch.tensor([prompt], device=self._device)
        found = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=features["input_features"].to(self._device, self._model.dtype),
            input_features_mask=features["attention_mask"].to(self._device),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=times,
        )
        answer = found[0, len(prompt) :].tolist()
        end = time.perf_counter()
        encoder = featured - start + self._marks[1] - self._marks[0]
        _, first, *_ = times.seconds  # the prompt is the first that a streamer gets
        seconds = {
            "total_s": end - start,
            "encoder_s": encoder,
            "prefill_s": first - start - encoder,
            "token_s": (times.seconds[tokens] - first) / (tokens - 1),
        }
        return answer, seconds

    def _mark(self, *unused: Any) -> None:
        self._marks.append(self._now())

    def _now(self) -> float:
        """Wait for all queued work and return the time."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class _TokenTimes:
    """A streamer that notes when the prompt and each token are on the host."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: `generate` calls this after the last token."""
