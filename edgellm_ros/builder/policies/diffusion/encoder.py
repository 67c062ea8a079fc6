# SPDX-License-Identifier: Apache-2.0
"""Graph of Diffusion Policy's encoders: from observations to the condition.

Source of the model: LeRobot 0.4.4, policies/diffusion/modeling_diffusion.py.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, UINT8
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.diffusion.architecture import DiffusionArchitecture, EncoderShape
from edgellm_ros.builder.policies.observations import ImageSpace
from edgellm_ros.builder.policies.pixels import centre_crop, normalised, resized
from edgellm_ros.builder.policies.resnet import resnet
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# state -------------------------------+
# camera_image_i -- rgb_encoder [O,F] --+-- Concat [O,...] -- Reshape -- condition
def build_encoder(architecture: DiffusionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `prefix/model.onnx`.

    Inputs, of O observations, oldest first:
    - camera_image_i [O,H,W,3] uint8, RGB: of each camera
    - state [O,S] fp32: normalised; the robot's state, then the environment's

    Output: condition [1,C] fp32.
    """
    graph = ModelBuilder("prefix", weights, precision)
    count, shape = architecture.observations, architecture.encoder
    pixels = [
        graph.input(names.camera_image(i), UINT8, [count, image.height, image.width, 3])
        for i, image in enumerate(architecture.images)
    ]
    sizes = [size for size in (architecture.state_dim, architecture.environment_dim) if size]
    state = graph.input(names.STATE, FLOAT, [count, sum(sizes)])
    robot, *environment = graph.split(state, sizes, axis=1) if len(sizes) > 1 else [state]
    with graph.module("diffusion"):
        images = [normalised(graph, each, architecture.images[i]) for i, each in enumerate(pixels)]
        features = _features(graph, shape, architecture.images[0], images, count)
    parts = [robot, *map(graph.to_fp32, features), *environment]
    condition = graph.reshape(graph.op("Concat", *parts, axis=1), [1, architecture.condition])
    graph.output(condition, names.CONDITION, FLOAT, [1, architecture.condition])
    return graph


def _features(
    graph: ModelBuilder, shape: EncoderShape, space: ImageSpace, images: list[ir.Value], count: int
) -> list[ir.Value]:
    """Add the features [count,F] of each camera's images [count,3,H,W]."""
    size = space.height, space.width
    if shape.of_each_camera:
        features = []
        for i, image in enumerate(images):
            with graph.module(f"rgb_encoder.{i}"):
                features.append(_encoder(graph, shape, image, size))
        return features
    with graph.module("rgb_encoder"):
        if len(images) == 1:
            return [_encoder(graph, shape, images[0], size)]
        together = _encoder(graph, shape, graph.op("Concat", *images, axis=0), size)
    return list(graph.split(together, [count] * len(images), axis=0))


# x -- resize -- crop -- backbone -- pool.nets -- Softmax over places -- MatMul (pos_grid) -- out -- Relu -->
def _encoder(graph: ModelBuilder, shape: EncoderShape, x: ir.Value, size: tuple[int, int]) -> ir.Value:
    """Add an encoder: images [N,3,*size] -> [N,F]."""
    x = centre_crop(graph, resized(graph, x, size, shape.resized), shape.resized, shape.cut)
    with graph.module("backbone"):
        x = resnet(graph, x, shape.resnet, shape.cut)
    channels, keypoints = shape.resnet.channels, shape.keypoints
    height, width = shape.resnet.grid(*shape.cut)
    with graph.module("pool"):
        kernel, bias = (
            graph.tensor("nets.weight", keypoints, channels, 1, 1),
            graph.tensor("nets.bias", keypoints),
        )
        maps = graph.reshape(
            graph.op("Conv", x, kernel, bias, kernel_shape=[1, 1]), [0, keypoints, height * width]
        )
        places = graph.tensor("pos_grid", height * width, 2)
        expected = graph.op("MatMul", graph.op("Softmax", maps, axis=-1), places)
    features = graph.reshape(expected, [0, shape.features])
    return graph.op("Relu", graph.linear("out", features, shape.features, shape.features, bias=True))
