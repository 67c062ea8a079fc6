# SPDX-License-Identifier: Apache-2.0
"""What a system prompt costs that was there before: time to the first token, with and without reuse.

Regime: batch 1, in this process, engine loaded and warm, ONNX Runtime with one thread per core, default
export limits (a prompt of 200 + 107 tokens is within the 320). Every request has the same system prompt of
--system-tokens tokens and a command of its own, half of them also a camera frame of their own, as a robot
sends them: only the system prompt can be reused, and a new frame costs the same in both. Two runtimes answer
the same requests in turns, one that computes every prompt anew and one that reuses; their tokens and actions
must be equal. Time runs from the call of `handle_request` to the report of the first token. Target on 2
cores, for 200 tokens: 40% less.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import common
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress

WORDS = "you are a small robot on a floor with coloured solids and you answer in one short sentence . "


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__)
    parser.add_argument("--requests", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--system-tokens", type=int, default=200, help="default: %(default)s")
    args = parser.parse_args(arguments)
    engine = common.engine(args)
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {"anew": [], "reused": []} for kind in ("words", "new_frame")
    }
    with (
        LLMInferenceRuntime(engine, prefix_cache_bytes=0) as anew,
        LLMInferenceRuntime(engine) as reusing,
    ):
        system_prompt, system_tokens = make_system_prompt(reusing, args.system_tokens)
        reusing.clear_prefix_cache()
        start = time.perf_counter()
        reusing.gen_and_save_system_prompt_kv_cache(system_prompt)
        save_s = time.perf_counter() - start
        for number in range(-3, args.requests):
            look = common.first_look(common.SEED + number, system_prompt=system_prompt)
            words = replace(look, prompt=f"{look.prompt} {number}", images=())
            for kind, request in (("words", words), ("new_frame", look)):
                expected, anew_s = first_token(anew, request)
                answer, reused_s = first_token(reusing, request)
                check_same(answer, expected)
                if number >= 0:
                    seconds[kind]["anew"].append(anew_s)
                    seconds[kind]["reused"].append(reused_s)
    spreads = {kind: {name: common.spread(s) for name, s in both.items()} for kind, both in seconds.items()}
    return common.finish(
        "prefix_reuse",
        requests=2 * args.requests,
        system_tokens=system_tokens,
        prompt_tokens=answer.prompt_tokens,
        reused_tokens=answer.reused_tokens,
        save_seconds=save_s,
        first_token_seconds=spreads,
        saved_share={
            kind: 1 - both["reused"]["median"] / both["anew"]["median"] for kind, both in spreads.items()
        },
    )


def make_system_prompt(runtime: LLMInferenceRuntime, tokens: int) -> tuple[str, int]:
    """A system prompt with which prompts begin alike for about this many tokens, and how many they are."""
    text, found = "", 0
    for word in (WORDS * tokens).split():
        longer = f"{text} {word}".strip()
        count = runtime.gen_and_save_system_prompt_kv_cache(longer)
        if count > tokens:
            break
        text, found = longer, count
    return text, found


def first_token(
    runtime: LLMInferenceRuntime, request: LLMGenerationRequest
) -> tuple[LLMGenerationResponse, float]:
    """The answer, and the seconds until its first token."""
    heard: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.stage == "decode" and not heard:
            heard.append(time.perf_counter())

    start = time.perf_counter()
    response = runtime.handle_request(replace(request, on_progress=listen))
    return response, heard[0] - start


def check_same(answer: LLMGenerationResponse, expected: LLMGenerationResponse) -> None:
    """RuntimeError if reuse changed anything."""
    acts = expected.actions is not None
    if answer.token_ids != expected.token_ids or (answer.actions is not None) != acts:
        raise RuntimeError(f"reuse changed the answer: {answer.token_ids}, expected {expected.token_ids}")
    if acts and not np.array_equal(answer.actions, expected.actions):
        raise RuntimeError("reuse changed the actions")


if __name__ == "__main__":
    main()
