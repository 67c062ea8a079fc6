# SPDX-License-Identifier: Apache-2.0
"""Runtimes with and without drafting, and the times of their rounds."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.forced_acceptance import ForcedTreeKernels, ObservedTreeKernels
from benchmarks.kernel_profile import Event
from edgellm_ros.engine.device import Device
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.loading.availability import AUTO
from edgellm_ros.runtime import assemble
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    DFLASH,
    EAGLE,
    LOOKUP,
    MTP,
    SpecDecodeDraftingConfig,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

OFF = "off"
OPTIONS = {"prefix_cache_bytes": 0}
STAGE_KERNELS = {  # of a GPU: the last kernel of each stage, but the first one after "verify"
    "add_candidates": "level",
    "draft_chain": "tree",
    "select_tree": "tree",
    "find_continuation": "tree",
    "sample_path": "verify",
}

Batches = Sequence[Sequence[LLMGenerationRequest]]


def parse_setting(text: str) -> SpecDecodeDraftingConfig:
    """Parse "chain3", "mtp3", "dflash7", "tree8/4/16" or "lookup7".

    The numbers of a tree: top k, steps, rows of a verification. ValueError.
    """
    found = re.fullmatch(r"(chain|mtp|dflash|lookup)(\d+)|tree(\d+)/(\d+)/(\d+)", text)
    if found is None:
        raise ValueError(f"expected chainN, mtpN, dflashN, treeK/N/M or lookupN with numbers, got {text!r}")
    kind, levels, *sizes = found.groups()
    if kind is None:
        top_k, steps, size = map(int, sizes)
        return SpecDecodeDraftingConfig(top_k, steps, size, falls_back=False)
    strategy = {"chain": EAGLE, "mtp": MTP, "dflash": DFLASH, "lookup": LOOKUP}[kind]
    return SpecDecodeDraftingConfig(1, int(levels), int(levels) + 1, strategy, falls_back=False)


@dataclass(frozen=True)
class Run:
    """Totals of one run over all batches; times in seconds."""

    prefill_s: float  # of a batch
    decode_s: float
    tokens: int  # after the first token of each answer
    sequences: int  # of the largest batch
    steps: int  # rounds and vanilla steps
    vanilla_steps: int
    verified_trees: int
    verified_tokens: int
    token_ids: list[list[int]]  # of all answers

    @property
    def token_s(self) -> float:
        """Time per token of one sequence."""
        return self.decode_s * self.sequences / self.tokens


class RecordsLater(LLMInferenceRuntime):
    """A runtime with the defaults that records its steps when `record` is called.

    The stages of rounds are measured before, and forced tree kernels are set up.
    """

    def capture_decoding_cuda_graph(self) -> bool:
        """Record nothing while the runtime is made."""
        return False

    def record(self) -> bool:
        """Record decode steps and rounds, as other runtimes do when they are made."""
        return super().capture_decoding_cuda_graph()


class Contender:
    """A runtime with one setting.

    - drafting: None = one token per step
    - decode: what executes steps and verifications, as for `LLMInferenceRuntime`
    - kernels: the tree kernels of a runtime that drafts; forced if `forces`
    """

    def __init__(
        self,
        name: str,
        engine: Path,
        device: Device,
        drafting: SpecDecodeDraftingConfig | None,
        forces: bool,
        decode: str = AUTO,
    ) -> None:
        self.name = name
        self.drafting = drafting
        self.kernels: ObservedTreeKernels | None = None
        self._device = device
        config = EngineConfig.load(engine)

        def observed(kernels: Any) -> ObservedTreeKernels:
            if not forces or drafting is None:
                self.kernels = ObservedTreeKernels(kernels)
            else:
                self.kernels = ForcedTreeKernels(
                    kernels,
                    device,
                    config.max_supported_batch_size,
                    config.max_kv_cache_capacity,
                    drafting.tree_size,
                    drafting.tokens_per_round,
                )
            return self.kernels

        with _tree_kernels(observed):
            self.options: dict[str, Any] = {**OPTIONS, "drafting": drafting, "decode": decode}
            self.runtime = RecordsLater(engine, device=device, **self.options)
        if isinstance(self.kernels, ForcedTreeKernels):
            self.kernels.lengths = self.runtime.pipeline.runner.kv_cache.lengths

    def run(self, batches: Batches) -> Run:
        """Answer all requests. RuntimeError if the drafter fails."""
        before, prefill_s, decode_s, answers = self._counters(), 0.0, 0.0, []
        for requests in batches:
            responses = self.runtime.handle_request(requests)
            prefill_s += responses[0].metrics["prefill_s"]
            decode_s += responses[0].metrics["decode_s"]
            answers += [response.token_ids for response in responses]
        drafter = self.runtime.pipeline.drafter
        if drafter is not None and drafter.failed:
            raise RuntimeError(f"{self.name}: the drafter has failed")
        steps, *rounds = (after - old for after, old in zip(self._counters(), before, strict=True))
        return Run(
            prefill_s=prefill_s / len(batches),
            decode_s=decode_s,
            tokens=sum(len(answer) - 1 for answer in answers),
            sequences=max(map(len, batches)),
            steps=steps,
            vanilla_steps=rounds[0],
            verified_trees=rounds[1],
            verified_tokens=rounds[2],
            token_ids=answers,
        )

    def _counters(self) -> tuple[int, ...]:
        steps, rounds = self.runtime.generation_metrics, self.runtime.spec_decode_generation_metrics
        return steps.total_runs, rounds.vanilla_runs, rounds.verified_trees, rounds.generated_tokens

    def stages(self, batches: Batches) -> dict[str, Any]:
        """Measure stages of rounds in ms: medians, with the device idle between stages.

        The runtime must have no recorded steps. "draft": the head's run and the candidates of each level.
        """
        assert self.kernels is not None
        method, times, marks = self.runtime.pipeline.method, defaultdict(list), []
        queue = method.queue

        def mark(stage: str) -> None:
            self._device.synchronize()
            marks.append((stage, time.perf_counter()))

        def timed_queue(room: int) -> Any:
            marks.clear()
            mark("begin")
            result = queue(room)
            mark("accept")
            level = 0
            for (_, start), (stage, end) in pairwise(marks):
                level += stage == "level"
                times[stage, level if stage == "level" else 0].append(1e3 * (end - start))
            return result

        method.queue, self.kernels.observer = timed_queue, mark  # type: ignore[method-assign]
        try:
            self.run(batches)
        finally:
            del method.queue  # restores the method of the class
            self.kernels.observer = None
        return _medians(times)


def stages_of(events: Sequence[Event]) -> dict[str, Any]:
    """Compute the stages of profiled rounds in ms.

    The durations of stages are medians of the times between the stages' last kernels. A round ends with the
    copy of its tokens to the host. The first round is left out.
    """
    times, start, level = defaultdict(list), None, 0
    for event in events:
        stage = STAGE_KERNELS.get(event.name) or ("accept" if event.name.startswith("Memcpy DtoH") else None)
        if stage is None:
            continue
        end = event.start if stage == "verify" else event.end
        level += stage == "level"
        if start is not None:
            times[stage, level if stage == "level" else 0].append((end - start) / 1e3)
        if start is not None or stage == "accept":
            start = end
        if stage == "accept":
            level = 0
    return _medians(times)


def _medians(times: Mapping[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Compute the medians of the stages.

    times: by stage and level, which is 0 for the stages without levels.
    """
    medians = {key: median(values) for key, values in times.items()}
    levels = [medians[key] for key in sorted(medians) if key[0] == "level"]
    others = {stage: medians.get((stage, 0)) for stage in ("tree", "verify", "accept")}
    return {"draft_levels": levels, **others}


@contextmanager
def _tree_kernels(observed: Any) -> Iterator[None]:
    """Wrap the tree kernels of runtimes that are opened in the block."""
    load = assemble.load_tree_kernels

    def load_observed(device: Device, early: bool = False) -> Any:
        return observed(load(device, early))

    assemble.load_tree_kernels = load_observed
    try:
        yield
    finally:
        assemble.load_tree_kernels = load
