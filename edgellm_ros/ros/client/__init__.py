# SPDX-License-Identifier: Apache-2.0
"""The client of the action ~/plan."""

from edgellm_ros.ros.client.plan_call import PlanCall, PlanError, PlanResult, Progress
from edgellm_ros.ros.client.plan_client import PlanClient

__all__ = ["PlanCall", "PlanClient", "PlanError", "PlanResult", "Progress"]
