# SPDX-License-Identifier: Apache-2.0
"""Declares the node's parameters and checks new values.

All values that pass make a valid request.
"""

from __future__ import annotations

import re
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from edgellm_ros.echo import quoted
from edgellm_ros.ros.node.loras import parse_loras
from edgellm_ros.ros.node.messages import sampling_from_parameters
from edgellm_ros.ros.node.parameters import SPECS, Parameters, Spec

FRAME_ID = re.compile(r"[^/\s\x00-\x1f\x7f][^\s\x00-\x1f\x7f]*")  # tf2: not empty, no leading "/"


def declare_parameters(node: Node) -> Parameters:
    """Declare every parameter of the table and return the values given at start.

    Raises ValueError for a value that is not allowed.
    """
    for name, spec in SPECS.items():
        node.declare_parameter(name, spec.default, _descriptor(name, spec))
        problem = _problem(name, node.get_parameter(name).value)
        if problem:
            raise ValueError(problem)
    parameters = Parameters.read(node)
    sampling_from_parameters(parameters)
    return parameters


def check_parameters(changes: list[Parameter], current: Parameters, configured: bool) -> SetParametersResult:
    """Check new values, for `add_on_set_parameters_callback`.

    `configured`: fixed parameters may not change.
    """
    known = {change.name: change.value for change in changes if change.name in SPECS}
    try:
        for name, value in known.items():
            if SPECS[name].fixed and configured:
                raise ValueError(f"{name} can only be set while the node is unconfigured: clean it up first")
            problem = _problem(name, value)
            if problem:
                raise ValueError(problem)
        sampling_from_parameters(current.changed(known))
    except ValueError as error:
        return SetParametersResult(successful=False, reason=str(error))
    return SetParametersResult(successful=True)


def _problem(name: str, value: Any) -> str:
    """Return the reason why a value is not allowed; empty if the value is allowed."""
    spec = SPECS[name]
    if spec.choices and value not in spec.choices:
        return f"{name} must be one of {', '.join(spec.choices)}, got {quoted(value)}"
    # rclpy's own check of ranges accepts values up to a millionth outside.
    if spec.low is not None and spec.high is not None and not spec.low <= value <= spec.high:
        return f"{name} must be from {spec.low} to {spec.high}, got {value}"
    if name == "frame_id" and not FRAME_ID.fullmatch(value):
        return f"frame_id must be a TF frame: not empty, no leading '/', no white space, got {quoted(value)}"
    if name == "loras":
        try:
            parse_loras(value)
        except ValueError as error:
            return str(error)
    return ""


def _descriptor(name: str, spec: Spec) -> ParameterDescriptor:
    descriptor = ParameterDescriptor(name=name, description=spec.description, read_only=spec.read_only)
    if spec.choices:
        descriptor.additional_constraints = f"One of: {', '.join(spec.choices)}."
    if spec.fixed:
        descriptor.additional_constraints += " Can only be set while the node is unconfigured."
    if spec.low is not None and spec.high is not None:
        if isinstance(spec.default, float):
            bounds = FloatingPointRange(from_value=float(spec.low), to_value=float(spec.high))
            descriptor.floating_point_range.append(bounds)
        else:
            descriptor.integer_range.append(
                IntegerRange(from_value=int(spec.low), to_value=int(spec.high), step=1)
            )
    return descriptor
