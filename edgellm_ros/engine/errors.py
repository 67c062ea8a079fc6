# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with engines and devices."""


class EngineError(RuntimeError):
    """An engine or device cannot do what was asked: not here, wrongly bound, failed, or not finite."""


class DeviceMemoryError(EngineError):
    """The device has not the memory that was asked for; it goes on working with what it has."""


class DeviceLostError(EngineError):
    """The device stopped working for this process: only a new process can use it again."""
