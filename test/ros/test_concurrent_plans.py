# SPDX-License-Identifier: Apache-2.0
"""Goals of several clients and driving at once, through a real node."""

from __future__ import annotations

import pytest
from edgellm_ros.action import Plan

from fixtures.peer import PlanCall, image_message

R = Plan.Result
LONG_ANSWER = "[a-z]{400}"  # hundreds of tokens; ends when it is cancelled


@pytest.fixture(autouse=True)
def fresh(node, peer):
    peer.clear()


def begin(peer, scene, *clients: str) -> list[PlanCall]:
    """Send a goal with a long answer of each client, and wait until all are answered."""
    calls = []
    for client in clients:
        goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)], client=client)
        goal.sampling.regex, goal.sampling.max_tokens, goal.action_samples = LONG_ANSWER, 300, 0
        calls.append(peer.send(goal))
        calls[-1].ask_for_result()
    peer.wait(lambda: peer.metrics()["goals_running"] == len(clients), "goals that run")
    return calls


def streamed(peer) -> str:
    return "".join(piece.data for piece in peer.received["text_stream"])


def is_done(call: PlanCall) -> bool:
    return call.ask_for_result().done()


def test_a_command_is_planned_while_goals_run(peer, scene):
    calls = begin(peer, scene, "a", "b", "c")
    peer.frame(scene.pixels)
    peer.command(scene.command)
    peer.wait(lambda: peer.received["action_chunk"], "chunk")
    assert not any(is_done(call) for call in calls)
    peer.wait(lambda: peer.received["generation"], "answer")
    (driving,) = peer.received["generation"]
    assert driving.request_id.startswith("command-")
    calls[1].cancel()
    assert [call.result().termination_reason for call in calls] == [R.COMPLETED, R.CANCELLED, R.COMPLETED]
    peer.wait(lambda: len(peer.received["generation"]) == 3, "answers")
    for generation in (*peer.received["generation"], calls[1].result().generation):
        peer.wait(lambda text=generation.text: text in streamed(peer), "last pieces of the text")
    values = peer.metrics()
    assert (values["driving_started"], values["goals_started"]) == (1, 3)
    assert values["goals_running"] == values["driving_running"] == values["goals_waiting"] == 0
    assert values["driving_wait_median"] < 1.0
    assert values["scheduling_finished"] >= 4


def test_deactivation_ends_all_plans_that_run(peer, scene):
    calls = begin(peer, scene, "a", "b", "c")
    assert peer.transition("deactivate")
    assert [call.result().termination_reason for call in calls] == [R.PREEMPTED] * 3
    assert peer.transition("activate")
    assert peer.metrics()["goals_running"] == 0
