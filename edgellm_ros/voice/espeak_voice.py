# SPDX-License-Identifier: Apache-2.0
"""espeak-ng's own sound: small, in a hundred languages, and clearly a machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.voice.espeak import ESPEAK_RATE, open_espeak


class EspeakVoice:
    """A voice that needs no model."""

    sample_rate = ESPEAK_RATE

    def __init__(self, language: str) -> None:
        """Check the language.

        ValueError for one that espeak-ng does not have; ImportError without espeak-ng.
        """
        self.language = language
        with open_espeak() as espeak:
            espeak.set_voice(language)

    def sounds(self, sentence: str) -> Iterator[NDArray[np.int16]]:
        """Yield the sound of a sentence [N] in one piece.

        The same sentence gives the same samples.
        """
        with open_espeak() as espeak:
            espeak.set_voice(self.language)
            sound = espeak.synthesise(sentence)
        if sound.size:
            yield sound
