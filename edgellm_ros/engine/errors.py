# SPDX-License-Identifier: Apache-2.0
"""Errors of engines and devices."""


class EngineError(RuntimeError):
    """An engine or device is unavailable, failed, or was used wrongly.

    Also raised for results that are not finite.
    """


class DeviceMemoryError(EngineError):
    """The device does not have the requested memory.

    Work with less memory still succeeds.
    """


class DeviceLostError(EngineError):
    """The device stopped working for this process.

    Only a new process can use the device again.
    """
