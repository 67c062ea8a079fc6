# SPDX-License-Identifier: Apache-2.0
"""Sound files of a request, decoded by libsndfile.

libsndfile reads truncated files of many formats without an error. Supported are the formats whose
truncation is detected, here (WAV, OGG) or by libsndfile (FLAC).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.contents import contents, silenced_stderr

if TYPE_CHECKING:
    from edgellm_ros.multimodal.sound import Sound

STREAMED_WAV_BYTES = 0x7FFFF000  # sizes from this on mean that the writer did not know the length
ACCEPTED = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "OGG"}  # by the first bytes
OGG_PAGE_HEADER = 27  # bytes
OGG_LAST_PAGE = 4  # flag


def read_sound(source: str | Path | bytes, max_seconds: float) -> Sound:
    """Read a sound file (WAV, FLAC, OGG) of any rate; channels are averaged.

    source: the file, or its contents. ValueError for a file that is empty, truncated, not a sound, of another
    format, or not shorter than `max_seconds`.
    """
    import soundfile

    from edgellm_ros.multimodal.sound import Sound

    data, where = contents(source)
    if not data:
        raise ValueError(f"{where}the sound file is empty")
    try:
        _check_wav(data)
        _check_ogg(data)
        with silenced_stderr(), soundfile.SoundFile(io.BytesIO(data)) as file:
            if data[:4] not in ACCEPTED:
                raise ValueError(
                    f"the format is {file.format_info} (first bytes {data[:4]!r}), expected "
                    f"{', '.join(ACCEPTED.values())} (a truncated file is detected in these formats only)"
                )
            seconds, rate = file.frames / file.samplerate, file.samplerate
            if seconds >= max_seconds:
                raise ValueError(
                    f"a sound of {seconds:.2f} s, the engine takes less than {max_seconds:.2f} s"
                )
            samples = file.read(dtype="float32", always_2d=True)
        return Sound(samples.mean(axis=1), rate)
    except soundfile.SoundFileError as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise ValueError(
            f"{where}not a sound that libsndfile can read ({len(data)} bytes): {reason}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _check_wav(data: bytes) -> None:
    """Raise ValueError for a truncated WAV file, or one that ends within a sample."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    start, block_align = 12, 1
    while start + 8 <= len(data):
        name, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        start += 8
        left = len(data) - start
        if left < size < STREAMED_WAV_BYTES:
            raise ValueError(
                f"the sound file is truncated: {left} bytes of {name.decode('latin-1')!r}, expected {size}"
            )
        if name == b"fmt ":
            block_align = int.from_bytes(data[start + 12 : start + 14], "little") or 1
        elif name == b"data":
            size = min(size, left)
            if size % block_align:
                raise ValueError(
                    f"{size} bytes of samples are not a multiple of the sample size {block_align}"
                )
            return
        start += size + size % 2


def _check_ogg(data: bytes) -> None:
    """Raise ValueError for a truncated OGG file, by its last page."""
    if data[:4] != b"OggS":
        return
    page = data[data.rfind(b"OggS") :]
    flags, segments = page[5:6], page[OGG_PAGE_HEADER - 1 : OGG_PAGE_HEADER]
    lengths = page[OGG_PAGE_HEADER : OGG_PAGE_HEADER + (segments[0] if segments else 0)]
    whole = bool(segments) and len(page) >= OGG_PAGE_HEADER + len(lengths) + sum(lengths)
    if not whole or not flags[0] & OGG_LAST_PAGE:
        raise ValueError(f"the sound file is truncated: its last page is missing ({len(data)} bytes)")
