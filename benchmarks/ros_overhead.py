# SPDX-License-Identifier: Apache-2.0
"""What ROS costs: the same requests through the Plan action of the node and in process, one after the other
in turn.

Regime: the node in its own process, the client in this one, Fast DDS on this computer. The goal carries the
camera frame (215 kB). Time runs from sending the goal to having the result, feedback being sent on the way;
in process it is `handle_request`. Both engines have all cores, and one of them waits while the other works.
Tokens and actions must be equal to the bit. Target on 2 cores: at most 15 ms more at the median.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.node_process import NodeProcess, goal_of
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--plans", type=int, default=50, help="default: %(default)s")
    args = parser.parse_args(arguments)
    engine = common.engine(args)
    direct_s, action_s, node_s = [], [], []
    with LLMInferenceRuntime(engine) as runtime, NodeProcess(engine) as node:
        for number in range(-3, args.plans):  # the first three warm both up
            request = common.first_look(common.SEED + max(number, 0), noise_seed=0)
            start = time.perf_counter()
            response = runtime.handle_request(request)
            middle = time.perf_counter()
            goal = goal_of(request.prompt, request.images[0])
            result = node.plan(goal)
            end = time.perf_counter()
            if number >= 0:
                direct_s.append(middle - start)
                action_s.append(end - middle)
                node_s.append(result.generation.total_latency)
            _require_equal(response, result)
    return common.finish(
        "ros_overhead",
        plans=args.plans,
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
        raise RuntimeError("the node's actions are not those in process")


if __name__ == "__main__":
    main()
