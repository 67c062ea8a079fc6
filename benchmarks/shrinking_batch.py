# SPDX-License-Identifier: Apache-2.0
"""Cost of short answers in the batch of a long one.

Finished sequences leave the batch.

Measures
--------
Decode time of a long answer alone, beside three answers of 4 tokens, and beside three equally long answers.
If finished sequences stayed in the batch, the second case would cost as much as the third; if short answers
cost nothing, as much as the first.

Conditions
----------
Decoding only, in this process, engine loaded and warm, ONNX Runtime with one thread per core. The long answer
has --tokens tokens, sampled at a high temperature so that it does not end early.

Examples
--------
    python -m benchmarks.shrinking_batch
    python -m benchmarks.shrinking_batch --tokens 300

Last JSON line: `decode_seconds` (median, p90) and `ratio_to_alone` by case.

"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks import common
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=150, help="tokens of the long answer (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=15, help="runs of each case (default: %(default)s)")
    args = parser.parse_args(arguments)
    with LLMInferenceRuntime(common.engine(args)) as runtime:
        long = endless_request(runtime, args.tokens)
        short = replace(long, sampling=replace(long.sampling, max_tokens=4))
        batches = {"alone": [long], "beside_short": [short, short, short, long], "beside_long": [long] * 4}
        seconds: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(args.runs):  # in turns, so that other load affects all cases alike
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
    """Find a request whose answer has this many tokens; ValueError if there is none."""
    for seed in range(1000):
        sampling = SamplingParams(temperature=3.0, seed=seed, max_tokens=tokens)
        request = LLMGenerationRequest("what do you see?", sampling=sampling)
        if len(runtime.handle_request(request).token_ids) == tokens:
            return request
    raise ValueError(f"found no answer of {tokens} tokens with 1000 seeds")


if __name__ == "__main__":
    main()
