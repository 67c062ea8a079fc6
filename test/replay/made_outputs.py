# SPDX-License-Identifier: Apache-2.0
"""Outputs of the node, made up, and an output bag of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from made_bags import header, make, serialized, string

from edgellm_ros.replay.inputs import InputMessage
from edgellm_ros.replay.message_types import typestore
from edgellm_ros.replay.recording import OUTPUT_TYPES, Recording

STAMP = 12 * 10**9
TEXT = "the way is clear."


def generation(stamp: int, text: str = TEXT, **fields: Any) -> Any:
    """An answer that took its time."""
    kind = OUTPUT_TYPES["generation"]
    names = [field.name for field in dataclasses.fields(typestore().types[kind])]
    values = {
        "request_id": "command-1",
        "token_count": 2,
        "token_ids": np.array([5, 6], np.int32),
        "prompt_token_count": 90,
        "finish_reason": "stop",
        "lora": "",
        "action_chunk_count": 1,
        **{name: 0.123 for name in names if name.endswith("_latency")},
    }
    return make(kind, header=header(stamp, "camera"), text=text, **(values | fields))


def chunk(stamp: int, values: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4), **fields: Any) -> Any:
    """Two rows of accelerations and curvatures."""
    rest = {"request_id": "command-1", "sample_index": 0, "noise_seed": 0} | fields
    return make(
        OUTPUT_TYPES["action_chunk"],
        header=header(stamp, "base_link"),
        dt=0.1,
        horizon=2,
        names=["acceleration", "curvature"],
        units=["m/s^2", "1/m"],
        values=np.array(values, np.float32),
        **rest,
    )


def path(stamp: int, x: float = 0.5) -> Any:
    """One pose."""
    point = make("geometry_msgs/msg/Point", x=x, y=0.0, z=0.0)
    turned = make("geometry_msgs/msg/Quaternion", x=0.0, y=0.0, z=0.0, w=1.0)
    pose = make("geometry_msgs/msg/Pose", position=point, orientation=turned)
    at = header(stamp, "base_link")
    stamped = make("geometry_msgs/msg/PoseStamped", header=at, pose=pose)
    return make(OUTPUT_TYPES["path"], header=at, poses=[stamped])


def utterance(stamp: int, samples: tuple[float, ...] = (0.5, -0.25)) -> Any:
    """What was said, as the node tells it."""
    data = np.array(samples, "<f4").view(np.uint8)
    fields = {"encoding": "F32LE", "sample_rate": 16000, "channels": 1, "data": data}
    return make(OUTPUT_TYPES["utterance"], header=header(stamp), **fields)


def frame(stamp: int, data: bytes = b"jpeg") -> InputMessage:
    """A camera frame that came 30 ms after it was taken."""
    return InputMessage("image", "sensor_msgs/msg/CompressedImage", data, stamp, stamp + 30_000_000)


def answer(stamp: int, text: str = TEXT, pieces: tuple[str, ...] = ("the way ", "is clear."), **changes: Any):
    """Serialized outputs of one plan, by topic; `changes` replace the chunk or the path."""
    messages = {
        "generation": [generation(stamp, text)],
        "text": [string(text)],
        "text_stream": [string(piece) for piece in pieces],
        "action_chunk": [changes.get("chunk", chunk(stamp))],
        "path": [changes.get("path", path(stamp))],
    }
    return {name: serialized(OUTPUT_TYPES[name], content) for name, content in messages.items()}


NOTHING: dict[str, list[bytes]] = {
    name: [] for name in ("generation", "text", "text_stream", "action_chunk", "path")
}


def record(bag: Path, *answered: tuple[InputMessage, dict, dict], storage: str = "mcap", engine=None) -> Path:
    """An output bag of (input, outputs, what became of it)."""
    with Recording(bag, storage, {"llm/model.onnx": "00"} if engine is None else engine, False) as recording:
        for message, outputs, became in answered:
            recording.add(message, outputs, became)
    return bag
