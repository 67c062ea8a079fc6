# SPDX-License-Identifier: Apache-2.0
"""Time to the first token after a known system prompt, with and without reuse.

Measures
--------
The time from the call of `handle_request` to the report of the first token. Target on 2 cores, with 200
tokens: 40% less with reuse.

Conditions
----------
Batch 1, in this process, engine loaded and warm, ONNX Runtime with one thread per core, default export limits
(a prompt of 200 + 107 tokens is below the limit of 320). Every request has the same system prompt of
--system-tokens tokens and its own command. Half of the requests also have their own camera frame, as a
robot's have; only the system prompt can be reused then, and encoding the frame costs the same in both cases.
Two runtimes answer the same requests in turns: one recomputes every prompt, the other reuses prefixes. Their
tokens and actions must be equal.

Examples
--------
    python -m benchmarks.prefix_reuse
    python -m benchmarks.prefix_reuse --system-tokens 100 --requests 20

Last JSON line: `first_token_seconds` by kind of request (`words`, `new_frame`) and runtime (`recomputed`,
`reused`), `saved_share`, `save_seconds`, and numbers of tokens.

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
    parser.add_argument(
        "--requests", type=int, default=60, help="requests of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--system-tokens", type=int, default=200, help="length of the system prompt (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    engine = common.engine(args)
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {"recomputed": [], "reused": []} for kind in ("words", "new_frame")
    }
    equal: dict[str, Any] = {"drafting": "off"}  # actions are compared to the last bit
    without: dict[str, Any] = {"prefix_cache_bytes": 0, **equal}
    with (
        LLMInferenceRuntime(engine, **without) as recomputing,
        LLMInferenceRuntime(engine, **equal) as reusing,
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
                expected, recomputed_s = first_token(recomputing, request)
                answer, reused_s = first_token(reusing, request)
                check_same(answer, expected)
                if number >= 0:
                    seconds[kind]["recomputed"].append(recomputed_s)
                    seconds[kind]["reused"].append(reused_s)
    spreads = {kind: {name: common.spread(s) for name, s in both.items()} for kind, both in seconds.items()}
    return common.finish(
        "prefix_reuse",
        changes=common.changed(without),
        requests=2 * args.requests,
        system_tokens=system_tokens,
        prompt_tokens=answer.prompt_tokens,
        reused_tokens=answer.reused_tokens,
        save_seconds=save_s,
        first_token_seconds=spreads,
        saved_share={
            kind: 1 - both["reused"]["median"] / both["recomputed"]["median"]
            for kind, both in spreads.items()
        },
    )


def make_system_prompt(runtime: LLMInferenceRuntime, tokens: int) -> tuple[str, int]:
    """Make a system prompt of which about this many tokens can be reused.

    Returns the prompt and the exact number.
    """
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
    """Return the answer, and the seconds until its first token."""
    heard: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.stage == "decode" and not heard:
            heard.append(time.perf_counter())

    start = time.perf_counter()
    response = runtime.handle_request(replace(request, on_progress=listen))
    return response, heard[0] - start


def check_same(answer: LLMGenerationResponse, expected: LLMGenerationResponse) -> None:
    """Raise RuntimeError if reuse changed the tokens or actions."""
    acts = expected.actions is not None
    if answer.token_ids != expected.token_ids or (answer.actions is not None) != acts:
        raise RuntimeError(f"reuse changed the answer: {answer.token_ids}, expected {expected.token_ids}")
    if acts and not np.array_equal(answer.actions, expected.actions):
        raise RuntimeError("reuse changed the actions")


if __name__ == "__main__":
    main()
