# SPDX-License-Identifier: Apache-2.0
"""The value of the parameter `client_priorities`."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.echo import quoted

MOST_PRIORITY = 10


def parse_priorities(values: Sequence[str]) -> dict[str, int]:
    """Return the priority of each client's goals, by the client's name.

    Priorities are from -10 to 10. Empty strings are ignored: ROS has no empty list. ValueError for strings of
    another form.
    """
    priorities: dict[str, int] = {}
    for value in filter(None, values):
        name, _, number = value.rpartition("=")
        try:
            priority = int(number)
        except ValueError:
            priority = MOST_PRIORITY + 1
        if not name or abs(priority) > MOST_PRIORITY:
            raise ValueError(
                f"client_priorities must be strings NAME=PRIORITY, with a priority from {-MOST_PRIORITY} to "
                f"{MOST_PRIORITY}, got {quoted(value)}"
            )
        if name in priorities:
            raise ValueError(f"client_priorities names {quoted(name)} twice")
        priorities[name] = priority
    return priorities
