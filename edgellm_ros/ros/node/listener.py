# SPDX-License-Identifier: Apache-2.0
"""Turns utterances into typed commands: the speech engine in a thread of its own.

SpeechInput --utterance, speech so far--> Listener (thread: Transcriber, HearingRule) --> ~/transcript
                                                             |
                                                             +--commands--> Inputs, in the executor's thread
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rclpy.guard_condition import GuardCondition
from rclpy.lifecycle import LifecycleNode

from edgellm_ros.hearing.rule import Verdict
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.msg import Transcript as TranscriptMessage
from edgellm_ros.multimodal.audio.sound_stream import Utterance
from edgellm_ros.ros.messaging import to_time
from edgellm_ros.ros.node.metrics import NodeMetrics, RecentProblem
from edgellm_ros.ros.node.outputs.outputs import Outputs
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.runtime.transcript import Transcript

MOST_WAITING = 4  # utterances; of more, the oldest is dropped
END_TIMEOUT_S = 5.0  # of the running transcript, which ends at its next token
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class _Job:
    """A sound to transcribe."""

    utterance: Utterance
    final: bool  # whether the person has ended
    cancel: threading.Event


class Listener:
    """Transcribes utterances one after the other.

    Speech in progress is transcribed only while none waits.
    All methods are for the executor's thread.
    """

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        transcriber: Transcriber,
        outputs: Outputs,
        metrics: NodeMetrics,
    ) -> None:
        self._node = node
        self._parameters = parameters
        self._transcriber = transcriber
        self._outputs = outputs
        self._metrics = metrics
        self._problem = RecentProblem()
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._closed = False
        self._commands: deque[Command] = deque()
        self._ready: GuardCondition | None = None
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    def start(self, on_commands: Callable[[], None]) -> None:
        """Start the thread.

        on_commands: called in the executor's thread when there are commands.
        """
        self._ready = self._node.create_guard_condition(on_commands)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the latest utterance has no transcript; empty after a few seconds."""
        return self._problem.text

    @property
    def idle(self) -> bool:
        """Whether nothing is transcribed and nothing waits."""
        with self._changed:
            return self._running is None and not self._waiting

    def add(self, utterance: Utterance) -> None:
        """Transcribe an utterance; the speech so far of it is no longer needed."""
        with self._changed:
            self._drop_partial()
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self._metrics.count("utterances_skipped")
                self._problem.set(f"{MOST_WAITING} utterances waited for the speech engine: one is dropped")
                self._node.get_logger().error(f"~/audio: {self._problem.text}")
            self._waiting.append(_Job(utterance, True, threading.Event()))
            self._changed.notify()

    def follow(self, so_far: Utterance) -> None:
        """Transcribe an utterance in progress so far, if the engine is free."""
        with self._changed:
            if self._running is None and not self._waiting:
                self._waiting.append(_Job(so_far, False, threading.Event()))
                self._changed.notify()

    def take(self) -> list[Command]:
        """Return the commands since the last call."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def clear(self) -> None:
        """Drop all sound and commands; the running transcript is not obeyed."""
        with self._changed:
            self._waiting.clear()
            if self._running is not None:
                self._running.cancel.set()
            self._commands.clear()
        self._problem.clear()

    def close(self) -> None:
        """End the thread; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.clear()
        ready, self._ready = self._ready, None
        if ready is not None:
            self._thread.join(END_TIMEOUT_S)
            self._node.destroy_guard_condition(ready)

    def _drop_partial(self) -> None:
        self._waiting = deque(job for job in self._waiting if job.final)
        if self._running is not None and not self._running.final:
            self._running.cancel.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job = self._running = self._waiting.popleft()
            try:
                self._hear(job)
            except Exception as error:  # the thread must live on: the next utterance may be all right
                self._metrics.count("transcripts_failed")
                self._problem.set(f"no transcript: {error}")
                self._node.get_logger().error(f"~/audio: {self._problem.text}")

    def _hear(self, job: _Job) -> None:
        settings, sound = self._parameters.current.hearing, job.utterance.sound
        transcript = self._transcriber.transcribe(
            sound, settings.language, settings.context, cancel=job.cancel
        )
        if job.cancel.is_set():
            return
        verdict = settings.judge(transcript, sound.seconds) if job.final else Verdict("", "")
        self._outputs.publish_transcript(self._message(job, transcript, verdict))
        if not job.final:
            return
        if not verdict.command:
            self._metrics.count("transcripts_refused")
            self._node.get_logger().info(f"~/audio: not obeyed: {verdict.reason}")
            return
        with self._changed:
            if job.cancel.is_set():
                return
            self._commands.append(Command(verdict.command))
        self._metrics.count("transcripts_obeyed")
        ready = self._ready  # None from `close` on
        if ready is not None:
            ready.trigger()

    def _message(self, job: _Job, transcript: Transcript, verdict: Verdict) -> TranscriptMessage:
        message = TranscriptMessage(
            text=transcript.text,
            language=transcript.language or "",
            confidence=NAN if transcript.confidence is None else transcript.confidence,
            duration=job.utterance.sound.seconds,
            final=job.final,
            command=verdict.command,
            reason=verdict.reason,
        )
        message.header.stamp = to_time(job.utterance.stamp)
        return message
