# SPDX-License-Identifier: Apache-2.0
"""The microphone does not hear the robot, but a person who interrupts it.

Time is simulated: a room with reverberation and noise, the robot's loudspeaker, and a person.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import soxr

from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.voice.echo_gate import EchoGate, EchoSettings, Hearing
from edgellm_ros.voice.voice import open_voice
from edgellm_ros.voice.voice import speak as robot_speaks
from fixtures.spoken_commands import interrupting_person

RATE = 16000
CHUNK = 512
ROBOT = (
    "I see a red box on the left side. It is about two metres away, and a blue cone stands behind it. "
    "Should I go there, or look for the green ball?"
)
PAUSE = RATE  # before and after the robot's sound
DELAY_S = 0.12  # of playback
DEFAULTS = EchoSettings()


@pytest.fixture(scope="module")
def robot() -> tuple[np.ndarray, int]:
    return robot_speaks(open_voice("espeak"), ROBOT)


@pytest.fixture(scope="module")
def person() -> np.ndarray:
    """A person at -20 dB of full scale."""
    return interrupting_person(0.1)


@dataclass
class Room:
    """A gate, with the robot's sound and a microphone that hears its echo."""

    robot: np.ndarray
    rate: int
    echo_db: float
    noise_db: float = -60.0

    def __post_init__(self) -> None:
        self.gate = EchoGate(VoiceActivity(), threshold=0.35)
        self.rng = np.random.default_rng(1)
        self.now = 100.0
        reverberation = np.zeros(4800, np.float32)
        reverberation[0] = 1
        tail = np.arange(4400)
        reverberation[400:] = self.rng.normal(0, 0.05, 4400) * np.exp(-tail / 1200)
        dry = soxr.resample(self.robot.astype(np.float32) / 32768, self.rate, RATE)
        self.echo = np.convolve(dry, reverberation)[: len(dry)] * 10 ** (self.echo_db / 20)

    def speak(
        self, person: np.ndarray | None = None, at: float = 0.0, settings: EchoSettings = DEFAULTS
    ) -> tuple[float | None, list[Hearing]]:
        """Let the robot speak; return when it was interrupted, and every verdict.

        at: seconds from the robot's beginning to the person's.
        """
        noise = self.rng.normal(0, 10 ** (self.noise_db / 20), len(self.echo) + 2 * PAUSE)
        microphone = noise.astype(np.float32)
        start = PAUSE + int(DELAY_S * RATE)
        microphone[start : start + len(self.echo)] += self.echo
        if person is not None:
            begin = PAUSE + int(at * RATE)
            microphone[begin : begin + len(person)] += person[: len(microphone) - begin]
        heard, sent, block = [], 0, self.rate // 10
        for position in range(0, len(microphone) - CHUNK, CHUNK):
            arrival = self.now + (position + CHUNK) / RATE
            while sent < len(self.robot):
                due = self.now + PAUSE / RATE + sent / self.rate
                if due - 0.1 > arrival:
                    break
                self.gate.played(self.robot[sent : sent + block], self.rate, due)
                sent += block
            heard.append(self.gate.hear(microphone[position : position + CHUNK], RATE, arrival, settings))
            if heard[-1] is Hearing.BARGE_IN:
                break
        self.gate.played(self.robot[:0], self.rate, arrival)
        interrupted = arrival - self.now - PAUSE / RATE if heard[-1] is Hearing.BARGE_IN else None
        self.now = arrival + 2
        return interrupted, heard


@pytest.mark.slow
@pytest.mark.parametrize("echo_db", [-10, -20, -40])
def test_the_robot_does_not_interrupt_itself(robot, echo_db):
    room = Room(*robot, echo_db)
    for _ in range(3):
        interrupted, heard = room.speak()
        assert interrupted is None
        closed = sum(each is Hearing.CLOSED for each in heard) * CHUNK / RATE
        assert closed == pytest.approx(len(room.robot) / room.rate + 0.3 + 0.1, abs=0.15)
        assert heard[0] is heard[-1] is Hearing.OPEN


def test_the_gain_of_the_echo_is_measured(robot):
    room = Room(*robot, echo_db=-20)
    assert np.isnan(room.gate.gain)
    room.speak()
    assert room.gate.gain == pytest.approx(-20, abs=5)


@pytest.mark.parametrize("at", [2.0, 3.1, 4.4])
def test_a_person_interrupts_within_a_fifth_of_a_second(robot, person, at):
    room = Room(*robot, echo_db=-20)
    room.speak()
    interrupted, _ = room.speak(person, at)
    assert at < interrupted < at + 0.2


def test_a_person_with_the_level_of_the_echo_does_not_interrupt(robot, person):
    room = Room(*robot, echo_db=-10)
    room.speak()
    assert room.speak(0.3 * person, 2.0)[0] is None


def test_noise_does_not_interrupt(robot):
    room = Room(*robot, echo_db=-20)
    room.speak()
    noise = np.random.default_rng(2).normal(0, 0.3, RATE // 2).astype(np.float32)
    assert room.speak(noise, 2.0)[0] is None


def test_without_barge_in_nothing_interrupts(robot, person):
    room = Room(*robot, echo_db=-20)
    room.speak()
    assert room.speak(person, 2.0, EchoSettings(barge_in=-1.0))[0] is None


def test_after_an_interruption_the_gate_is_open(robot, person):
    room = Room(*robot, echo_db=-20)
    room.speak()
    assert room.speak(person, 2.0)[0]
    silence = np.zeros(CHUNK, np.float32)
    assert room.gate.hear(silence, RATE, room.now - 1.9, EchoSettings()) is Hearing.OPEN


@pytest.mark.parametrize(
    ("arrival", "tail", "expected"),
    [
        (9.9, 0.3, Hearing.OPEN),
        (10.05, 0.3, Hearing.CLOSED),
        (10.35, 0.3, Hearing.CLOSED),
        (10.5, 0.3, Hearing.OPEN),
        (10.5, 1.0, Hearing.CLOSED),
    ],
)
def test_the_tail_keeps_the_gate_closed(arrival, tail, expected):
    gate = EchoGate(VoiceActivity(), 0.35)
    gate.played(np.full(800, 9000, np.int16), 8000, 10.0)  # until 10.1
    assert gate.hear(np.zeros(160, np.float32), 16000, arrival, EchoSettings(tail=tail)) is expected
