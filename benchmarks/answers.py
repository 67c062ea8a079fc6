# SPDX-License-Identifier: Apache-2.0
"""Share of true answers on scenes and sentences that do not occur in training.

Measures
--------
How many answers name the right colour, shape and side of a solid; other parts of the answer are counted
apart. Target: at least 95 of 100. With several --engines: the same for each, how many of its answers are
those of the first one, and its logits beside those of the first one.

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
directory in `engines`, with `same` and `logits` (relative error and others, as in the report of `edgellm
export --quantize`).

"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import common
from edgellm_arena.episodes.scoring import check
from edgellm_arena.episodes.situation import Situation, sample_situations, split_rng
from edgellm_arena.world.renderer import render
from edgellm_ros.cli.quantization.cost import compare_engines
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

PARTS = ("color", "shape", "side")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--scenes", type=int, default=100, help="number of scenes (default: %(default)s)")
    common.add_engines(parser)
    args = parser.parse_args(arguments)
    scenes = make_scenes(args.scenes)
    results: dict[str, dict[str, Any]] = {}
    reference: list[str] = []
    folders = common.engines(args)
    for folder in folders:
        texts, result = answer_scenes(folder, scenes)
        reference = reference or texts
        same = sum(ours == theirs for ours, theirs in zip(texts, reference, strict=True))
        results[folder] = {**result, "same": same}
    if not args.engines:
        return common.finish("answers", scenes=args.scenes, **result)
    requests = {str(number): request for number, (_, request) in enumerate(scenes)}
    costs = compare_engines(Path(folders[0]), [Path(folder) for folder in folders[1:]], requests)
    for folder, cost in zip(folders[1:], costs, strict=True):
        print(f"{folder}: {cost}", file=sys.stderr)
        results[folder]["logits"] = dataclasses.asdict(cost)
    return common.finish("answers", scenes=args.scenes, engines=results)


def make_scenes(count: int) -> list[tuple[Situation, LLMGenerationRequest]]:
    """Make scenes and the requests that ask about them."""
    rng = split_rng(common.SEED, "test")
    scenes = []
    for situation in sample_situations(rng, count, "test"):
        request = LLMGenerationRequest(
            prompt=situation.command.text,
            images=(render(situation.scene, situation.state, rng),),
            history=situation.history,
            speed=situation.state.speed,
        )
        scenes.append((situation, request))
    return scenes


def answer_scenes(
    engine: str, scenes: list[tuple[Situation, LLMGenerationRequest]]
) -> tuple[list[str], dict[str, Any]]:
    """Return an engine's answers, the number of right ones, and the share by part."""
    texts, right, parts, totals = [], 0, Counter[str](), Counter[str]()
    with LLMInferenceRuntime(engine) as runtime:
        for situation, request in scenes:
            texts.append(runtime.handle_request(request).text)
            verdict = check(texts[-1], situation)
            parts.update(name for name, is_right in verdict.items() if is_right)
            totals.update(verdict.keys())
            right += all(verdict.get(name, True) for name in PARTS)
    shares = {name: parts[name] / totals[name] for name in sorted(totals)}
    return texts, {"right": right, "share_right": shares}


if __name__ == "__main__":
    main()
