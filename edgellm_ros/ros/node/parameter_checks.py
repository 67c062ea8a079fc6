# SPDX-License-Identifier: Apache-2.0
"""Declares the node's parameters and checks new values.

All values that pass make a valid request.
"""

from __future__ import annotations

from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from edgellm_ros.engine_directory.parts import check_without
from edgellm_ros.ros.node.messages import sampling_from_parameters
from edgellm_ros.ros.node.settings.loras import parse_loras
from edgellm_ros.ros.node.settings.parameters import SPECS, Parameters
from edgellm_ros.ros.node.settings.priorities import parse_priorities
from edgellm_ros.ros.parameter_table import OFF, Specs, check_changes, declare, value_problem


def declare_parameters(node: Node) -> Parameters:
    """Declare every parameter of the table and return the values given at start.

    Raises ValueError for a value that is not allowed.
    """
    declare(node, SPECS, _problem)
    parameters = Parameters.read(node)
    _check_together(parameters)
    return parameters


def check_parameters(changes: list[Parameter], current: Parameters, configured: bool) -> SetParametersResult:
    """Check new values, for `add_on_set_parameters_callback`.

    `current`: the present ones. `configured`: fixed parameters may not change.
    """
    known = {change.name: change.value for change in changes if change.name in SPECS}
    try:
        check_changes(SPECS, known.items(), _problem, current.value if configured else None)
        _check_together(current.changed(known))
    except ValueError as error:
        return SetParametersResult(successful=False, reason=str(error))
    return SetParametersResult(successful=True)


def _check_together(parameters: Parameters) -> None:
    """Raise ValueError for values that are allowed, but not together."""
    sampling_from_parameters(parameters)
    if parameters.guidance >= 0 and parameters.chunking != OFF:
        raise ValueError(
            f"guidance {parameters.guidance:g} and chunking {parameters.chunking!r}: a guided plan continues "
            "no chunk, set chunking to off or guidance to -1"
        )


def _problem(specs: Specs, name: str, value: Any) -> str:
    """Return the reason why a value is not allowed; empty if the value is allowed."""
    problem = value_problem(specs, name, value)
    try:
        if not problem and name == "loras":
            parse_loras(value)
        if not problem and name == "client_priorities":
            parse_priorities(value)
        if not problem and name == "without":
            check_without([part for part in value if part])
    except ValueError as error:
        return str(error)
    return problem
