# SPDX-License-Identifier: Apache-2.0
"""Overhead of ROS: the same requests through the Plan action and in process.

Measures
--------
The time from sending a goal to its result, with feedback on the way, and the time of `handle_request` in
process. Target on 2 cores: at most 15 ms more at the median.

Conditions
----------
The node in its own process, the client in this one, Fast DDS on this computer. The goal carries the camera
frame (215 kB). The two take turns in blocks of ten requests, and the first two of each block are left out:
both engines use all cores and the same caches, so alternating single requests would evict each other's
weights from the cache, which does not happen on a robot. Tokens and actions must be equal to the bit. Every
prompt is recomputed (no prefix reuse).

Examples
--------
    python -m benchmarks.ros_overhead
    python -m benchmarks.ros_overhead --blocks 20

Last JSON line: `in_process_seconds`, `action_seconds` and `inside_node_seconds` (median, p90), `overhead_ms`.

"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.node_process import NodeProcess, goal_of
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

BLOCK, LEFT_OUT = 10, 2


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--blocks", type=int, default=8, help="blocks of ten requests (default: %(default)s)")
    args = parser.parse_args(arguments)
    engine = common.engine(args)
    direct_s, action_s, node_s = [], [], []
    requests = [common.first_look(common.SEED + number, noise_seed=0) for number in range(BLOCK)]
    goals = [goal_of(request.prompt, request.images[0]) for request in requests]
    # Answers are compared to the last bit.
    options: dict[str, Any] = {"prefix_cache_bytes": 0, "drafting": "off"}
    parameters: dict[str, Any] = {"prefix_cache_mb": 0, "drafting": "off"}
    with (
        LLMInferenceRuntime(engine, **options) as runtime,
        NodeProcess(engine, **parameters) as node,
    ):
        for _ in range(args.blocks):
            responses, results = [], []
            for request in requests:
                start = time.perf_counter()
                responses.append(runtime.handle_request(request))
                direct_s.append(time.perf_counter() - start)
            for goal in goals:
                start = time.perf_counter()
                results.append(node.plan(goal))
                action_s.append(time.perf_counter() - start)
                node_s.append(results[-1].generation.total_latency)
            for response, result in zip(responses, results, strict=True):
                _require_equal(response, result)
            for times in (direct_s, action_s, node_s):
                del times[-BLOCK : LEFT_OUT - BLOCK]
    return common.finish(
        "ros_overhead",
        changes={**common.changed(options), **parameters},
        plans=len(action_s),
        in_process_seconds=common.spread(direct_s),
        action_seconds=common.spread(action_s),
        inside_node_seconds=common.spread(node_s),
        overhead_ms=1e3 * (statistics.median(action_s) - statistics.median(direct_s)),
    )


def _require_equal(response: Any, result: Any) -> None:
    if list(result.generation.token_ids) != response.token_ids:
        raise RuntimeError(
            f"the node answered {result.generation.text!r}, in process it was {response.text!r}"
        )
    here = [] if response.actions is None else [actions.ravel() for actions in response.actions]
    there = [np.asarray(chunk.values, np.float32) for chunk in result.action_chunks]
    if len(here) != len(there) or not all(np.array_equal(a, b) for a, b in zip(here, there, strict=True)):
        raise RuntimeError("the node's actions differ from the actions in process")


if __name__ == "__main__":
    main()
