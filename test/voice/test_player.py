# SPDX-License-Identifier: Apache-2.0
"""Sound into a WAV file or a sound card, without a caller that waits."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from edgellm_ros.voice.player import Player, SoundCard, WavSink

RATE = 8000
SOUND = np.arange(RATE, dtype=np.int16)


class SlowSink:
    """A sink whose device is not ready before `go` is set."""

    def __init__(self) -> None:
        self.go, self.written = threading.Event(), []

    def write(self, samples: np.ndarray, sample_rate: int) -> None:
        self.go.wait(5)
        self.written.append(samples)

    def close(self) -> None:
        self.written.append("closed")


def test_a_wav_file_gets_the_samples(tmp_path):
    problems: list[str] = []
    player = Player(WavSink(tmp_path / "out.wav"), 10.0, problems.append)
    assert player.add(SOUND, RATE)
    assert player.add(SOUND[:100], RATE)
    player.close(drain_s=5)
    samples, rate = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert rate == RATE
    assert np.array_equal(samples, [*SOUND, *SOUND[:100]])
    assert not problems


def test_another_rate_in_one_file_is_refused(tmp_path):
    problems: list[str] = []
    player = Player(WavSink(tmp_path / "out.wav"), 10.0, problems.append)
    player.add(SOUND, RATE)
    player.add(SOUND[:100], 16000)
    player.close(drain_s=5)
    assert problems == [f"{tmp_path}/out.wav has 8000 Hz, got sound of 16000 Hz"]
    assert soundfile.info(tmp_path / "out.wav").frames == RATE


def test_silence_drops_what_waits_at_once():
    sink = SlowSink()
    player = Player(sink, 10.0, print)
    player.add(SOUND, RATE)
    player.silence()
    assert player.waiting == 0
    sink.go.set()
    player.add(SOUND[:80], RATE)
    player.close(drain_s=5)
    lengths = [len(each) for each in sink.written[:-1]]
    assert sum(lengths) <= 80 + RATE // 50  # one block was on its way
    assert sink.written[-1] == "closed"


def test_a_full_buffer_drops_without_a_wait():
    sink = SlowSink()
    player = Player(sink, 2.5, print)
    began = time.monotonic()
    taken = [player.add(SOUND, RATE) for _ in range(5)]
    assert time.monotonic() - began < 0.5
    assert taken.count(True) == 2
    player.silence()
    sink.go.set()
    player.close()


class ScriptedSoundDevice(SimpleNamespace):
    """The interface of sounddevice that is used, with one device named `usb`."""

    def __init__(self) -> None:
        super().__init__(streams=[])
        card = self

        class OutputStream:
            def __init__(self, **settings: object) -> None:
                self.settings, self.blocks, self.open = settings, [], False
                card.streams.append(self)

            def start(self) -> None:
                self.open = True

            def write(self, block: np.ndarray) -> None:
                assert self.open
                self.blocks.append(block)

            def close(self) -> None:
                self.open = False

        self.OutputStream = OutputStream

    def check_output_settings(self, device: str | None, channels: int, dtype: str) -> None:
        if device not in (None, "usb"):
            raise ValueError(f"No output device matching {device!r}")


@pytest.fixture
def sounddevice(monkeypatch) -> ScriptedSoundDevice:
    module = ScriptedSoundDevice()
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    return module


def test_a_sound_card_plays_each_rate(sounddevice):
    player = Player(SoundCard("usb"), 10.0, print)
    player.add(SOUND, RATE)
    player.add(SOUND[:320], 16000)
    player.close(drain_s=5)
    first, second = sounddevice.streams
    assert (first.settings["samplerate"], second.settings["samplerate"]) == (RATE, 16000)
    assert first.settings["device"] == "usb"
    assert np.array_equal(np.concatenate(first.blocks)[:, 0], SOUND)
    assert max(map(len, first.blocks)) == RATE // 50
    assert not first.open
    assert not second.open


def test_a_sound_card_that_is_missing_is_named(sounddevice, monkeypatch):
    with pytest.raises(OSError, match="no sound card 'hdmi': No output device matching 'hdmi'"):
        SoundCard("hdmi")
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(OSError, match=r"no package sounddevice .*: pip install sounddevice"):
        SoundCard()
