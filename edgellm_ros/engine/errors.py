# SPDX-License-Identifier: Apache-2.0
"""The one exception of the engine layer."""


class EngineError(RuntimeError):
    """An engine or device cannot do what was asked: not here, wrongly bound, failed, or not finite."""
