# SPDX-License-Identifier: Apache-2.0
"""The table of parameters: allowed values work, others are refused with a reason."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from edgellm_ros.action import Plan
from rclpy.parameter import Parameter

from edgellm_ros.ros.node.messages import sampling_from_goal, sampling_from_parameters
from edgellm_ros.ros.node.parameter_checks import check_parameters
from edgellm_ros.ros.node.settings.parameters import SPECS, Parameters
from edgellm_ros.runtime.request import LLMGenerationRequest

# of what the checkpoint has defaults for
SAMPLED_VALUES = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
NUMBERS = [name for name, spec in SPECS.items() if spec.low is not None]


def read(**changes: object) -> Parameters:
    """The snapshot of a node with these values; `camera__fx` is camera.fx."""
    values = {name: spec.default for name, spec in SPECS.items()}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return Parameters.read(SimpleNamespace(get_parameter=lambda name: SimpleNamespace(value=values[name])))


def check(name: str, value: object) -> str:
    """The reason why the node refuses the value; empty for an accepted value."""
    return check_parameters([Parameter(name, value=value)], read(), configured=False).reason


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("end", ["low", "high"])
def test_a_command_can_be_planned_at_both_ends_of_every_range(name, end):
    kind = type(SPECS[name].default)
    value = kind(getattr(SPECS[name], end))
    assert check(name, value) == ""
    parameters = read(**{name: value})
    LLMGenerationRequest(
        "go",
        sampling=sampling_from_parameters(parameters),
        action_samples=parameters.action_samples,
        denoise_steps=parameters.denoise_steps or None,
        noise_seed=parameters.noise_seed,
    )


@pytest.mark.parametrize("name", NUMBERS)
def test_values_just_outside_of_a_range_are_refused(name):
    """rclpy takes floats up to a millionth outside, which then fail in every command."""
    spec = SPECS[name]
    for bound, outwards in ((spec.low, -math.inf), (spec.high, math.inf)):
        if isinstance(spec.default, float):
            reason = check(name, math.nextafter(bound, outwards))
        elif abs(bound) < 2**63 - 1:  # the next one does not fit a ROS integer
            reason = check(name, int(bound) + (1 if outwards > 0 else -1))
        else:
            continue
        assert reason.startswith(f"{name} must be from {spec.low} to {spec.high}, got ")


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("temperature", 1e-9, "temperature must be 0 or a number from 1e-06 to 1e+06, got 1e-09"),
        ("temperature", 5e-324, "temperature must be 0 or a number from 1e-06 to 1e+06, got 5e-324"),
        ("temperature", math.nan, "temperature must be from -1.0 to 1000000.0, got nan"),
        ("top_p", 1e-31, "top_p must be a number from 1e-30 to 1, got 1e-31"),
        ("min_p", math.nan, "min_p must be from -1.0 to 1.0, got nan"),
        ("repetition_penalty", 1e-7, "repetition_penalty must be a number from 1e-06 to 1e+06, got 1e-07"),
        ("regex", "(", "regex '(' cannot be used: unclosed group"),
        ("json_schema", "x", "json_schema 'x' is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_sampling_that_fails_in_every_command_is_refused(name, value, reason):
    assert check(name, value) == reason


@pytest.mark.parametrize("name", SAMPLED_VALUES)
def test_sampling_of_commands_is_the_checkpoints_unless_a_parameter_says_otherwise(name):
    assert getattr(sampling_from_parameters(read()), name) is None
    value = SAMPLED_VALUES[name]
    assert getattr(sampling_from_parameters(read(**{name: value})), name) == value


@pytest.mark.parametrize("name", [*SAMPLED_VALUES, "seed"])
def test_every_accepted_sampling_value_makes_valid_sampling_params(name):
    kind, accepted = type(SPECS[name].default), 0
    for exponent in range(-330, 307, 3):
        value = kind(float(f"7e{exponent}"))
        if -(2**63) <= value < 2**63 and not check(name, value):
            sampling_from_parameters(read(**{name: value}))
            accepted += 1
    assert accepted


def test_values_set_together_are_checked_together():
    changes = [Parameter("top_p", value=0.5), Parameter("temperature", value=1e-9)]
    assert not check_parameters(changes, read(), configured=True).successful
    changes[1] = Parameter("temperature", value=1e-6)
    assert check_parameters(changes, read(), configured=True).successful


def test_a_priority_of_another_form_is_refused():
    changes = [Parameter("client_priorities", value=["/agent=3", "/logger"])]
    assert "NAME=PRIORITY" in check_parameters(changes, read(), configured=True).reason
    changes = [Parameter("client_priorities", value=["/agent=3", "/logger=-3"])]
    assert check_parameters(changes, read(), configured=True).successful


def test_a_grammar_of_commands_is_one_of_three_parameters():
    assert sampling_from_parameters(read()).grammar is None
    assert sampling_from_parameters(read(choices=["left", "", "right"])).choices == ("left", "right")
    assert sampling_from_parameters(read(json_schema='{"type": "object"}')).grammar.kind == "json_schema"
    changes = [Parameter("choices", value=["left"])]
    refused = check_parameters(changes, read(regex="left|right"), configured=True)
    assert refused.reason == "an answer has regex or choices, not both"
    changes.append(Parameter("regex", value=""))
    assert check_parameters(changes, read(regex="left|right"), configured=True).successful


def test_the_grammar_of_commands_is_not_that_of_goals():
    assert sampling_from_goal(Plan.Goal(), read(regex="left|right")).grammar is None


@pytest.mark.parametrize(
    "value", ["", "/base_link", "base link", "base\nlink", "base\x1b[0mlink", " base_link"]
)
def test_a_frame_id_that_tf2_does_not_take_is_refused(value):
    reason = check("frame_id", value)
    assert reason.startswith("frame_id must be a TF frame: ")
    assert reason.isprintable()


@pytest.mark.parametrize("value", ["base_link", "robot_1/base_link", "torso", "Fuß", "7"])
def test_frame_ids_are_taken_as_tf2_takes_them(value):
    assert check("frame_id", value) == ""


@pytest.mark.parametrize("name", ["plan_on", "frame_id"])
def test_refused_text_is_cut_and_escaped(name):
    reason = check(name, "/\x1b[31m" + "x" * 1_000_000)
    assert reason.isprintable()
    assert len(reason) < 400
    assert "(1000006 characters)" in reason


def test_unknown_parts_are_refused():
    assert check("without", [""]) == check("without", ["audio", "visual"]) == ""
    assert check("without", ["vision"]) == "without must be of visual, audio, action, got 'vision'"


def test_refused_adapters_are_cut_and_escaped():
    reason = check("loras", ["\x1b[31m" + "x" * 1_000_000])
    assert reason.startswith("loras must be strings NAME=DIR, got ")
    assert reason.isprintable()
    assert len(reason) < 400


class TestGoals:
    """Errors name the values that a goal may have, 0 and negative ones among them."""

    @pytest.mark.parametrize("value", [0, 1, 1000])
    def test_denoise_steps_from_0_to_1000_are_taken(self, value):
        sampling_from_goal(Plan.Goal(denoise_steps=value), read())

    @pytest.mark.parametrize("value", [-1, 1001])
    def test_refused_denoise_steps_are_told_that_0_is_allowed(self, value):
        with pytest.raises(
            ValueError, match=rf"denoise_steps must be an integer from 0 to 1000 \(0 = .*, got {value}"
        ):
            sampling_from_goal(Plan.Goal(denoise_steps=value), read())

    def test_refused_max_tokens_are_told_that_0_is_allowed(self):
        goal = Plan.Goal()
        goal.sampling.max_tokens = -1
        with pytest.raises(
            ValueError, match=r"max_tokens must be an integer from 0 to 2147483647 \(0 = .*, got -1"
        ):
            sampling_from_goal(goal, read())

    def test_a_negative_seed_is_the_nodes(self):
        assert sampling_from_goal(Plan.Goal(), read(seed=5)).seed == 5

    @pytest.mark.parametrize(("name", "value"), SAMPLED_VALUES.items())
    def test_a_negative_sampling_value_is_the_nodes(self, name, value):
        sampling = sampling_from_goal(Plan.Goal(), read(**{name: value}))
        assert getattr(sampling, name) == value

    @pytest.mark.parametrize("name", SAMPLED_VALUES)
    def test_a_sampling_value_that_neither_gives_is_the_checkpoints(self, name):
        assert getattr(sampling_from_goal(Plan.Goal(), read()), name) is None

    def test_an_explicit_temperature_of_0_is_greedy(self):
        goal = Plan.Goal()
        goal.sampling.temperature = 0.0
        assert sampling_from_goal(goal, read(temperature=0.7)).temperature == 0.0

    def test_nan_is_no_default(self):
        goal = Plan.Goal()
        goal.sampling.top_p = math.nan
        with pytest.raises(ValueError, match="top_p must be a number from 1e-30 to 1, got nan"):
            sampling_from_goal(goal, read())
