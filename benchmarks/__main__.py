# SPDX-License-Identifier: Apache-2.0
"""Run the default set of benchmarks.

Each benchmark prints one JSON line. The last line has the results of all of them.

Examples
--------
    python -m benchmarks

"""

from __future__ import annotations

import json
import sys

from benchmarks import (
    adapter_cost,
    answers,
    closed_loop,
    memory_growth,
    plan_latency,
    prefix_reuse,
    ros_overhead,
    shrinking_batch,
)

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(
            "python -m benchmarks takes no arguments; run one alone with python -m benchmarks.<name> --help"
        )
    benchmarks = (
        plan_latency,
        prefix_reuse,
        shrinking_batch,
        adapter_cost,
        ros_overhead,
        memory_growth,
        answers,
        closed_loop,
    )
    print(json.dumps({module.__name__.removeprefix("benchmarks."): module.main([]) for module in benchmarks}))
