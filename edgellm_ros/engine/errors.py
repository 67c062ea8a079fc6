# SPDX-License-Identifier: Apache-2.0
"""The one exception of the engine layer."""


class EngineError(RuntimeError):
    """An engine or device cannot do what was asked: missing backend, wrong binding, failed or non-finite
    computation.
    """
