# SPDX-License-Identifier: Apache-2.0
"""Makes the response of a finished sequence."""

from __future__ import annotations

from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.prompt.tool_call_formats import ParsedAnswer
from edgellm_ros.runtime.request import LLMGenerationResponse


def response_of(
    sequence: GenerationSequence, metrics: dict[str, float], answer: ParsedAnswer
) -> LLMGenerationResponse:
    """Make the response of a finished sequence; `answer`: its tool calls."""
    return LLMGenerationResponse(
        text=sequence.text.text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        prompt_tokens=len(sequence.token_ids),
        logprobs=sequence.logprobs if sequence.request.logprobs else None,
        hidden_states=sequence.states_by_layer,
        actions=sequence.actions,
        paths=sequence.paths,
        noise_seed=sequence.noise_seed,
        lora=sequence.adapter.name,
        lm_head=sequence.adapter.lm_head,
        metrics=metrics,
        reused_tokens=sequence.reused_tokens,
        steps=sequence.steps,
        grammar_complete=sequence.grammar_complete,
        tool_calls=answer.tool_calls,
        content=answer.content,
        tool_call_errors=answer.errors,
    )
