# SPDX-License-Identifier: Apache-2.0
"""What one hears in an episode: the person, then the robot's motor and voice.

    person    |--command--|
    robot                 |--answer--|
    motor                 |--------- drive ---------|

The command is as the robot's microphone recorded it, the answer in the robot's voice. The motor hums at a
pitch that rises with the speed, and is silent while the robot stands.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.speech.rooms import MICROPHONE_RATE
from edgellm_arena.world.unicycle import DT
from edgellm_ros.multimodal.sound import Sound

IDLE_HZ, HZ_PER_SPEED = 55.0, 90.0  # of the motor at rest, and what 1 m/s adds
HARMONICS = ((1, 1.0), (2, 0.6), (3, 0.4), (5, 0.2))  # multiples of the pitch, and their amplitudes
MOTOR_PEAK = 0.08  # of full scale, at FULL_SPEED and above
FULL_SPEED = 1.0  # m/s


def motor_sound(speeds: NDArray[np.float64]) -> NDArray[np.float32]:
    """Make the motor's sound [N] at MICROPHONE_RATE; speeds [T] in m/s, DT apart."""
    count = round(len(speeds) * DT * MICROPHONE_RATE)
    time = np.arange(count) / MICROPHONE_RATE
    speed = np.abs(np.interp(time, np.arange(len(speeds)) * DT, speeds))
    phase = 2 * np.pi * np.cumsum(IDLE_HZ + HZ_PER_SPEED * speed) / MICROPHONE_RATE
    hum = sum(amplitude * np.sin(multiple * phase) for multiple, amplitude in HARMONICS)
    most = sum(amplitude for _, amplitude in HARMONICS)
    return (MOTOR_PEAK * np.minimum(speed / FULL_SPEED, 1.0) * hum / most).astype(np.float32)


def _resampled(samples: NDArray[np.float64], sample_rate: int) -> NDArray[np.float32]:
    """Change the rate of samples [N] to MICROPHONE_RATE, in the frequency domain."""
    count = round(len(samples) * MICROPHONE_RATE / sample_rate)
    if not count:
        return np.zeros(0, np.float32)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)


def soundtrack(
    command: Sound | None, answer: NDArray[np.int16], sample_rate: int, speeds: NDArray[np.float64]
) -> Sound:
    """Mix an episode's sound.

    command: the person's, at MICROPHONE_RATE; None = typed. answer: the robot's [N], at `sample_rate`.
    speeds: of the drive [T], in m/s, DT apart; at least one.
    """
    said = np.zeros(0, np.float32) if command is None else command.samples
    voice = _resampled(answer / 32768, sample_rate)
    motor = motor_sound(speeds)
    drive = np.zeros(max(len(voice), len(motor)), np.float32)
    drive[: len(voice)] += voice
    drive[: len(motor)] += motor
    return Sound(np.clip(np.concatenate([said, drive]), -1.0, 1.0), MICROPHONE_RATE)
