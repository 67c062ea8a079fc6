# SPDX-License-Identifier: Apache-2.0
"""Growth of the node's resident memory over 1,000 plans through the Plan action.

Measures
--------
The median of the last 50 readings, compared with the median of the first 50 after a warm-up of 100 plans that
fill pools and caches. Target: no growth beyond noise (less than 2 MB).

Conditions
----------
The node runs in its own process. Goals are sent one after the other, each with a camera frame, words and one
trajectory, over 20 different scenes.

Examples
--------
    python -m benchmarks.memory_growth
    python -m benchmarks.memory_growth --plans 400

Last JSON line: `plans`, `start_mb`, `warm_mb`, `end_mb`, `growth_mb`.

"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import common
from benchmarks.node_process import NodeProcess, goal_of

WARM_UP = 100
WINDOW = 50


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--plans", type=int, default=1000, help="number of plans, at least 200 (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.plans < WARM_UP + 2 * WINDOW:
        parser.error(f"--plans must be at least {WARM_UP + 2 * WINDOW}, got {args.plans}")
    requests = [common.first_look(common.SEED + number) for number in range(20)]
    goals = [goal_of(request.prompt, request.images[0]) for request in requests]
    sizes = []
    with NodeProcess(common.engine(args)) as node:
        for number in range(args.plans):
            node.plan(goals[number % len(goals)])
            sizes.append(node.resident_bytes())
    first = statistics.median(sizes[WARM_UP : WARM_UP + WINDOW])
    last = statistics.median(sizes[-WINDOW:])
    return common.finish(
        "memory_growth",
        plans=args.plans,
        start_mb=sizes[0] / 1e6,
        warm_mb=first / 1e6,
        end_mb=last / 1e6,
        growth_mb=(last - first) / 1e6,
    )


if __name__ == "__main__":
    main()
