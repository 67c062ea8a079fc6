# SPDX-License-Identifier: Apache-2.0
"""What an ArmFollower tells on /diagnostics."""

from __future__ import annotations

from edgellm_ros.ros.arm.arm_follower import REASONS, ArmFollower
from edgellm_ros.ros.diagnostic_status import WARN, Problem


def find_problems(arm: ArmFollower, now: float, is_active: bool) -> list[Problem]:
    """Return what keeps the arm from moving at `now` (s)."""
    problems = []
    if arm.stopped:
        problems.append((WARN, f"stopped until ~/resume{': ' if arm.problem else ''}{arm.problem}"))
    if is_active and arm.state_age(now) > arm.settings.max_state_age:
        problems.append((WARN, "joint states are stale: nothing moves"))
    if arm.counts["other_samples"] and not arm.counts["accepted"]:
        problems.append((WARN, "no chunk with the number of parameter sample_index, only others"))
    return problems


def list_values(arm: ArmFollower, now: float) -> dict[str, object]:
    """Return the mode and the counters by name."""
    counts = arm.counts
    return {
        "mode": arm.mode(now).value,
        "state_age": arm.state_age(now),
        "chunks_accepted": counts["accepted"],
        "chunks_of_other_samples": counts["other_samples"],
        "chunks_run_out": counts["run_out"],
        **{f"chunks_{reason}": counts[reason] for reason in REASONS},
        **{f"rows_clamped.{name}": arm.clamped[name] for name in arm.contract.ros_names},
        "stops": counts["stops"],
        "stale_stops": counts["stale_stops"],
        "deviations": counts["deviations"],
        "clock_jumps": counts["clock_jumps"],
        "states_refused": counts["states_refused"],
    }
