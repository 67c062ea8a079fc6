# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/views.jpg from an episode of the demo.

Usage: `make_views_picture.py ENGINE PICTURE`.

The arena, the node and the follower run as in `edgellm demo --follower`, and this process subscribes to the
topics of the Foxglove layout. The picture shows the content of these messages, arranged like the layout. It
is not a screenshot of RViz or Foxglove.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import rclpy
from edgellm_ros.msg import Generation
from nav_msgs.msg import Path as PathMessage
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import Image
from visualization_msgs.msg import Marker, MarkerArray

from edgellm_arena.ros.demo import DemoOptions, arena_arguments, follower_arguments, node_arguments
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT
from edgellm_ros.ros.messaging import to_nanoseconds
from edgellm_ros.ros.processes import Child, own_domain, ros_environment

WIDTH, HEIGHT, PLOT = 640, 448, 200  # pixels of each picture, and height of the plot
BACKGROUND, GRID, TEXT, WHITE = (48, 48, 48), (92, 92, 94), (225, 225, 225), (255, 255, 255)
LATENCIES = {
    "total": WHITE,
    "first_token": (250, 200, 60),
    "vision": (90, 170, 250),
    "prefill": (120, 220, 120),
    "decode": (240, 110, 110),
    "action": (220, 130, 230),
}
EYE, TARGET, FOCAL = np.array([-3.4, 0.0, 4.3]), np.array([0.8, 0.0, 0.0]), 680.0  # nearly as in views/
FONT = cv2.FONT_HERSHEY_SIMPLEX


@dataclass
class Received:
    """Messages in order of arrival; markers and overlays by the stamp of their frame."""

    generations: list[Generation] = field(default_factory=list)
    paths: list[PathMessage] = field(default_factory=list)
    overlays: dict[int, Image] = field(default_factory=dict)
    markers: dict[int, MarkerArray] = field(default_factory=dict)


def record(options: DemoOptions) -> Received:
    """Play one episode and return what the nodes published."""
    received = Received()
    with own_domain() as domain:
        environment = ros_environment(domain)
        context = rclpy.Context()
        rclpy.init(context=context, domain_id=domain)
        viewer = rclpy.create_node("viewer", context=context)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(viewer)

        def store(messages: dict[int, Any], header: Callable[[Any], Any]) -> Callable[[Any], None]:
            return lambda message: messages.update({to_nanoseconds(header(message).stamp): message})

        topics = (
            (Generation, "edgellm/generation", received.generations.append),
            (PathMessage, "edgellm_follower/path", received.paths.append),
            (Image, "edgellm/overlay", store(received.overlays, lambda message: message.header)),
            (MarkerArray, "edgellm/markers", store(received.markers, lambda array: array.markers[0].header)),
        )
        for kind, name, callback in topics:
            viewer.create_subscription(kind, name, callback, 100)

        def start(name: str, arguments: list[str]) -> Child:
            return Child(name, arguments, options.out / f"{name}.log", environment)

        children = [start("edgellm", node_arguments(options)), start("follower", follower_arguments())]
        try:
            while not all(viewer.count_publishers(f"/{name}") for _, name, _ in topics):
                executor.spin_once(timeout_sec=0.1)
            children.append(start("arena", arena_arguments(options)))
            while children[-1].process.poll() is None:
                executor.spin_once(timeout_sec=0.1)
        finally:
            for child in children:
                child.stop()
            executor.shutdown()
            viewer.destroy_node()
            rclpy.shutdown(context=context)
    return received


def line_strips(array: MarkerArray) -> list[Marker]:
    """Return the markers of paths."""
    return [marker for marker in array.markers if marker.type == Marker.LINE_STRIP]


def spread(array: MarkerArray) -> float:
    """Return how far apart the paths of a plan are, in metres."""
    paths = np.array([[[p.x, p.y] for p in marker.points] for marker in line_strips(array)])
    return float(np.ptp(paths, axis=0).max()) if len(paths) else 0.0


def project(points: np.ndarray) -> np.ndarray:
    """Project points [N, 3] of the base frame into the 3D view [N, 2].

    Points behind the eye become NaN.
    """
    ahead = (TARGET - EYE) / np.linalg.norm(TARGET - EYE)
    right = np.cross(ahead, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    seen = (points - EYE) @ np.stack([right, np.cross(ahead, right), ahead]).T
    depth = np.where(seen[:, 2:] > 0.1, seen[:, 2:], np.nan)
    return seen[:, :2] * FOCAL / depth + [WIDTH / 2, HEIGHT / 2]


def draw_line(canvas: np.ndarray, points: np.ndarray, color: tuple, width: int, alpha: float = 1.0) -> None:
    """Draw a line through points of the base frame [N, 3]."""
    pixels = project(points)
    pixels = pixels[np.isfinite(pixels).all(axis=1)]
    drawn = canvas.copy()
    fixed = np.round(np.clip(pixels, -1e4, 1e4) * 16).astype(np.int32)[:, None]
    cv2.polylines(drawn, [fixed], False, color, width, cv2.LINE_AA, 4)
    cv2.addWeighted(drawn, alpha, canvas, 1 - alpha, 0, canvas)


def draw_scene(array: MarkerArray, path: PathMessage) -> np.ndarray:
    """Draw markers, and the path about to be driven, from above and behind the robot."""
    canvas = np.full((HEIGHT, WIDTH, 3), BACKGROUND, np.uint8)
    steps = np.linspace(-5, 5, 101)
    for at in range(-5, 6):
        for line in (np.column_stack([steps, np.full(101, at)]), np.column_stack([np.full(101, at), steps])):
            draw_line(canvas, np.column_stack([line, np.zeros(101)]), GRID, 1)
    for axis, color in zip(np.eye(3), ((220, 60, 60), (60, 200, 60), (80, 110, 250)), strict=True):
        draw_line(canvas, np.linspace([0, 0, 0], 0.3 * axis, 5), color, 3)
    for marker in sorted(line_strips(array), key=lambda marker: marker.color.a):
        color = marker.color
        rgb = tuple(round(255 * value) for value in (color.r, color.g, color.b))
        points = np.array([[p.x, p.y, p.z + marker.pose.position.z] for p in marker.points])
        draw_line(canvas, points, rgb, round(100 * marker.scale.x), color.a)
    driven = np.array([[pose.pose.position.x, pose.pose.position.y, 0.04] for pose in path.poses])
    draw_line(canvas, driven, WHITE, 2)
    for marker in array.markers:
        if marker.type == Marker.TEXT_VIEW_FACING:
            at = marker.pose.position
            x, y = project(np.array([[at.x, at.y, at.z]]))[0]
            rows = marker.text.split("\n")
            for row, text in enumerate(rows):
                (wide, _), _ = cv2.getTextSize(text, FONT, 0.55, 1)
                place = (round(x - wide / 2), round(y + 22 * (row - len(rows) / 2)))
                cv2.putText(canvas, text, place, FONT, 0.55, WHITE, 1, cv2.LINE_AA)
    return canvas


def draw_plot(generations: list[Generation]) -> np.ndarray:
    """Draw the latencies of all plans in ms."""
    canvas = np.full((PLOT, 2 * WIDTH, 3), BACKGROUND, np.uint8)
    left, right, top, bottom = 230, 2 * WIDTH - 20, 40, PLOT - 24
    highest = max(generation.total_latency for generation in generations)
    x = np.linspace(left, right, len(generations))
    for share in (0.0, 0.5, 1.0):
        y = round(bottom - share * (bottom - top))
        cv2.line(canvas, (left, y), (right, y), GRID, 1)
        cv2.putText(canvas, f"{1e3 * share * highest:.0f} ms", (160, y + 5), FONT, 0.42, TEXT, 1, cv2.LINE_AA)
    for row, (name, color) in enumerate(LATENCIES.items()):
        values = np.array([getattr(generation, f"{name}_latency") for generation in generations])
        y = bottom - values / highest * (bottom - top)
        fixed = np.round(np.column_stack([x, y]) * 16).astype(np.int32)[:, None]
        cv2.polylines(canvas, [fixed], False, color, 2, cv2.LINE_AA, 4)
        cv2.putText(canvas, name, (14, 52 + 22 * row), FONT, 0.5, color, 1, cv2.LINE_AA)
    return canvas


def draw(received: Received) -> np.ndarray:
    """Arrange overlay, scene and plot: of the plan whose paths differ most."""
    stamps = received.overlays.keys() & received.markers.keys()
    stamp = max(stamps, key=lambda at: spread(received.markers[at]))
    overlay = received.overlays[stamp]
    frame = np.frombuffer(overlay.data, np.uint8).reshape(overlay.height, overlay.width, 3)
    path = min(received.paths, key=lambda path: abs(to_nanoseconds(path.header.stamp) - stamp))
    camera = cv2.resize(frame, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    panels = {
        "Camera with paths: /edgellm/overlay": camera,
        "Plan: /edgellm/markers; white: /edgellm_follower/path": draw_scene(received.markers[stamp], path),
        "Latencies of each plan: /edgellm/generation": draw_plot(received.generations),
    }
    for title, panel in panels.items():
        (wide, _), _ = cv2.getTextSize(title, FONT, 0.5, 1)
        cv2.rectangle(panel, (0, 0), (wide + 20, 26), (24, 24, 24), -1)
        cv2.putText(panel, title, (10, 18), FONT, 0.5, TEXT, 1, cv2.LINE_AA)
    left, middle, plot = panels.values()
    return np.vstack([np.hstack([left, middle]), plot])


def main() -> None:
    """Play an episode and draw it."""
    parser = argparse.ArgumentParser(description="draw what viewers show of an episode of the demo")
    parser.add_argument("engine", type=Path, help="engine directory of the demo's checkpoint")
    parser.add_argument("picture", type=Path, help="PNG or JPEG to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of the episode (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        options = DemoOptions(
            episodes=1, seed=arguments.seed, out=Path(out), engine_dir=arguments.engine,
            checkpoint=ARENA_CHECKPOINT, device="cpu", action_samples=4, follower=True,
        )  # fmt: skip
        received = record(options)
    cv2.imwrite(str(arguments.picture), cv2.cvtColor(draw(received), cv2.COLOR_RGB2BGR))


if __name__ == "__main__":
    main()
