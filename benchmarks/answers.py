# SPDX-License-Identifier: Apache-2.0
"""Whether the robot's answers are true of what it sees, on scenes and sentences that training never saw.

Regime: in process, greedy, words only; 100 moments (at the start, under way, beside things) of commands and
questions about a thing. An answer counts if colour, shape and side are right, whatever else it says. Target:
at least 95 of 100.
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
    parser.add_argument("--scenes", type=int, default=100, help="default: %(default)s")
    args = parser.parse_args(arguments)
    rng = split_rng(common.SEED, "test")
    right, parts, asked = 0, Counter(), Counter()
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
            asked.update(verdict.keys())
            right += all(verdict.get(name, True) for name in PARTS)
    shares = {name: parts[name] / asked[name] for name in sorted(asked)}
    return common.finish("answers", scenes=args.scenes, right=right, share_right=shares)


if __name__ == "__main__":
    main()
