# SPDX-License-Identifier: Apache-2.0
"""What short answers cost the long one beside them: sequences that have ended leave the batch.

Regime: decoding only, in this process, engine loaded and warm, ONNX Runtime with one thread per core. One
answer of --tokens tokens (drawn at a high temperature, so that it does not end) is decoded alone, beside
three that end after 4 tokens, and beside three as long as itself. If ended sequences stayed in the batch, the
second would cost what the third costs; if they cost nothing at all, what the first does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks import common
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=15, help="default: %(default)s")
    args = parser.parse_args(arguments)
    with LLMInferenceRuntime(common.engine(args)) as runtime:
        long = endless_request(runtime, args.tokens)
        short = replace(long, sampling=replace(long.sampling, max_tokens=4))
        batches = {"alone": [long], "beside_short": [short, short, short, long], "beside_long": [long] * 4}
        seconds: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(args.runs):  # in turns, so that a busy machine disturbs all alike
            for name, batch in batches.items():
                seconds[name].append(runtime.handle_request(batch)[0].metrics["decode_s"])
    spreads = {name: common.spread(values) for name, values in seconds.items()}
    return common.finish(
        "shrinking_batch",
        tokens=args.tokens,
        decode_seconds=spreads,
        ratio_to_alone={
            name: spread["median"] / spreads["alone"]["median"] for name, spread in spreads.items()
        },
    )


def endless_request(runtime: LLMInferenceRuntime, tokens: int) -> LLMGenerationRequest:
    """A request whose answer has this many tokens."""
    for seed in range(1000):
        sampling = SamplingParams(temperature=3.0, seed=seed, max_tokens=tokens)
        request = LLMGenerationRequest("what do you see?", sampling=sampling)
        if len(runtime.handle_request(request).token_ids) == tokens:
            return request
    raise ValueError(f"no answer of {tokens} tokens was found")


if __name__ == "__main__":
    main()
