# SPDX-License-Identifier: Apache-2.0
"""A policy's cameras: the first publishes on ~/image, each other on its own topic."""

from __future__ import annotations

import threading

from edgellm_ros.echo import quoted
from edgellm_ros.ros.camera_topic import camera_topic
from edgellm_ros.ros.messaging import NANOSECONDS
from edgellm_ros.ros.node.metrics import Rate
from edgellm_ros.ros.node.sensors.input_time import Frame, StaleInputError

STORED = 4  # frames of a camera: a plan may begin a little after its own frame, with newer ones there
EARLIER_STORED = 8  # frames before these, for each earlier observation of a plan
SAME_TIME_NS = 5_000_000  # by which stamps of cameras that were triggered together may differ
CameraFrames = tuple[tuple[Frame, ...], ...]  # the last frames of each camera, oldest first


class Cameras:
    """The last frames of each camera.

    Of the first one they are stored only if plans take earlier observations. Callbacks fill them, and the
    planning threads read them.
    """

    def __init__(self, names: tuple[str, ...], earlier: tuple[float, ...] = ()) -> None:
        """Hold no frames of the cameras with these names; the first is that of ~/image.

        earlier: how long before the present a plan's earlier observations are, in s, oldest first.
        """
        self.names = names
        self.topics = {name: camera_topic(name) for name in names[1:]}
        self._earlier = tuple(round(seconds * NANOSECONDS) for seconds in earlier)
        self._arrived = threading.Condition()
        self.clear()

    def add(self, name: str, frame: Frame) -> None:
        """Store a frame of a further camera."""
        with self._arrived:
            self._store(name, frame)
            self._refused[name] = ""
            self._rates[name].tick()
            self._arrived.notify_all()

    def add_first(self, frame: Frame) -> None:
        """Store a frame of ~/image, if plans take earlier ones."""
        if self.names and self._earlier:
            with self._arrived:
                self._store(self.names[0], frame)

    def _store(self, name: str, frame: Frame) -> None:
        """Store a frame and drop those that no plan needs any more.

        Beside the last ones those stay that earlier observations may need, if they are apart.
        """
        stored = self._frames[name]
        if stored and _time(frame) < _time(stored[-1]):  # the clock was set back
            stored = ()
        frames = (*stored, frame)
        kept: list[Frame] = []
        if self._earlier:
            interval = self._earlier[-1]
            oldest = _time(frame) - self._earlier[0] - interval
            for each in frames[:-STORED]:
                apart = not kept or _time(each) - _time(kept[-1]) >= interval // EARLIER_STORED
                if apart and _time(each) >= oldest:
                    kept.append(each)
        self._frames[name] = (*kept, *frames[-STORED:])

    def refuse(self, name: str, reason: str) -> None:
        """Remember why a further camera's newest frame was refused, for plans' errors."""
        with self._arrived:
            self._refused[name] = f"; the newest was refused: {reason}"

    def last(self) -> CameraFrames:
        """Return the last frames of each camera, oldest first.

        A camera that has sent no frame has none.
        """
        with self._arrived:
            return tuple(self._frames.values())

    def ages(self) -> dict[str, float]:
        """Return the seconds since the last frame of each further camera.

        The time is infinite without a frame.
        """
        return {name: rate.age for name, rate in self._rates.items()}

    def clear(self) -> None:
        """Drop all frames."""
        with self._arrived:
            self._frames: dict[str, tuple[Frame, ...]] = dict.fromkeys(self.names, ())
            self._refused = dict.fromkeys(self.topics, "")
            self._rates = {name: Rate() for name in self.topics}

    def beside(
        self, first: Frame, paired: CameraFrames, wait_s: float, tolerance_s: float
    ) -> tuple[Frame, ...]:
        """Return ~/image's frame, and the one nearest to it of each further camera.

        `paired`: `last` when the frame arrived. Waits up to `wait_s` for frames as new as the first one, but
        not for a camera that has sent none. StaleInputError for a camera without a frame, or whose nearest is
        stamped more than `tolerance_s` before or after the first.
        """
        time = first.time or 0
        as_new = time - SAME_TIME_NS
        with self._arrived:
            self._arrived.wait_for(
                lambda: all(_time(each[-1]) >= as_new for each in self._further() if each), wait_s
            )
        frames = [first]
        for (name, topic), before, now in zip(self.topics.items(), paired[1:], self.last()[1:], strict=True):
            refused = self._refused[name]
            if not before and not now:
                raise StaleInputError(
                    f"no frame of the camera {quoted(name)} has arrived on {topic} "
                    f"(parameter cameras){refused}"
                )
            nearest = min((*before, *now), key=lambda frame: abs(_time(frame) - time))
            apart_s = (_time(nearest) - time) / NANOSECONDS
            if abs(apart_s) > tolerance_s:
                than = "newer" if apart_s > 0 else "older"
                raise StaleInputError(
                    f"the frame of the camera {quoted(name)} is {abs(apart_s):.2f} s {than} than that on "
                    f"~/image, limit {tolerance_s:g} s (parameter camera_tolerance){refused}"
                )
            frames.append(nearest)
        return tuple(frames)

    def observed(self, present: tuple[Frame, ...], paired: CameraFrames) -> CameraFrames:
        """Return the frames of a plan's observations, of each camera, oldest first.

        `present`: those of now, which `beside` returns; `paired`: as for it. The frame of an earlier
        observation is that nearest to its time: without one around it, as when the camera starts, the next
        one counts, at the latest that of now.
        """
        time = _time(present[0])
        found = []
        for frame, before, now in zip(present, paired, self.last(), strict=True):
            stored = (*before, *now, frame)
            earlier = (
                min(stored, key=lambda each, at=time - ago: abs(_time(each) - at)) for ago in self._earlier
            )
            found.append((*earlier, frame))
        return tuple(found)

    def _further(self) -> CameraFrames:
        return tuple(self._frames[name] for name in self.topics)


def _time(frame: Frame) -> int:
    return frame.time or 0  # frames of a topic have a time
