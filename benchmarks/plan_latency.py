# SPDX-License-Identifier: Apache-2.0
"""Latency of one plan in process, from camera frame to words and trajectory.

Measures
--------
The time of `handle_request`, and the time to the first progress report with words. Targets on 2 cores: one
plan at most 0.5 s, first words at most 0.15 s (medians).

Conditions
----------
Batch 1, one request after the other, in this process, engine loaded and warm, ONNX Runtime with one thread
per core. Each request is the first frame of another episode, so answers differ in length. No prefix reuse,
greedy decoding, the checkpoint's own number of Euler steps.

Examples
--------
    python -m benchmarks.plan_latency
    python -m benchmarks.plan_latency --plans 200

Last JSON line: `plan_seconds` and `first_words_seconds` (median, p90), `median_tokens`, `with_trajectory` of
`plans`.

"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks import common
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import Progress


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--plans", type=int, default=50, help="number of plans (default: %(default)s)")
    args = parser.parse_args(arguments)
    plan_s, words_s, tokens, driving = [], [], [], 0
    options: dict[str, Any] = {"prefix_cache_bytes": 0}
    with LLMInferenceRuntime(common.engine(args), **options) as runtime:
        for _ in range(3):
            runtime.handle_request(common.first_look(common.SEED))
        for number in range(args.plans):
            request = common.first_look(common.SEED + number)
            heard: list[float] = []

            def listen(progress: Progress, heard: list[float] = heard) -> None:
                if progress.text and not heard:
                    heard.append(time.perf_counter())

            start = time.perf_counter()
            response = runtime.handle_request(replace(request, on_progress=listen))
            plan_s.append(time.perf_counter() - start)
            if heard:
                words_s.append(heard[0] - start)
            tokens.append(len(response.token_ids))
            driving += response.actions is not None
    return common.finish(
        "plan_latency",
        changes=common.changed(options),
        plans=args.plans,
        with_trajectory=driving,
        median_tokens=statistics.median(tokens),
        plan_seconds=common.spread(plan_s),
        first_words_seconds=common.spread(words_s) if words_s else None,
    )


if __name__ == "__main__":
    main()
