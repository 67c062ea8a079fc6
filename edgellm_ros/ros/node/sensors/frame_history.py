# SPDX-License-Identifier: Apache-2.0
"""Camera frames before the newest, at an interval, for plans with several frames.

The newest frame (N) is always sent; the last stored frame may be too close to it:

  frames    . . . . . . . . . . . .      of the camera
  stored    x     x     x     x          one interval apart
  sent      x     x     x         N
"""

from __future__ import annotations

from edgellm_ros.ros.messaging import NANOSECONDS
from edgellm_ros.ros.node.sensors.input_time import Frame

EARLY = 0.1  # share of the interval that a frame may be early, because cameras are not exactly periodic


class FrameHistory:
    """Stores frames at an interval; filled by callbacks, read by the planning threads."""

    def __init__(self, frames_per_plan: int) -> None:
        self._most = frames_per_plan - 1
        self._stored: tuple[Frame, ...] = ()

    def add(self, frame: Frame, interval_s: float) -> None:
        """Store a frame with a time, unless the last one is less than an interval ago."""
        if not self._most:
            return
        last = self._stored[-1] if self._stored else None
        if last is not None and frame.time < last.time:  # the clock was set back
            self.clear()
        elif last is not None and not _is_apart(last, frame, interval_s):
            return
        self._stored = (*self._stored, frame)[-self._most - 1 :]

    def before(self, newest: Frame, interval_s: float, max_age_s: float) -> tuple[Frame, ...]:
        """Return up to frames_per_plan - 1 frames before `newest`, oldest first.

        Each is at least an interval older than the next. The frames end at a gap of more than two intervals
        and `max_age_s`, as after a pause of the camera.
        """
        found, following = [], newest
        for frame in reversed(self._stored):
            if len(found) == self._most or newest.time is None:
                break
            if not _is_apart(frame, following, interval_s):
                continue
            if following.time - frame.time > (2 * interval_s + max_age_s) * NANOSECONDS:
                break
            found.append(frame)
            following = frame
        return tuple(reversed(found))

    def clear(self) -> None:
        """Drop all frames."""
        self._stored = ()


def _is_apart(earlier: Frame, later: Frame, interval_s: float) -> bool:
    return later.time - earlier.time >= (1 - EARLY) * interval_s * NANOSECONDS
