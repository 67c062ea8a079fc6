# SPDX-License-Identifier: Apache-2.0
"""A WAV file that grows: valid after every write."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.echo import quoted

MAX_BYTES = 2**31 - 1024  # of samples; readers of the format take sizes up to 2 or 4 GiB


class WavFile:
    """Writes mono 16-bit sound. OSError for a file that cannot be written."""

    def __init__(self, path: Path, sample_rate: int) -> None:
        """Begin the file, which is replaced if there is one."""
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a folder, expected the name of a WAV file")
        self._path = path
        self.sample_rate = sample_rate
        self._bytes = 0
        self._stream = path.open("wb")
        self._file = wave.open(self._stream, "wb")  # noqa: SIM115
        self._file.setnchannels(1)
        self._file.setsampwidth(2)
        self._file.setframerate(sample_rate)

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self._bytes / 2 / self.sample_rate

    def write(self, samples: NDArray[np.int16]) -> None:
        """Append samples [N]. ValueError beyond the size that the format allows."""
        if self._bytes + samples.nbytes > MAX_BYTES:
            raise ValueError(f"{quoted(str(self._path))} has {self._bytes} bytes, at most {MAX_BYTES}")
        self._file.writeframes(samples.astype("<i2").tobytes())  # updates the sizes in the header
        self._stream.flush()
        self._bytes += samples.nbytes

    def close(self) -> None:
        """End the file."""
        self._file.close()
        self._stream.close()
