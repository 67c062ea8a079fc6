# SPDX-License-Identifier: Apache-2.0
"""Adapters of a node that runs: listed, switched, named by goals, loaded, removed."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from edgellm_ros.action import Plan
from edgellm_ros.srv import ListLoras, SwitchLora
from rcl_interfaces.srv import GetParameters

from edgellm_ros.ros.node.settings.loras import change_loras
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.peer import image_message
from fixtures.tiny_adapter import write_adapter

R = Plan.Result
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def directories(tiny_checkpoint, tmp_path_factory):
    """Adapters with random weights: strong enough to change answers.

    `broken` has lost its tensors, `foreign` belongs to another model.
    """
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("wild", "odd", "late", "broken")):
        write_adapter(root / name, ARENA_CHECKPOINT, seed=seed, strength=0.8)
    write_adapter(root / "foreign", tiny_checkpoint)
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"{}")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def engine(directories, tmp_path_factory):
    """The demo's engines with LoRA inputs and `wild` inside, and no other adapter."""
    from edgellm_ros.builder import export
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

    directory = tmp_path_factory.mktemp("lora_engine")
    export(ARENA_CHECKPOINT, directory, max_lora_rank=8)
    shutil.rmtree(directory / "lora", ignore_errors=True)
    shutil.copytree(directories["wild"], directory / "lora" / "wild")
    return directory


@pytest.fixture(scope="module")
def node(start_node, peer, engine, directories):
    """The node with two adapters, `odd` by parameter and active."""
    loras = f"['odd={directories['odd']}']"
    child = start_node(
        engine_dir=engine, loras=loras, lora="odd", autostart="true", max_input_age=3.0, plan_timeout=30.0
    )
    peer.connect()
    return child


@pytest.fixture
def fresh(node, peer, engine, directories):
    """The node as it started."""
    assert peer.call(SwitchLora, "switch_lora", name="odd").success
    assert peer.set_parameter("loras", [f"odd={directories['odd']}"]).successful
    peer.clear()
    return node


@pytest.fixture(scope="module")
def texts(engine, directories, scene):
    """What each adapter answers in process; "" is the base model."""
    one = LLMGenerationRequest(
        scene.command, images=(scene.pixels,), sampling=SamplingParams(max_tokens=MAX_TOKENS)
    )
    names = {name: directories[name] for name in ("wild", "odd", "late")}
    with LLMInferenceRuntime(engine, lora_dirs=names) as runtime:
        answers = {
            name: runtime.handle_request(dataclasses.replace(one, lora=name)).text for name in ("", *names)
        }
    assert len(set(answers.values())) == 4
    return answers


@pytest.fixture
def goal(scene):
    goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)], action_samples=0)
    goal.sampling.max_tokens = MAX_TOKENS
    return goal


def listed(peer):
    response = peer.call(ListLoras, "list_loras")
    assert response.success
    return list(response.names), response.active


def answer(peer, goal, lora=""):
    """Text and adapter of the answer to the goal."""
    goal.lora = lora
    result = peer.plan(goal)
    assert result.termination_reason == R.COMPLETED, result.message
    return result.generation.text, result.generation.lora


def test_adapters_of_the_engine_directory_and_of_the_parameters_are_listed(fresh, peer):
    assert listed(peer) == (["odd", "wild"], "odd")


def test_goals_get_the_adapter_they_name_or_the_active_one(fresh, peer, goal, texts):
    assert answer(peer, goal, "wild") == (texts["wild"], "wild")
    assert answer(peer, goal, "base") == (texts[""], "")
    assert answer(peer, goal) == (texts["odd"], "odd")


def test_a_switch_counts_for_goals_and_commands(fresh, peer, goal, texts, scene):
    for name in ("wild", "", "odd"):
        assert peer.call(SwitchLora, "switch_lora", name=name).success
        assert listed(peer)[1] == name
        assert answer(peer, goal) == (texts[name], name)
    peer.call(SwitchLora, "switch_lora", name="wild")
    peer.clear()
    peer.frame(scene.pixels)
    peer.command(scene.command)
    generation = peer.wait(lambda: peer.received["generation"], "generation")[0]
    assert generation.lora == "wild"
    assert generation.text.startswith(texts["wild"][:20])


def test_a_switch_to_the_base_model_by_its_name(fresh, peer, goal, texts):
    assert peer.call(SwitchLora, "switch_lora", name="base").success
    assert listed(peer) == (["odd", "wild"], "")
    assert answer(peer, goal) == (texts[""], "")


def test_a_failed_switch_leaves_the_old_one_active(fresh, peer, goal, texts):
    response = peer.call(SwitchLora, "switch_lora", name="polite")
    assert not response.success
    assert response.message == "unknown LoRA adapter 'polite'; loaded: odd, wild"
    assert listed(peer) == (["odd", "wild"], "odd")
    assert answer(peer, goal) == (texts["odd"], "odd")


def test_a_goal_with_an_unknown_adapter_ends_with_an_error_and_the_node_goes_on(fresh, peer, goal, texts):
    goal.lora = "polite"
    result = peer.plan(goal)
    assert result.termination_reason == R.ERROR
    assert "unknown LoRA adapter 'polite'; loaded: odd, wild" in result.message
    assert answer(peer, goal) == (texts["odd"], "odd")


def test_an_adapter_is_loaded_and_removed_while_the_node_runs(fresh, peer, goal, texts, directories):
    both = [f"odd={directories['odd']}", f"late={directories['late']}"]
    assert peer.set_parameter("loras", both).successful
    assert answer(peer, goal, "late") == (texts["late"], "late")
    assert listed(peer) == (["late", "odd", "wild"], "odd")
    assert peer.set_parameter("loras", both[:1]).successful
    assert listed(peer) == (["odd", "wild"], "odd")
    goal.lora = "late"
    assert "unknown LoRA adapter 'late'" in peer.plan(goal).message


def test_a_change_of_which_one_part_fails_changes_nothing(engine, directories):
    with LLMInferenceRuntime(engine) as runtime:
        before = {"wild": directories["wild"], "unknown": directories["odd"]}
        with pytest.raises(ValueError, match="unknown LoRA adapter 'unknown'"):
            change_loras(runtime, before, {"late": directories["late"]})
        assert runtime.lora_names() == ["wild"]


def test_the_active_adapter_cannot_be_removed(fresh, peer, directories):
    verdict = peer.set_parameter("loras", [f"late={directories['late']}"])
    assert not verdict.successful
    assert verdict.reason == "adapter 'odd' is active: switch to another before it is removed"
    assert listed(peer) == (["odd", "wild"], "odd")
    assert peer.call(SwitchLora, "switch_lora", name="").success
    assert peer.set_parameter("loras", [""]).successful
    assert listed(peer) == (["wild"], "")
    assert peer.set_parameter("loras", [f"odd={directories['odd']}"]).successful


@pytest.mark.parametrize(
    ("loras", "reason"),
    [
        ("new=/nowhere", "/nowhere is neither the directory of a PEFT adapter nor a .safetensors file"),
        ("wild={late}", "adapter 'wild' is in the engine directory already: choose another name"),
        ("odd={late}", "adapter 'odd' is loaded from"),
        ("late", "loras must be strings NAME=DIR, got 'late'"),
        ("a b={late}", "an adapter's name must consist of letters"),
        ("odd={odd}", "loras names 'odd' twice"),
    ],
)
def test_values_that_cannot_be_loaded_are_refused_at_once(
    fresh, peer, goal, texts, directories, loras, reason
):
    wanted = [f"odd={directories['odd']}", f"late={directories['late']}", loras.format(**directories)]
    if loras.startswith("odd={late}"):
        wanted = wanted[1:]
    verdict = peer.set_parameter("loras", wanted)
    assert not verdict.successful
    assert reason in verdict.reason
    assert listed(peer) == (["odd", "wild"], "odd")
    assert answer(peer, goal) == (texts["odd"], "odd")


@pytest.mark.parametrize(
    ("loras", "reason"),
    [
        ("broken={broken}", "broken/adapter_model.safetensors: damaged or cut short"),
        ("new={foreign}", "an adapter of another model?"),
    ],
)
def test_after_a_failed_load_all_adapters_and_the_parameter_are_as_before(
    fresh, peer, goal, texts, directories, loras, reason
):
    before = [f"odd={directories['odd']}"]
    wanted = [*before, f"late={directories['late']}", loras.format(**directories)]
    assert peer.set_parameter("loras", wanted).successful
    assert listed(peer) == (["odd", "wild"], "odd")
    values = peer.call(GetParameters, "get_parameters", names=["loras"]).values
    assert list(values[0].string_array_value) == before
    assert reason in fresh.log.read_text()
    assert reason in peer.status("engine").message
    assert answer(peer, goal) == (texts["odd"], "odd")


class TestConfigure:
    """Adapters that a node starts with."""

    @pytest.fixture
    def unconfigured(self, fresh, peer):
        assert peer.transition("deactivate")
        assert peer.transition("cleanup")
        yield
        if peer.state() == "unconfigured":
            assert peer.transition("configure")
        assert peer.transition("activate")
        peer.connect()

    def test_a_broken_one_is_named_and_a_good_one_works_afterwards(
        self, unconfigured, node, peer, goal, texts, directories
    ):
        assert peer.set_parameter("loras", [f"odd={directories['broken']}"]).successful  # nothing is read yet
        assert not peer.transition("configure")
        assert peer.state() == "unconfigured"
        message = "cannot load the engines: " + str(directories["broken"])
        assert message in node.log.read_text()
        assert peer.set_parameter("loras", [f"odd={directories['odd']}"]).successful
        assert peer.transition("configure")
        assert listed(peer) == (["odd", "wild"], "odd")

    def test_an_unknown_active_one_is_named(self, unconfigured, node, peer):
        assert peer.set_parameter("lora", "polite").successful
        assert not peer.transition("configure")
        message = "cannot load the engines: unknown LoRA adapter 'polite'; loaded: odd, wild"
        assert message in node.log.read_text()
        assert peer.set_parameter("lora", "odd").successful
