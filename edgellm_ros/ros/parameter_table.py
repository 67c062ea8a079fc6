# SPDX-License-Identifier: Apache-2.0
"""Tables of a node's parameters: declarations, and checks that every table needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.node import Node
from rclpy.parameter import Parameter

from edgellm_ros.echo import quoted

SPEC = "spec"  # in the metadata of a field
OFF = "off"  # YAML, and so `ros2 param set` and a parameters file, read this word as false
FRAME_ID = re.compile(r"[^/\s\x00-\x1f\x7f][^\s\x00-\x1f\x7f]*")  # tf2: not empty, no leading "/"


@dataclass(frozen=True)
class Spec:
    """Declaration of one parameter."""

    default: bool | int | float | str | list[str]
    description: str  # read alone, by `ros2 param describe`
    low: float | None = None  # lowest and highest value allowed
    high: float | None = None
    choices: tuple[str, ...] = ()  # values allowed, for strings; false stands for `off` where it is one
    fixed: bool = False  # can only be set while the node is unconfigured
    read_only: bool = False  # can only be set at start


def declared(*args: Any, **kwargs: Any) -> Any:
    """Return a dataclass's field for a parameter, from the arguments of its `Spec`."""
    return field(metadata={SPEC: Spec(*args, **kwargs)})


Specs = Mapping[str, Spec]
Problem = Callable[[Specs, str, Any], str]


def declare(node: Node, specs: Specs, problem: Problem) -> None:
    """Declare a table's parameters; ValueError for a start value that is not allowed."""
    overrides = node._parameter_overrides
    overrides |= {each.name: each for each in with_off(specs, list(overrides.values()))}
    node.add_pre_set_parameters_callback(partial(with_off, specs))
    for name, spec in specs.items():
        node.declare_parameter(name, spec.default, _descriptor(name, spec))
        reason = problem(specs, name, node.get_parameter(name).value)
        if reason:
            raise ValueError(reason)


def with_off(specs: Specs, parameters: list[Parameter]) -> list[Parameter]:
    """Return the parameters with the word `off` for false where it is a choice."""
    return [
        Parameter(each.name, value=OFF)
        if each.value is False and each.name in specs and OFF in specs[each.name].choices
        else each
        for each in parameters
    ]


def check_changes(
    specs: Specs, changes: Iterable[tuple[str, Any]], problem: Problem, fixed: Callable[[str], Any] | None
) -> None:
    """Check new values; ValueError with the reason.

    `fixed` returns the present value of a fixed parameter, which may not change; None = unconfigured.
    """
    for name, value in changes:
        if specs[name].fixed and fixed is not None and value != fixed(name):
            raise ValueError(f"{name} can only be set while the node is unconfigured: clean it up first")
        reason = problem(specs, name, value)
        if reason:
            raise ValueError(reason)


def check_set(node: Node, specs: Specs, changes: list[Parameter], configured: bool) -> SetParametersResult:
    """Check new values, for `add_on_set_parameters_callback`.

    `configured`: fixed parameters may not change.
    """

    def present(name: str) -> Any:
        return node.get_parameter(name).value

    known = [(change.name, change.value) for change in changes if change.name in specs]
    try:
        check_changes(specs, known, value_problem, present if configured else None)
    except ValueError as error:
        return SetParametersResult(successful=False, reason=str(error))
    return SetParametersResult(successful=True)


def value_problem(specs: Specs, name: str, value: Any) -> str:
    """Return the reason why a value is not allowed; empty if the value is allowed."""
    spec = specs[name]
    if spec.choices and value not in spec.choices:
        return f"{name} must be one of {', '.join(spec.choices)}, got {quoted(value)}"
    # rclpy's own check of ranges accepts NaN, and values up to a millionth outside.
    if spec.low is not None and spec.high is not None and not spec.low <= value <= spec.high:
        return f"{name} must be from {spec.low} to {spec.high}, got {value}"
    if name == "frame_id" and not FRAME_ID.fullmatch(value):
        return f"frame_id must be a TF frame: not empty, no leading '/', no white space, got {quoted(value)}"
    return ""


def _descriptor(name: str, spec: Spec) -> ParameterDescriptor:
    constraints = [f"One of: {', '.join(spec.choices)}."] if spec.choices else []
    if spec.fixed:
        constraints.append("Can only be set while the node is unconfigured.")
    descriptor = ParameterDescriptor(name=name, description=spec.description, read_only=spec.read_only)
    descriptor.additional_constraints = " ".join(constraints)
    if spec.low is not None and spec.high is not None:
        if isinstance(spec.default, float):
            bounds = FloatingPointRange(from_value=float(spec.low), to_value=float(spec.high))
            descriptor.floating_point_range.append(bounds)
        else:
            descriptor.integer_range.append(
                IntegerRange(from_value=int(spec.low), to_value=int(spec.high), step=1)
            )
    return descriptor
