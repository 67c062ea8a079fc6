# SPDX-License-Identifier: Apache-2.0
"""Endurance of the scheduler over the requests of a day.

Measures
--------
Requests that end otherwise than they must, and what is left over after the others: rows of the batch, live
objects of the scheduler, threads, open files, and memory. Targets: no request lost, no row left, no more
objects than those of one batch (the last one, which decoding keeps until the next), no additional thread or
file after the first tenth, and less than 100 bytes of growth per request over the second half of the run
(benchmarks/growth.py), of memory that is allocated and in use.

Conditions
----------
As many requests as a client makes in 8 hours that asks every 2 s, as fast as possible, by --clients threads.
A tiny model with random weights, 4 rows, LoRA adapters. Drawn from a seed: plain, sampled and long prompts,
conversations, grammars (new ones too), adapters, priorities, log-probabilities; cancelled before and during
the answer, by handle and by event; streams given up half-way, with and without waiting; deadlines; errors of
the client's `on_progress`, of the engine, and of invalid requests; adapters added and removed. Prompts have
200 different words, because the tokenizer keeps up to 10,000 of them for each thread that submits. 100
times all clients wait until everything has ended, for a reading. All memory is malloc's.

Examples
--------
    python -m benchmarks.request_soak
    python -m benchmarks.request_soak --requests 2000

Last JSON line: `passed`, `ended` by kind and end, `lost`, `readings` at 11 points (with `requests`,
`resident_mb`, `allocated_mb`, `rows`, `objects`, `threads`, `files`), `bytes_per_request`.

"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.adapter_cost import write_adapter
from benchmarks.growth import growth_rate
from benchmarks.memory import read_memory
from benchmarks.model_shapes import ModelShape
from benchmarks.prompt_lengths import random_words
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import integer
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.ros.node.metrics import resident_memory
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, Progress, SamplingParams
from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.handle import Handle, Outcome
from edgellm_ros.runtime.scheduling.keeping import NextTurn

SHAPE = ModelShape(64, 128, 2, 2, 1, 32, vocab_size=512)
SIZES: dict[str, Any] = {
    "max_batch_size": 4,
    "max_input_len": 320,
    "max_kv_cache_capacity": 448,
    "max_lora_rank": 4,
}
REQUESTS = 8 * 3600 // 2
READINGS, SHOWN = 100, 10
MAX_GROWTH = 100.0  # bytes per request
ANSWER_S = 60.0
TOKENS = 16
WORDS = 200
LEFT_OVER = (Entry, Handle, Outcome, NextTurn, GenerationSequence)
OBJECTS_PER_ROW = 4  # of an answer
FAULT_EVERY = 997  # decodes of the batch
KINDS = {
    "plain": 4,
    "sampled": 3,
    "long": 1,
    "conversation": 3,
    "grammar": 3,
    "new_grammar": 1,
    "lora": 3,
    "logprobs": 1,
    "urgent": 2,
    "cancelled": 2,
    "cancelled_early": 1,
    "event": 1,
    "given_up": 2,
    "dropped": 1,
    "deadline": 1,
    "client_fails": 1,
    "invalid": 1,
    "removed_lora": 1,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z ]{4,12}"},
    {"choices": ("left", "right", "straight on")},
    {"json_schema": {"type": "object", "properties": {"go": {"type": "boolean"}}, "required": ["go"]}},
)


class ClientError(Exception):
    """Raised by the `on_progress` of a client."""


class Soak:
    """Asks a runtime.

    `ended` counts requests by kind and end; `lost` has those that did not end as they must.
    """

    def __init__(self, runtime: LLMInferenceRuntime, adapters: dict[str, Path], seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self.lost: list[str] = []
        self._runtime = runtime
        self._adapters = adapters
        self._seed = seed
        self._lock = threading.Lock()
        self._shares = np.array(list(KINDS.values())) / sum(KINDS.values())
        self._words = random_words(np.random.default_rng(seed), WORDS).split()
        self._break_sometimes()

    def ask(self, number: int) -> None:
        """Make one request, which follows from its number."""
        rng = np.random.default_rng([self._seed, number])
        kind = str(rng.choice(list(KINDS), p=self._shares))
        try:
            end = self._end_of(kind, rng)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
            with self._lock:
                self.lost.append(f"{number} {kind}: {end}")
            return
        with self._lock:
            self.ended[f"{kind}: {end}"] += 1

    def _end_of(self, kind: str, rng: np.random.Generator) -> str:
        """Ask, and return how the request ended; other errors are not proper ends."""
        request, priority = self._request(kind, rng), 10 if kind == "urgent" else 0
        deadline = time.monotonic() + 0.02 * rng.random() if kind == "deadline" else None
        try:
            handle = self._runtime.submit(request, priority, deadline)
            self._leave(kind, handle, request)
            return handle.result(ANSWER_S).finish_reason if kind != "dropped" else "dropped"
        except TimeoutError:
            if kind != "deadline":
                raise
            return "too late"
        except ValueError:
            if kind not in ("invalid", "removed_lora"):
                raise
            return "refused"
        except ClientError:
            return "the client failed"
        except EngineError as error:
            if str(error) != FAULT:
                raise
            return "the engine failed"

    def _leave(self, kind: str, handle: Handle, request: LLMGenerationRequest) -> None:
        """Cancel the request, or read a part of its stream."""
        if kind == "cancelled_early":
            handle.cancel()
        if kind == "event" and request.cancel is not None:
            request.cancel.set()
        if kind == "removed_lora":
            self._runtime.remove_lora(request.lora)
        if kind in ("cancelled", "given_up", "dropped"):
            for _ in zip(range(3), handle, strict=False):
                pass
        if kind == "cancelled":
            handle.cancel()

    def _request(self, kind: str, rng: np.random.Generator) -> LLMGenerationRequest:
        """Make a request of a kind."""
        count = int(rng.integers(30, 40)) if kind == "long" else int(rng.integers(1, 8))
        words = " ".join(rng.choice(self._words, count))
        sampling = SamplingParams(max_tokens=int(rng.integers(2, TOKENS + 1)), temperature=0.0)
        request = LLMGenerationRequest(words, sampling=sampling)
        change = dataclasses.replace
        if kind == "sampled":
            return change(request, sampling=change(sampling, temperature=1.0, seed=int(rng.integers(2**32))))
        if kind == "conversation":
            said = (Message("user", words), Message("assistant", "yes"), Message("user", "why"))
            return change(request, prompt="", messages=said[: int(rng.choice((1, 3)))])
        if kind == "grammar":
            return change(request, sampling=change(sampling, **GRAMMARS[rng.integers(len(GRAMMARS))]))
        if kind == "new_grammar":
            return change(request, sampling=change(sampling, regex=f"({words[:5]}|[0-9]{{2,8}})"))
        if kind == "lora":
            return change(request, lora=str(rng.choice(["a", "b"])))
        if kind == "logprobs":
            return change(request, logprobs=5)
        if kind == "event":
            return change(request, cancel=threading.Event())
        if kind == "client_fails":
            return change(request, on_progress=_fail)
        if kind == "invalid":
            return change(request, prompt="long " * 200, lora=str(rng.choice(["", "unknown"])))
        if kind == "removed_lora":
            name = f"once-{rng.integers(2**32)}"
            self._runtime.add_lora(name, self._adapters["a"])
            return change(request, lora=name)
        return request

    def _break_sometimes(self) -> None:
        """Let decoding fail now and then."""
        decode, count = self._runtime.pipeline.decode, 0

        def decode_or_fail(*given: Callable[[], Any] | None) -> None:
            nonlocal count
            count += 1
            if count % FAULT_EVERY == 0:
                raise EngineError(FAULT)
            decode(*given)

        self._runtime.pipeline.decode = decode_or_fail  # type: ignore[method-assign]


FAULT = "a fault of the benchmark"


def _fail(progress: Progress) -> None:
    if progress.tokens > 1:
        raise ClientError


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(write_checkpoint(folder / "checkpoint", SHAPE, "fp32"), folder / "engine", **SIZES)
        adapters = {"a": folder / "a", "b": folder / "b"}
        for rank, directory in enumerate(adapters.values(), 3):
            write_adapter(directory, folder / "engine", rank)
        with LLMInferenceRuntime(folder / "engine") as runtime:
            for name, directory in adapters.items():
                runtime.add_lora(name, directory)
            soak = Soak(runtime, adapters, args.seed)
            readings = _run(soak, runtime, args)
    half = len(readings) // 2
    asked, allocated = ([each[name] for each in readings] for name in ("requests", "allocated_mb"))
    growth = growth_rate(asked[half:], [1e6 * each for each in allocated[half:]], period=5)
    warm, last = readings[len(readings) // SHOWN], readings[-1]
    most = OBJECTS_PER_ROW * SIZES["max_batch_size"]
    passed = (
        not soak.lost
        and not any(each["rows"] or each["objects"] > most for each in readings)
        and growth < MAX_GROWTH
        and all(last[name] <= warm[name] for name in ("threads", "files"))
    )
    return common.finish(
        "request_soak",
        changes={**SIZES, "PYTHONMALLOC": "malloc"},
        passed=passed,
        requests=args.requests,
        clients=args.clients,
        ended=dict(sorted(soak.ended.items())),
        lost=soak.lost[:20],
        readings=[readings[0], *readings[len(readings) // SHOWN :: len(readings) // SHOWN]],
        bytes_per_request=growth,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=integer(READINGS), default=REQUESTS, help="(default: %(default)s)")
    parser.add_argument("--clients", type=integer(1), default=8, help="threads (default: %(default)s)")
    parser.add_argument("--seed", type=integer(0), default=0, help="(default: %(default)s)")
    return parser.parse_args(arguments)


def _run(soak: Soak, runtime: LLMInferenceRuntime, args: argparse.Namespace) -> list[dict[str, float]]:
    """Make all requests; return the readings, the first one before the requests."""
    watch = common.StopWatch()
    readings = [_reading(runtime, 0)]
    ends = np.linspace(0, args.requests, READINGS + 1).astype(int)
    with ThreadPoolExecutor(args.clients) as threads:
        for index, (start, end) in enumerate(pairwise(ends), 1):
            list(threads.map(soak.ask, range(start, end)))
            readings.append(_reading(runtime, int(end)))
            if index % (READINGS // SHOWN) == 0:
                watch.note(str(readings[-1]))
    return readings


def _reading(runtime: LLMInferenceRuntime, requests: int) -> dict[str, float]:
    """Wait until everything has ended, and return what is left."""
    deadline = time.monotonic() + ANSWER_S
    while runtime.pipeline.batch.sequences and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.02)  # the scheduler's thread waits for requests
    memory = read_memory()
    return {
        "requests": requests,
        "resident_mb": resident_memory() / 1e6,
        "allocated_mb": memory.allocated / 1e6,
        "rows": len(runtime.pipeline.batch.sequences),
        "objects": sum(isinstance(each, LEFT_OVER) for each in gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


if __name__ == "__main__":
    if os.environ.get("PYTHONMALLOC") != "malloc":
        os.environ["PYTHONMALLOC"] = "malloc"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.request_soak", *sys.argv[1:]])
    main()
