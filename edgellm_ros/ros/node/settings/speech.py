# SPDX-License-Identifier: Apache-2.0
"""The parameters `speech.*`."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.voice.echo_gate import EchoSettings


@dataclass(frozen=True)
class SpeechParameters(EchoSettings):
    """The node's parameters `speech.*`."""

    noise_scale: float = -1.0  # negative = the voice's
