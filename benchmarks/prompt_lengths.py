# SPDX-License-Identifier: Apache-2.0
"""Prefill of prompts whose length is new, beside the same lengths later.

Measures
--------
The seconds of the prefill (`metrics["prefill_s"]`) of prompts that all have different lengths, right after
the runtime was made, and of other prompts of these lengths in a second pass. Targets on an H200: the median
of the first pass at most 1.15 times that of the second, the 99th percentile 1.5 times.

Conditions
----------
One prompt at a time, an answer of one token, with the defaults of LLMInferenceRuntime. Lengths are random
between those of --lengths, in another order in the second pass. Prompts have random words, so that no prefix
but that of the chat template is reused.

Examples
--------
    python -m benchmarks.prompt_lengths
    python -m benchmarks.prompt_lengths --device cuda --shape qwen3-1.7b --precision fp16 --lengths 60,900

Last JSON line: `prefill_seconds` by pass (`first`, `second`: median, p90, p99), their ratios
`first_to_second`, and `start_seconds`, which the runtime took to be made.

"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.model_shapes import add_shape
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import DEVICES, integer
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

LETTERS = 4  # of a random word
WORDS_APART = LETTERS + 2  # tokens between two lengths, at most: a word of a byte-level tokenizer
ROOM = 64  # tokens of the chat template, and of a word more


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        engine, sizes = _engine(args, Path(temporary))
        start = time.perf_counter()
        with LLMInferenceRuntime(engine, args.device) as runtime:
            started = time.perf_counter() - start
            prompts = _prompts(runtime, args)
            order = np.random.default_rng(args.seed)
            passes = {
                name: [_prefill(runtime, prompts[pair][number]) for pair in order.permutation(len(prompts))]
                for number, name in enumerate(("first", "second"))
            }
            machine = common.machine(runtime.pipeline.device)
    seconds = {name: _spread([each for each, _ in found]) for name, found in passes.items()}
    first, second = seconds["first"], seconds["second"]
    return common.finish(
        "prompt_lengths",
        changes=sizes,
        engine=str(engine) if args.shape is None else None,
        shape=None if args.shape is None else dataclasses.asdict(args.shape),
        precision=None if args.shape is None else args.precision,
        device=args.device,
        **machine,
        prompts=len(prompts),
        computed_tokens=sorted(tokens for _, tokens in passes["first"]),
        start_seconds=started,
        prefill_seconds=seconds,
        first_to_second={name: first[name] / second[name] for name in first},
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    common.add_engines(parser)
    add_shape(parser)
    parser.set_defaults(shape=None)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp32"),
        default="fp16",
        help="of --shape (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=integer(2), default=40, help="lengths (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=common.numbers(int),
        default=[60, 300],
        metavar="LOW,HIGH",
        help="shortest and longest prompt in tokens, about (default: 60,300)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and words (default: %(default)s)")
    args = parser.parse_args(arguments)
    low, high = args.lengths
    if high - low < WORDS_APART * args.prompts:
        parser.error(
            f"--lengths {low},{high} has too few lengths for --prompts {args.prompts}: expected LOW and HIGH "
            f"at least {WORDS_APART * args.prompts} apart"
        )
    return args


def _engine(args: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the engine directory, and the export options that are not the defaults."""
    if args.shape is None:
        return Path(common.engines(args)[0]), {}
    longest = args.lengths[1] + ROOM
    sizes = {"max_batch_size": 1, "max_input_len": longest, "max_kv_cache_capacity": longest + 1}
    checkpoint = write_checkpoint(folder / "checkpoint", args.shape, args.precision)
    export(checkpoint, folder / "engine", precision=args.precision, **sizes)
    return folder / "engine", sizes


def _prompts(runtime: LLMInferenceRuntime, args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return pairs of prompts of one length, a length of its own for each pair."""
    random, (low, high) = np.random.default_rng(args.seed), args.lengths
    few, many = (len(_token_ids(runtime, random_words(random, count))) for count in (8, 16))
    per_word = (many - few) / 8
    pairs: dict[int, tuple[str, str]] = {}
    while len(pairs) < args.prompts:
        wanted = int(random.integers(low, high + 1))
        words = random_words(random, max(1, 8 + round((wanted - few) / per_word)))
        pair = words, " ".join(reversed(words.split(" ")))
        lengths = {len(_token_ids(runtime, text)) for text in pair}
        if len(lengths) == 1:
            pairs.setdefault(lengths.pop(), pair)
    return list(pairs.values())


def random_words(random: np.random.Generator, count: int) -> str:
    """Make words of LETTERS letters each."""
    letters = random.integers(ord("a"), ord("z") + 1, (count, LETTERS))
    return " ".join("".join(map(chr, word)) for word in letters)


def _request(text: str) -> LLMGenerationRequest:
    return LLMGenerationRequest(text, sampling=SamplingParams(max_tokens=1))


def _token_ids(runtime: LLMInferenceRuntime, text: str) -> list[int]:
    (sequence,) = runtime.pipeline.prepare([_request(text)], noise_seed=0)
    return sequence.token_ids


def _prefill(runtime: LLMInferenceRuntime, text: str) -> tuple[float, int]:
    """Return the seconds of a prompt's prefill, and the number of its computed tokens."""
    response = runtime.handle_request(_request(text))
    return response.metrics["prefill_s"], response.prompt_tokens - response.reused_tokens


def _spread(seconds: list[float]) -> dict[str, float]:
    return {**common.spread(seconds), "p99": float(np.percentile(seconds, 99))}


if __name__ == "__main__":
    main()
