# SPDX-License-Identifier: Apache-2.0
"""Plays chunks of sound on a sound card, or writes them into a WAV file.

add, silence (never wait) --> bounded buffer --> thread, blocks of 20 ms --> SoundCard or WavSink
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.echo import quoted
from edgellm_ros.voice.wav_file import WavFile

BLOCK_S = 0.02  # sound that is still heard after `silence`, besides the sound card's own latency
DEFAULT_DEVICE = "default"


class Sink(Protocol):
    """Where sound goes. Used by one thread."""

    def write(self, samples: NDArray[np.int16], sample_rate: int) -> None:
        """Take mono samples [N]; waits as long as earlier ones are played."""
        ...

    def close(self) -> None:
        """End the output."""
        ...


class SoundCard:
    """Output through the optional package `sounddevice`."""

    def __init__(self, device: str = DEFAULT_DEVICE) -> None:
        """Check the device: "default", or part of its name.

        OSError for a missing package or device.
        """
        try:
            import sounddevice
        except (ImportError, OSError) as error:  # OSError: without the library PortAudio
            raise OSError(f"no package sounddevice ({error}): pip install sounddevice") from None
        self._device = None if device == DEFAULT_DEVICE else device
        self._library = sounddevice
        self._rate = 0
        self._stream: Any = None
        try:
            sounddevice.check_output_settings(device=self._device, channels=1, dtype="int16")
        except Exception as error:  # the library's own classes
            raise OSError(f"no sound card {quoted(device)}: {error}") from None

    def write(self, samples: NDArray[np.int16], sample_rate: int) -> None:
        if sample_rate != self._rate:
            self.close()
            self._stream = self._library.OutputStream(
                samplerate=sample_rate, channels=1, dtype="int16", device=self._device, latency="low"
            )
            self._stream.start()
            self._rate = sample_rate
        self._stream.write(samples.reshape(-1, 1))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._rate = None, 0


class WavSink:
    """Output into a WAV file, at the rate of the first chunk.

    Pauses between chunks are not written.
    """

    def __init__(self, path: str | Path) -> None:
        """Check the folder. OSError if there is none."""
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise FileNotFoundError(f"{self._path}: no such folder for a WAV file")
        self._file: WavFile | None = None

    def write(self, samples: NDArray[np.int16], sample_rate: int) -> None:
        """Append samples. ValueError for another rate than the first chunk's."""
        if self._file is None:
            self._file = WavFile(self._path, sample_rate)
        if sample_rate != self._file.sample_rate:
            raise ValueError(f"{self._path} has {self._file.sample_rate} Hz, got sound of {sample_rate} Hz")
        self._file.write(samples)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Player:
    """Plays sound on a thread of its own; thread-safe."""

    def __init__(self, sink: Sink, max_seconds: float, log: Callable[[str], None]) -> None:
        """Start the thread.

        max_seconds: longest sound that waits; more is dropped. log: told about errors of the sink.
        """
        self._sink, self._max_seconds, self._log = sink, max_seconds, log
        self._changed = threading.Condition()
        self._blocks: deque[tuple[NDArray[np.int16], int]] = deque()
        self._seconds = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-play")
        self._thread.start()

    @property
    def waiting(self) -> float:
        """Seconds of sound that wait."""
        with self._changed:
            return self._seconds

    def add(self, samples: NDArray[np.int16], sample_rate: int) -> bool:
        """Play mono samples [N] after what waits.

        False if the buffer is full and the samples are dropped.
        """
        with self._changed:
            if self._seconds + samples.size / sample_rate > self._max_seconds:
                return False
            size = max(1, round(BLOCK_S * sample_rate))
            self._blocks += [(samples[at : at + size], sample_rate) for at in range(0, samples.size, size)]
            self._seconds += samples.size / sample_rate
            self._changed.notify()
        return True

    def silence(self) -> None:
        """Drop what waits."""
        with self._changed:
            self._blocks.clear()
            self._seconds = 0.0

    def close(self, drain_s: float = 0.0) -> None:
        """End the thread and the output, after at most `drain_s` for what waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._blocks, drain_s)
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._sink.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._blocks)
                if self._closed:
                    return
                samples, rate = self._blocks.popleft()
                self._seconds = max(0.0, self._seconds - samples.size / rate) if self._blocks else 0.0
                self._changed.notify_all()
            try:
                self._sink.write(samples, rate)
            except (ValueError, OSError) as error:
                self._log(str(error))
            except Exception:  # one failure of the device must not end the thread
                self._log(traceback.format_exc())
