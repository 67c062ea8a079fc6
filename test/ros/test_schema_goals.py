# SPDX-License-Identifier: Apache-2.0
"""Many goals with JSON schemas, to a node whose random model samples freely."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from edgellm_ros.action import Plan

from fixtures.peer import image_message
from fixtures.random_grammars import random_schema
from fixtures.reference_inputs import make_image

GOALS = 100
TEMPERATURES = (0.0, 0.7, 1.0, 2.0)


@pytest.fixture(scope="module")
def node(start_node, peer, sampling_engine):
    child = start_node(engine_dir=sampling_engine, autostart="true", max_tokens=300, plan_timeout=60.0)
    peer.connect()
    return child


@pytest.mark.slow
def test_no_answer_is_cut_for_white_space_and_every_answer_is_valid(node, peer):
    rng = np.random.default_rng(7)
    image = image_message(make_image(48, 64))
    for index in range(GOALS):
        schema = random_schema(rng)
        goal = Plan.Goal(prompt="what do you see?", images=[image], action_samples=0)
        goal.sampling.json_schema = json.dumps(schema)
        goal.sampling.temperature = TEMPERATURES[index % len(TEMPERATURES)]
        goal.sampling.seed = index
        answer = peer.plan(goal).generation
        assert (answer.finish_reason, answer.grammar_complete) == ("stop", True), (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)
