# SPDX-License-Identifier: Apache-2.0
"""A recording in the format of all parts of the runtime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.echo import quoted

MIN_SAMPLE_RATE = 4000
MAX_SAMPLE_RATE = 192000
MAX_AMPLITUDE = 4.0  # filters overshoot full scale a little; larger values have another scale


@dataclass(frozen=True, eq=False)
class Sound:
    """One recording.

    Silence and clipped samples are allowed. ValueError for samples of another shape or type, no samples,
    values that are not finite or far above full scale (16-bit integers must be divided by 32768), or a rate
    outside 4000..192000 Hz.
    """

    samples: np.ndarray  # [N] float32, mono, full scale -1..1
    sample_rate: int  # Hz

    def __post_init__(self) -> None:
        samples, rate = self.samples, self.sample_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
            raise ValueError(f"sample_rate must be an integer in Hz, got {quoted(rate)}")
        if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
            raise ValueError(
                f"sample_rate must be from {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz, got {rate}"
            )
        if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 1:
            described = (
                f"{samples.dtype} {list(samples.shape)}"
                if isinstance(samples, np.ndarray)
                else type(samples).__name__
            )
            raise ValueError(f"samples must be a float32 array [N], mono, got {described}")
        if not samples.size:
            raise ValueError("samples must not be empty")
        peak = max(-float(samples.min()), float(samples.max()))
        if not peak <= MAX_AMPLITUDE:  # false for NaN as well
            raise ValueError(f"samples must be finite, with full scale -1..1, got a peak of {peak:g}")

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate
