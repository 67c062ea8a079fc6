# SPDX-License-Identifier: Apache-2.0
"""Parameters that override the QoS of topics: what is refused at start.

test_views.py tests what they do.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile

from edgellm_ros.ros.messaging import POLICIES, check_qos_overrides, overridable


def check(name: str, value: object) -> None:
    check_qos_overrides(SimpleNamespace(_parameter_overrides={name: Parameter(name, value=value)}))


@pytest.mark.parametrize(
    "policy, value",
    [
        ("reliability", "best_effort"),
        ("durability", "transient_local"),
        ("history", "keep_all"),
        ("depth", 1),
    ],
)
def test_values_of_the_policies_are_taken(policy, value):
    check(f"qos_overrides./edgellm/path.publisher.{policy}", value)
    check(f"qos_overrides./camera/image_raw.subscription.{policy}", value)


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("/path.publisher.reliability", "sometimes", "reliability must be one of reliable, best_effort"),
        ("/path.publisher.reliability", True, "reliability must be one of reliable, best_effort"),
        ("/path.publisher.depth", 0, "depth must be an integer of at least 1, got 0"),
        ("/path.publisher.depth", True, "depth must be an integer of at least 1, got True"),
        ("/path.publisher.lifespan", 1, "with a policy of history, depth, reliability, durability"),
        ("/path.reliability", "reliable", "must be qos_overrides.TOPIC.publisher.POLICY or"),
        ("path.publisher.depth", 1, "must be qos_overrides.TOPIC.publisher.POLICY or"),
    ],
)
def test_others_are_refused_with_what_is_allowed(name, value, reason):
    with pytest.raises(ValueError, match=reason):
        check(f"qos_overrides.{name}", value)


def test_other_parameters_are_none_of_its_business():
    check("qos", "sometimes")


def test_a_topic_gets_a_profile_of_its_own():
    """rclpy writes overrides into it; topics share constants."""
    shared = QoSProfile(depth=7)
    arguments = overridable(shared)
    arguments["qos_profile"].depth = 1
    assert shared.depth == 7
    assert set(arguments["qos_overriding_options"].policy_kinds) == set(POLICIES)
