# SPDX-License-Identifier: Apache-2.0
"""Clients that ask at once: submitted requests beside one after another.

Measures
--------
Tokens per second of all clients, the time to the first token and the time between two tokens of an answer, as
the clients see them: with `handle_request`, where clients wait for each other, and with `submit`, where their
requests share a batch. With --long, one more client asks with long prompts meanwhile, as often as it can: it
gets more answers with `submit`, and the others take longer. With --samples, it asks for so many trajectories.
The answers of both ways are compared (fp32).

Conditions
----------
Each client is a thread that asks again as soon as it has its answer. Prompts have random words, so that no
prefix but that of the chat template is reused, and answers have --tokens tokens. Both ways take turns, after
a round that is not measured. Weights of --shape are random; a batch has a row for each client. With --samples
the model is the demo's, which has an action head: all clients ask about first frames of episodes, and their
answers are as long as the model makes them, up to --tokens.

With --arrivals FACTOR a client is a user whose requests are due at random times: gaps are exponential, from a
seed, and FACTOR of them take as long as an answer to one user alone. A user who has no answer yet asks when
it has come. --long is a phase of its own then, with `submit` and answers of one token. Targets, on an H200:
with 8 users at least 5 times the tokens per second, a median between tokens of at most 1.6 times that of one
user alone (which `handle_request` is), and beside long prompts no gap of more than two steps (of all users)
and a part of 256 tokens (of the long prompts, alone), which are measured before each round.

Examples
--------
    python -m benchmarks.many_clients
    python -m benchmarks.many_clients --clients 1,8 --long 1000
    python -m benchmarks.many_clients --clients 3 --requests 8 --samples 64
    python -m benchmarks.many_clients --device cuda --shape qwen3-1.7b --precision fp16 --clients 1,4,8
    python -m benchmarks.many_clients --device cuda --shape qwen3-1.7b --precision fp16 --clients 8 \
        --arrivals 1 --tokens 128 --requests 40 --rounds 1 --long 1000

Last JSON line, by number of clients and way: `tokens_per_second`, `cpu_seconds_per_token` (of all threads),
`beside_per_second` (answers of the one more client), `first_token`, `between_tokens` in seconds (median, p90,
longest); `ratios` of `submit` to `handle_request`. With --arrivals also `targets`, each with figure, target
and `passed`, and `long`: seconds of a step, a part and a short prompt, and gaps in units of two steps and a
part (`longest`, `p99`, `gaps_above` of `gaps`).

"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.clients import (
    LETTERS_PER_WORD,
    WORDS,
    Ask,
    Client,
    MakeRequest,
    long_request,
    medians,
    play,
    ratios,
)
from benchmarks.model_shapes import add_shape
from benchmarks.random_arrivals import RandomArrivals
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT
from edgellm_ros.cli.arguments import DEVICES, integer, number
from edgellm_ros.loaded_objects import leave_out_of_collections
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

ROOM = 64  # tokens of the chat template


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    options: dict[str, Any] = {"prefix_cache_bytes": 0}
    with tempfile.TemporaryDirectory() as temporary:
        engine, sizes = _engine(args, Path(temporary))
        with LLMInferenceRuntime(engine, args.device, **options) as runtime:
            leave_out_of_collections()  # as `edgellm serve` and the node do
            results = {
                str(clients): RandomArrivals(runtime, args, clients).measure()
                if args.arrivals
                else _compare(runtime, args, clients)
                for clients in args.clients
            }
            machine = common.machine(runtime.pipeline.device)
    return common.finish(
        "many_clients",
        changes={**sizes, **options},
        shape=None if args.samples else dataclasses.asdict(args.shape),
        precision=args.precision,
        device=args.device,
        **machine,
        tokens=args.tokens,
        requests=args.requests,
        rounds=args.rounds,
        arrivals=args.arrivals,
        long=args.long,
        samples=args.samples,
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
    parser.add_argument(
        "--arrivals",
        type=number(0.01, 100.0),
        metavar="FACTOR",
        help="requests of a client come at random times, so many in the time of an answer alone",
    )
    parser.add_argument(
        "--samples", type=integer(0), default=0, help="trajectories of one more client; 0 = none"
    )
    args = parser.parse_args(arguments)
    if args.samples and (args.long or args.arrivals):
        parser.error("--samples is not for one run with --long or --arrivals")
    return args


def _engine(args: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Export an engine with a row for each client; return it with the sizes."""
    if args.samples:
        sizes = {"max_batch_size": max(args.clients) + 1}
        export(ARENA_CHECKPOINT, folder / "engine", precision=args.precision, **sizes)
        return folder / "engine", sizes
    longest = max(args.long, WORDS * LETTERS_PER_WORD) + ROOM
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
    beside: MakeRequest | None = None
    if args.long:
        beside = partial(long_request, tokens=args.long, answer=2)
    elif args.samples:
        look = common.first_look(common.SEED, action_samples=args.samples)
        beside = lambda rng: look  # noqa: E731
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for index in range(args.rounds + 1):
        gaps, sees = [0.0] * args.requests, args.samples > 0
        each = [Client(args.tokens, gaps, 100 * index + one, sees) for one in range(clients)]
        rounds = {way: play(ask, each, beside) for way, ask in ways.items()}
        if index:
            for way, one in rounds.items():
                found[way].append(one.figures())
        if args.precision == "fp32" and rounds["submit"].answers != rounds["handle_request"].answers:
            raise ValueError("the answers of both ways are not the same")
    both = {way: medians(figures) for way, figures in found.items()}
    return {**both, "ratios": ratios(both["handle_request"], both["submit"])}


if __name__ == "__main__":
    main()
