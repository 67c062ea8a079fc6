# SPDX-License-Identifier: Apache-2.0
"""Interfaces that others build against: no name or default changes by accident."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros import action, msg, srv
from edgellm_ros.runtime.sampling_params import SAMPLED

FIELDS = {
    msg.ChatMessage: "role text images tool_calls",
    msg.ToolCall: "name arguments",
    msg.AudioChunk: "header encoding sample_rate channels data",
    msg.SamplingParams: "temperature top_p top_k min_p repetition_penalty max_tokens stop seed "
    "json_schema regex choices",
    msg.Generation: "header request_id text content tool_calls tool_call_errors token_count token_ids "
    "prompt_token_count finish_reason grammar_complete lora action_chunk_count "
    "queue_latency vision_latency audio_latency prefill_latency "
    "first_token_latency decode_latency action_latency total_latency",
    msg.ActionChunk: "header request_id dt horizon names units values sample_index noise_seed",
    msg.PreviousChunk: "form chunk executed delay horizon schedule max_guidance_weight",
    srv.SwitchLora.Request: "name",
    srv.ListLoras.Response: "success message names active",
    srv.SetNoiseSeed.Request: "seed",
    srv.SaveSystemPrompt.Request: "system_prompt lora release",
    srv.GetMetrics.Response: "success message names values",
    action.Plan.Goal: "prompt system_prompt images audio lora sampling noise_seed action_samples "
    "denoise_steps earlier_messages previous_chunk state tools client",
    action.Plan.Feedback: "text tokens stage",
    action.Plan.Result: "generation action_chunks paths termination_reason message",
}


@pytest.mark.parametrize("message_type", FIELDS, ids=lambda message_type: message_type.__name__)
def test_fields(message_type):
    assert list(message_type.get_fields_and_field_types()) == FIELDS[message_type].split()


@pytest.mark.parametrize(
    "service", [srv.SwitchLora, srv.ListLoras, srv.SetNoiseSeed, srv.SaveSystemPrompt, srv.GetMetrics]
)
def test_every_response_has_success_and_message(service):
    assert {"success", "message"} <= set(service.Response.get_fields_and_field_types())


def test_feedback_names_every_stage_of_the_runtime():
    stages = ["grammar", "vision", "audio", "prefill", "decode", "action"]
    assert [getattr(action.Plan.Feedback, stage.upper()) for stage in stages] == stages


def test_a_default_goal_is_sampled_as_the_node_says_and_asks_for_one_trajectory():
    goal = action.Plan.Goal()
    sampling = goal.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (-1.0, -1.0, -1, -1.0)
    assert (sampling.repetition_penalty, sampling.max_tokens, sampling.seed) == (-1.0, 0, -1)
    assert (goal.noise_seed, goal.action_samples, goal.denoise_steps) == (-1, 1, 0)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_sampling_rule_is_a_field_of_goals_with_the_type_of_the_rule(name):
    value = getattr(msg.SamplingParams(), name)
    assert value == -1
    assert type(value) is type(SAMPLED[name].least)


def test_values_of_a_chunk_become_an_array_without_a_copy_per_number():
    chunk = msg.ActionChunk(horizon=2, names=["a", "b"], values=[1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(
        np.asarray(chunk.values).reshape(chunk.horizon, len(chunk.names)), [[1, 2], [3, 4]]
    )
