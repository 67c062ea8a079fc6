# SPDX-License-Identifier: Apache-2.0
"""The interface of all voices, and the voice that a setting names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.voice.sentences import sentences_of

ESPEAK = "espeak"  # "espeak:de" = with that language
DEFAULT_LANGUAGE = "en-us"


class Voice(Protocol):
    """What turns text into sound. Not thread-safe."""

    @property
    def language(self) -> str:
        """espeak-ng's name of the language that the voice speaks."""
        ...

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sound, in Hz."""
        ...

    def sounds(self, sentence: str) -> Iterator[NDArray[np.int16]]:
        """Yield the sound of a sentence in pieces [N] of bounded length.

        The sentence is one of `sentences_of`.
        """
        ...


def speak(voice: Voice, text: str) -> tuple[NDArray[np.int16], int]:
    """Return the sound of a text [N] int16 and its sample rate in Hz.

    The sound of a text with nothing to say has no samples.
    """
    pieces = list(spoken_pieces(voice, text))
    return (np.concatenate(pieces) if pieces else np.zeros(0, np.int16)), voice.sample_rate


def spoken_pieces(voice: Voice, text: str) -> Iterator[NDArray[np.int16]]:
    """Yield the sound of a text of any length in pieces of bounded length."""
    for sentence in sentences_of(text):
        yield from voice.sounds(sentence)


def open_voice(name: str, noise_scale: float | None = None) -> Voice:
    """Open the voice that a setting names.

    name: "espeak", "espeak:LANGUAGE", or the path of a Piper voice, MODEL.onnx.
    noise_scale: see `PiperVoice`. OSError or ValueError, which name the file, for a voice that cannot be
    used; ImportError without espeak-ng.
    """
    from edgellm_ros.voice.espeak_voice import EspeakVoice
    from edgellm_ros.voice.piper_voice import PiperVoice

    kind, _, language = name.partition(":")
    if kind == ESPEAK:
        return EspeakVoice(language or DEFAULT_LANGUAGE)
    return PiperVoice(name, noise_scale)
