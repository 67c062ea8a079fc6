# SPDX-License-Identifier: Apache-2.0
"""Clients that ask at once: submitted requests beside one after another.

Measures
--------
Tokens per second of all clients, the time to the first token and the time between two tokens of an answer, as
the clients see them: with `handle_request`, where clients wait for each other, and with `submit`, where their
requests share a batch. With --long, one more client asks with long prompts meanwhile, as often as it can: it
gets more answers with `submit`, and the others take longer. The answers of both ways are compared.

Conditions
----------
Each client is a thread that asks again as soon as it has its answer. Prompts have random words, so that no
prefix but that of the chat template is reused, and answers have --tokens tokens. Both ways take turns, after
a round that is not measured. Weights of --shape are random; a batch has a row for each client.

Examples
--------
    python -m benchmarks.many_clients
    python -m benchmarks.many_clients --clients 1,8 --long 1000
    python -m benchmarks.many_clients --device cuda --shape qwen3-1.7b --precision fp16 --clients 1,4,8

Last JSON line, by number of clients and way: `tokens_per_second`, `cpu_seconds_per_token` (of all threads),
`long_prompts_per_second`, `first_token`, `between_tokens` in seconds (median, p90, longest); `ratios` of
`submit` to `handle_request`.

"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.model_shapes import add_shape
from benchmarks.prompt_lengths import random_words
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams

WORDS = 12  # of a prompt
ROOM = 64  # tokens of the chat template
Ask = Callable[[LLMGenerationRequest], LLMGenerationResponse]


@dataclasses.dataclass
class Times:
    """When the answers of a client came, in seconds."""

    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    answers: list[list[int]] = dataclasses.field(default_factory=list)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    options: dict[str, Any] = {"prefix_cache_bytes": 0}
    with tempfile.TemporaryDirectory() as temporary:
        engine, sizes = _engine(args, Path(temporary))
        with LLMInferenceRuntime(engine, args.device, **options) as runtime:
            results = {str(clients): _compare(runtime, args, clients) for clients in args.clients}
            machine = common.machine(runtime.pipeline.device)
    return common.finish(
        "many_clients",
        changes={**sizes, **options},
        shape=dataclasses.asdict(args.shape),
        precision=args.precision,
        device=args.device,
        **machine,
        tokens=args.tokens,
        long=args.long,
        clients=results,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape(parser, default="smollm2-135m")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp32"),
        default="fp32",
        help="of --shape (default: %(default)s)",
    )
    parser.add_argument(
        "--clients", type=common.numbers(int), default=[1, 4], metavar="N,N", help="(default: 1,4)"
    )
    parser.add_argument("--requests", type=integer(1), default=2, help="of a client (default: %(default)s)")
    parser.add_argument("--tokens", type=integer(2), default=32, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=integer(1), default=3, help="of both ways (default: %(default)s)")
    parser.add_argument(
        "--long", type=integer(0), default=0, metavar="TOKENS", help="of prompts of one more client; 0 = none"
    )
    return parser.parse_args(arguments)


def _engine(args: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Export an engine with a row for each client; return it with the sizes."""
    longest = max(args.long, WORDS * 6) + ROOM
    sizes = {
        "max_batch_size": max(args.clients) + bool(args.long),
        "max_input_len": min(longest, 1024),
        "max_kv_cache_capacity": longest + args.tokens,
    }
    checkpoint = write_checkpoint(folder / "checkpoint", args.shape, args.precision)
    export(checkpoint, folder / "engine", precision=args.precision, **sizes)
    return folder / "engine", sizes


def _compare(runtime: LLMInferenceRuntime, args: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Measure both ways in turns, with so many clients."""
    ways: dict[str, Ask] = {
        "handle_request": runtime.handle_request,
        "submit": lambda request: runtime.submit(request).result(),
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        answers = {}
        for way, ask in ways.items():
            result, answers[way] = _round(runtime, args, ask, clients, seed=number)
            if number:
                found[way].append(result)
        if args.precision == "fp32" and answers["submit"] != answers["handle_request"]:
            raise ValueError("the answers of both ways are not the same")
    medians = {way: _median(rounds) for way, rounds in found.items()}
    one, other = medians["handle_request"], medians["submit"]
    ratios = {
        "tokens_per_second": other["tokens_per_second"] / one["tokens_per_second"],
        "cpu_seconds_per_token": other["cpu_seconds_per_token"] / one["cpu_seconds_per_token"],
        "first_token": other["first_token"]["median"] / one["first_token"]["median"],
        "between_tokens": other["between_tokens"]["median"] / one["between_tokens"]["median"],
    }
    return {**medians, "ratios": ratios}


def _round(
    runtime: LLMInferenceRuntime, args: argparse.Namespace, ask: Ask, clients: int, seed: int
) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """Let all clients ask once each round; return the figures and the answers."""
    times = [Times() for _ in range(clients)]
    stop = threading.Event()
    threads = [
        threading.Thread(target=_client, args=(ask, args, each, 100 * seed + index))
        for index, each in enumerate(times)
    ]
    long_prompts: list[float] = []
    beside = threading.Thread(target=_long_client, args=(ask, args.long, stop, long_prompts))
    start, cpu = time.perf_counter(), time.process_time()
    if args.long:
        beside.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stop.set()
    if args.long:
        beside.join()
    tokens, last = sum(each.tokens for each in times), start + seconds
    return {
        "tokens_per_second": tokens / seconds,
        "cpu_seconds_per_token": cpu / tokens,
        "long_prompts_per_second": sum(end <= last for end in long_prompts) / seconds,
        "first_token": _spread([each for client in times for each in client.first]),
        "between_tokens": _spread([each for client in times for each in client.between]),
    }, [each.answers for each in times]


def _client(ask: Ask, args: argparse.Namespace, times: Times, seed: int) -> None:
    """Ask one request after another."""
    rng = np.random.default_rng(seed)
    for _ in range(args.requests):
        arrived: list[float] = []
        request = LLMGenerationRequest(
            random_words(rng, WORDS),
            sampling=SamplingParams(max_tokens=args.tokens, temperature=0.0),
            on_progress=lambda progress, arrived=arrived: (
                arrived.append(time.perf_counter()) if progress.tokens > len(arrived) else None
            ),
        )
        start = time.perf_counter()
        response = ask(request)
        times.first.append(arrived[0] - start)
        times.between += [after - before for before, after in pairwise(arrived)]
        times.tokens += len(response.token_ids)
        times.answers.append(response.token_ids)


def _long_client(ask: Ask, tokens: int, stop: threading.Event, ends: list[float]) -> None:
    """Ask with prompts of about so many tokens until told to stop.

    Appends the time of each answer to `ends`.
    """
    rng = np.random.default_rng(1)
    while not stop.is_set():
        words = random_words(rng, tokens // 6)
        ask(LLMGenerationRequest(words, sampling=SamplingParams(max_tokens=2, temperature=0.0)))
        ends.append(time.perf_counter())


def _spread(seconds: list[float]) -> dict[str, float]:
    return {**common.spread(seconds), "longest": max(seconds)}


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the rounds, and of longest times the longest."""
    result: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [each[name] for each in rounds]
        if isinstance(first, dict):
            result[name] = {key: float(np.median([each[key] for each in values])) for key in first}
            result[name]["longest"] = max(each["longest"] for each in values)
        else:
            result[name] = float(np.median(values))
    return result


if __name__ == "__main__":
    main()
