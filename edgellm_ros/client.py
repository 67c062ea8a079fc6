# SPDX-License-Identifier: Apache-2.0
"""The client of the node's action: `from edgellm_ros.client import PlanClient`.

ROS is imported with the first of these names, so that the rest of the package works without ROS.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm_ros.ros.client import PlanCall, PlanClient, PlanError, PlanResult, Progress

__all__ = ["PlanCall", "PlanClient", "PlanError", "PlanResult", "Progress"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgellm_ros.ros.processes import require_ros

    require_ros(name)
    return getattr(import_module("edgellm_ros.ros.client"), name)
