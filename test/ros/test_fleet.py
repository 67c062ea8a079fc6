# SPDX-License-Identifier: Apache-2.0
"""Two robots in one process: `edgellm_fleet` as a user starts it."""

from __future__ import annotations

import pytest
import yaml
from edgellm_ros.action import Plan
from edgellm_ros.msg import Generation
from edgellm_ros.srv import ListLoras, SetNoiseSeed, SwitchLora

from edgellm_ros.ros.processes import Child, ros_environment
from fixtures import on_device
from fixtures.peer import PlanCall, RobotPeer, image_message

R = Plan.Result
ROBOTS = ("robot1", "robot2")
COMMON = {"autostart": True, "max_input_age": 3.0, "plan_timeout": 30.0, "input_reliability": "reliable"}
LONG_ANSWER = "[a-z]{400}"  # hundreds of tokens; ends when it is cancelled


@pytest.fixture(scope="module")
def start_fleet(domain, tmp_path_factory):
    """`start_fleet("robot1", "robot2", common={...}, robot2={...})`: the process.

    The parameters are in a file: those of all robots, and those of one.
    """
    children = []

    def start(
        *namespaces: str, common: dict | None = None, arguments: tuple[str, ...] = (), **own: dict
    ) -> Child:
        folder = tmp_path_factory.mktemp("fleet")
        base = {"device": on_device.chosen, "drafting": "off", **(common or {})}
        file = {"/**": {"ros__parameters": base}}
        file |= {f"/{name}/edgellm": {"ros__parameters": values} for name, values in own.items()}
        (folder / "fleet.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
        module = ["-m", "edgellm_ros.ros.fleet.main", *namespaces]
        ros = ["--ros-args", "--params-file", str(folder / "fleet.yaml"), *arguments]
        children.append(Child("fleet", [*module, *ros], folder / "fleet.log", ros_environment(domain)))
        return children[-1]

    yield start
    for child in children:
        child.stop()


@pytest.fixture(scope="module")
def robots(domain):
    peers = [RobotPeer(domain, namespace=f"/{name}") for name in ROBOTS]
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture(scope="module")
def fleet(start_fleet, robots, arena_engine):
    """Two robots, active; the second one answers commands with at most 4 tokens."""
    child = start_fleet(*ROBOTS, common={**COMMON, "engine_dir": str(arena_engine)}, robot2={"max_tokens": 4})
    for peer in robots:
        peer.connect()
    return child


@pytest.fixture(autouse=True)
def fresh(request, robots):
    for peer in robots:
        peer.clear()


def goal_of(scene, **fields) -> Plan.Goal:
    goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)], action_samples=1, **fields)
    goal.sampling.max_tokens = 96
    return goal


def long_goals(peer: RobotPeer, scene, count: int) -> list[PlanCall]:
    """Send goals with long answers."""
    calls = []
    for number in range(count):
        goal = goal_of(scene, client=f"client{number}")
        goal.sampling.regex, goal.sampling.max_tokens, goal.action_samples = LONG_ANSWER, 300, 0
        calls.append(peer.send(goal))
        calls[-1].ask_for_result()
    return calls


def to_commands(peer: RobotPeer) -> list[Generation]:
    return [each for each in peer.received["generation"] if each.request_id.startswith("command")]


def values(result: R) -> list[float]:
    return [value for chunk in result.action_chunks for value in chunk.values]


def test_both_answer_at_once_as_each_does_alone(fleet, robots, scene):
    goals = [goal_of(scene), goal_of(scene)]
    goals[1].prompt = "what do you see?"
    alone = [peer.plan(goal) for peer, goal in zip(robots, goals, strict=True)]
    calls = [peer.send(goal) for peer, goal in zip(robots, goals, strict=True)]
    for call in calls:
        call.ask_for_result()
    for call, expected in zip(calls, alone, strict=True):
        result = call.result()
        assert result.termination_reason == R.COMPLETED
        assert result.generation.text == expected.generation.text
        assert values(result) == values(expected)
    assert alone[0].generation.text != alone[1].generation.text
    assert values(alone[0])


def test_each_robot_has_its_own_parameters_and_topics(fleet, robots, scene):
    first, second = robots
    for peer in robots:
        peer.frame(scene.pixels)
        peer.command("what do you see?")
    answers = [peer.wait(lambda peer=peer: to_commands(peer), "answer")[0] for peer in robots]
    assert len(answers[0].token_ids) > 4
    assert list(answers[1].token_ids) == list(answers[0].token_ids)[:4]
    assert first.set_parameter("max_tokens", 5).successful
    assert second.set_parameter("max_tokens", 4).successful
    second.command("what do you see?")
    second.wait(lambda: len(to_commands(second)) == 2, "second answer")
    assert len(to_commands(first)) == 1
    assert first.set_parameter("max_tokens", 96).successful


def test_an_adapter_of_one_does_not_change_answers_of_the_other(fleet, robots, scene):
    first, second = robots
    before = second.plan(goal_of(scene))
    assert first.call(SwitchLora, "switch_lora", name="german").success
    german, after = first.plan(goal_of(scene)), second.plan(goal_of(scene))
    assert (german.generation.lora, after.generation.lora) == ("german", "")
    assert german.generation.text != after.generation.text
    assert (after.generation.text, values(after)) == (before.generation.text, values(before))
    assert [peer.call(ListLoras, "list_loras").active for peer in robots] == ["german", ""]
    assert first.call(SwitchLora, "switch_lora", name="base").success


def test_a_noise_seed_is_that_of_one_robot(fleet, robots, scene):
    first, _ = robots
    before = [values(peer.plan(goal_of(scene, noise_seed=-1))) for peer in robots]
    assert before[0] == before[1]
    assert first.call(SetNoiseSeed, "set_noise_seed", seed=5).success
    after = [values(peer.plan(goal_of(scene, noise_seed=-1))) for peer in robots]
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)
    assert first.call(SetNoiseSeed, "set_noise_seed", seed=0).success


def test_one_drives_while_goals_of_the_other_run(fleet, robots, scene):
    driver, talker = robots
    started = talker.metrics()["share_tokens"], driver.metrics()["share_tokens"]
    calls = long_goals(talker, scene, 4)
    talker.wait(lambda: talker.metrics()["goals_running"], "goals that run")
    driver.frame(scene.pixels)
    driver.command(scene.command)
    driver.wait(lambda: driver.received["action_chunk"], "chunk")
    assert not any(call.ask_for_result().done() for call in calls)
    assert driver.metrics()["share_tokens"] > started[1]
    talker.wait(lambda: talker.metrics()["share_tokens"] > started[0], "tokens of the other")
    for call in calls:
        call.cancel()
        assert call.result().termination_reason == R.CANCELLED


def test_the_goals_of_one_do_not_hold_up_those_of_the_other(fleet, robots, scene):
    greedy, other = robots
    calls = long_goals(greedy, scene, 4)
    greedy.wait(lambda: greedy.metrics()["goals_running"], "goals that run")
    assert other.plan(goal_of(scene)).termination_reason == R.COMPLETED
    assert not all(call.ask_for_result().done() for call in calls)
    for call in calls:
        call.cancel()
        call.result()


def test_one_goes_on_while_the_other_is_deactivated_and_cleaned_up(fleet, robots, scene):
    first, second = robots
    expected = second.plan(goal_of(scene)).generation.text
    for transition in ("deactivate", "cleanup"):
        assert first.transition(transition)
        assert first.plan(goal_of(scene)).message == "the node is not active"
        assert second.plan(goal_of(scene)).generation.text == expected
    for transition in ("configure", "activate"):
        assert first.transition(transition)
    assert first.plan(goal_of(scene)).generation.text == expected


def test_parameters_of_the_engine_must_be_those_of_the_others(fleet, robots, scene):
    first, second = robots
    for transition in ("deactivate", "cleanup"):
        assert first.transition(transition)
    assert first.set_parameter("prefix_cache_mb", 3).successful
    assert not first.transition("configure")
    reason = first.status("engine").message
    assert (
        "parameter prefix_cache_mb is 3, but other robots of this process have opened the engine with -1"
        in reason
    )
    assert second.plan(goal_of(scene)).termination_reason == R.COMPLETED
    assert first.set_parameter("prefix_cache_mb", -1).successful
    for transition in ("configure", "activate"):
        assert first.transition(transition)


def test_the_process_ends_at_a_signal_after_running_goals_have_their_results(fleet, robots, scene):
    calls = [long_goals(peer, scene, 1)[0] for peer in robots]
    for peer in robots:
        peer.wait(lambda peer=peer: peer.metrics()["goals_running"], "goal that runs")
    assert robots[0].transition("shutdown")
    assert calls[0].result().termination_reason == R.PREEMPTED
    assert not calls[1].ask_for_result().done()
    fleet.process.send_signal(2)
    assert calls[1].result().termination_reason == R.PREEMPTED
    assert fleet.process.wait(20) == 0
    assert "Traceback" not in fleet.log.read_text()


@pytest.mark.parametrize(
    ("namespaces", "arguments", "reason"),
    [
        ((), (), "name the robots' namespaces, as in: edgellm_fleet robot1 robot2"),
        (("robot1", "/robot1"), (), "two robots have the namespace '/robot1': they must be different"),
        (
            ("robot1", "robot2"),
            ("-r", "__ns:=/robots"),
            "the ROS arguments set a namespace (__ns): name it before --ros-args instead",
        ),
    ],
)
def test_wrong_namespaces_are_one_line_and_exit_code_2(start_fleet, namespaces, arguments, reason):
    child = start_fleet(*namespaces, arguments=arguments)
    assert child.process.wait(20) == 2
    assert child.log.read_text().splitlines() == [f"edgellm_fleet: error: {reason}"]


def test_a_relative_topic_is_one_of_each_robot(start_fleet, robots, arena_engine):
    child = start_fleet(
        *ROBOTS,
        common={**COMMON, "engine_dir": str(arena_engine)},
        arguments=("-r", "~/image:=camera/image_raw"),
    )
    for peer, name in zip(robots, ROBOTS, strict=True):
        topic = f"/{name}/camera/image_raw"
        peer.wait(
            lambda peer=peer, topic=topic: peer.node.count_subscribers(topic), f"subscription to {topic}"
        )
    assert child.stop() == 0
