# SPDX-License-Identifier: Apache-2.0
"""Share of true answers on scenes and sentences that do not occur in training.

Measures
--------
How many answers name the right colour, shape and side of a solid; other parts of the answer are counted
apart. Target: at least 95 of 100. With several --engines: the same for each, and how many of its answers are
those of the first one.

Conditions
----------
In process, greedy, words only. The scenes are 100 moments (at the start, on the way, beside solids) with
commands and questions.

Examples
--------
    python -m benchmarks.answers
    python -m benchmarks.answers --scenes 500
    python -m benchmarks.answers --scenes 500 --engines engines/arena,engines/arena-int8

Last JSON line: `right` of `scenes`, and `share_right` by part of the answer; with --engines both for each
directory in `engines`, with `same`.

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
    common.add_engines(parser)
    args = parser.parse_args(arguments)
    results: dict[str, dict[str, Any]] = {}
    reference: list[str] = []
    for folder in common.engines(args):
        texts, result = answer_scenes(folder, args.scenes)
        reference = reference or texts
        same = sum(ours == theirs for ours, theirs in zip(texts, reference, strict=True))
        results[folder] = {**result, "same": same}
    if args.engines:
        return common.finish("answers", scenes=args.scenes, engines=results)
    return common.finish("answers", scenes=args.scenes, **result)


def answer_scenes(engine: str, scenes: int) -> tuple[list[str], dict[str, Any]]:
    """Return an engine's answers, the number of right ones, and the share by part."""
    rng = split_rng(common.SEED, "test")
    texts, right, parts, totals = [], 0, Counter[str](), Counter[str]()
    with LLMInferenceRuntime(engine) as runtime:
        for situation in sample_situations(rng, scenes, "test"):
            request = LLMGenerationRequest(
                prompt=situation.command.text,
                images=(render(situation.scene, situation.state, rng),),
                history=situation.history,
                speed=situation.state.speed,
            )
            texts.append(runtime.handle_request(request).text)
            verdict = check(texts[-1], situation)
            parts.update(name for name, is_right in verdict.items() if is_right)
            totals.update(verdict.keys())
            right += all(verdict.get(name, True) for name in PARTS)
    shares = {name: parts[name] / totals[name] for name in sorted(totals)}
    return texts, {"right": right, "share_right": shares}


if __name__ == "__main__":
    main()
