# SPDX-License-Identifier: Apache-2.0
"""Share of true answers on scenes and sentences that do not occur in training.

Measures
--------
How many answers name the right colour, shape and side of a solid; other parts of the answer are counted
apart. Target: at least 95 of 100.

Conditions
----------
In process, greedy, words only. The scenes are 100 moments (at the start, on the way, beside solids) with
commands and questions.

Examples
--------
    python -m benchmarks.answers
    python -m benchmarks.answers --scenes 500

Last JSON line: `right` of `scenes`, and `share_right` by part of the answer.

"""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks import common
from edgellm_ros.arena.renderer import render
from edgellm_ros.arena.scoring import check
from edgellm_ros.arena.situation import sample_situations, split_rng
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

PARTS = ("color", "shape", "side")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--scenes", type=int, default=100, help="number of scenes (default: %(default)s)")
    args = parser.parse_args(arguments)
    rng = split_rng(common.SEED, "test")
    right, parts, totals = 0, Counter(), Counter()
    with LLMInferenceRuntime(common.engine(args)) as runtime:
        for situation in sample_situations(rng, args.scenes, "test"):
            request = LLMGenerationRequest(
                prompt=situation.command.text,
                images=(render(situation.scene, situation.state, rng),),
                history=situation.history,
                speed=situation.state.speed,
            )
            verdict = check(runtime.handle_request(request).text, situation)
            parts.update(name for name, is_right in verdict.items() if is_right)
            totals.update(verdict.keys())
            right += all(verdict.get(name, True) for name in PARTS)
    shares = {name: parts[name] / totals[name] for name in sorted(totals)}
    return common.finish("answers", scenes=args.scenes, right=right, share_right=shares)


if __name__ == "__main__":
    main()
