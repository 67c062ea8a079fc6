# SPDX-License-Identifier: Apache-2.0
"""Loads the action head's fused kernels, and chooses between them and the engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.fused_actions import Expert, FusedActions
from edgellm_ros.diffusion.time_embedding import TimeEmbedding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.choices import FP8
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.description.decoder import StoredWeight
from edgellm_ros.fused.description.expert import FUSED_EXPERT_FILE, FusedExpertModel
from edgellm_ros.fused.loading.agreement import choose
from edgellm_ros.fused.loading.availability import (
    check_device,
    check_shape,
    described,
    load_if_wanted,
    made_or_unavailable,
)
from edgellm_ros.fused.loading.backend import element_type
from edgellm_ros.fused.loading.device_weights import load_weights, owners_of
from edgellm_ros.kernels import SequenceCache

if TYPE_CHECKING:
    from edgellm_ros.fused.expert_weights import ExpertWeights
    from edgellm_ros.fused.plan.expert_shape import ExpertShape

logger = logging.getLogger(__name__)

CONTEXT = 200  # KV rows that the measured steps attend to, fewer if the cache has fewer


def load_fused_actions(root: Path, config: EngineConfig, device: Device, decode: str) -> FusedActions | None:
    """Load the action head's fused kernels if `decode` asks and the device has them.

    The log gets the reason where `decode` is "auto" and the engine samples actions. EngineError with the
    reason where `decode` is "fused".
    """
    what, instead = "the action head's fused kernels are", "the engine samples actions"
    load = partial(_load, root, config, device)
    return load_if_wanted(load, decode, logger, what=what, instead=instead)


def _load(root: Path, config: EngineConfig, device: Device) -> FusedActions:
    check_device(device)
    path = described(root, FUSED_EXPERT_FILE, config, "the engine")
    model, dtype = FusedExpertModel.load(path), element_type(config.precision)
    shape = expert_shape(config, model)
    check_shape(shape.unsupported(), "this action head")
    tensors = load_weights(path.parent, model, dtype, device)
    with made_or_unavailable():
        expert = make_expert(device, shape, expert_weights(model, tensors), config.builder.max_action_samples)
    return FusedActions(expert, time_embedding(path.parent, model, dtype), tensors)


def make_expert(device: Any, shape: ExpertShape, weights: ExpertWeights, max_samples: int) -> Expert:
    """Make the expert that runs Euler steps on a device."""
    from edgellm_ros.fused.expert import FusedExpert

    return FusedExpert(device, shape, weights, max_samples)


def expert_shape(config: EngineConfig, model: FusedExpertModel) -> ExpertShape:
    """Return the shape of an engine's action head."""
    from edgellm_ros.fused.plan.expert_shape import ExpertShape

    action = config.expert
    assert action is not None
    return ExpertShape(
        dtype=config.precision,
        kv_caches=action.kv_caches,
        hidden=model.hidden_size,
        heads=action.num_attention_heads,
        kv_heads=action.num_key_value_heads,
        head_dim=action.head_dim,
        inner=model.intermediate_size,
        rotary_dim=config.llm.rope.rotary_dim,
        capacity=config.max_kv_cache_capacity,
        horizon=action.action_space.horizon,
        actions=action.action_space.dim,
        epsilon=model.epsilon,
        fp8_cache=config.kv_cache_type == FP8,
    )


def expert_weights(model: FusedExpertModel, tensors: Mapping[str, Tensor]) -> ExpertWeights:
    """Return the addresses of weights on the device."""
    from edgellm_ros.fused.expert_weights import ExpertLayerWeights, ExpertWeights

    def addresses(part: object, *names: str) -> dict[str, int]:
        return {name: tensors[getattr(part, name).name].pointer for name in names}

    layers = tuple(ExpertLayerWeights(**addresses(layer, *vars(layer))) for layer in model.layers)
    outer = addresses(model, "in_proj", "norm", "out_proj", "out_bias")
    return ExpertWeights(layers, **outer, owners=owners_of(tensors))


def time_embedding(folder: Path, model: FusedExpertModel, dtype: np.dtype) -> TimeEmbedding:
    """Read the embedding of the time, with the bias of the input projection."""
    contents, time = np.memmap(folder / model.file, np.uint8, "r"), model.time

    def read(weight: StoredWeight) -> np.ndarray:
        raw = contents[weight.offset : weight.offset + weight.size * dtype.itemsize]
        return raw.view(dtype).reshape(weight.shape).astype(np.float32)

    return TimeEmbedding(
        min_period=time.min_period,
        max_period=time.max_period,
        first=read(time.first),
        first_bias=read(time.first_bias),
        second=read(time.second),
        second_bias=read(time.second_bias) + read(model.in_bias),
    )


def choose_by_time(device: Device, runner: ActionRunner, cache: SequenceCache, read: tuple[int, ...]) -> None:
    """Let a runner's fused kernels sample actions if they are faster than the engine.

    The kernels are not used if their trajectories differ from the engine's, or from run to run. cache: a row
    that is not open; its KV caches `read` are filled with random values, which the caller clears. The log has
    the choice and the times.
    """
    context = min(CONTEXT, cache.cache.shape[3])
    device.upload(cache.length, np.array([context], np.int64))
    cache = dataclasses.replace(cache, host_length=context)
    keys, values = cache.keys, cache.values
    shape, dtype = keys[0].shape, keys[0].dtype
    random = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
    for i in sorted(set(read)):
        device.upload(keys[i], random)
        device.upload(values[i], random)
    steps = runner.default_steps

    def run() -> np.ndarray:
        actions = runner.execute(cache, 1, steps, 0, lambda step: True)
        assert actions is not None  # not cancelled
        return actions

    times = choose(device, runner, run, lambda actions: actions)
    if times.problem:
        logger.warning("the engine samples actions: the fused kernels' trajectories %s", times.problem)
        return
    logger.info(
        "%s (ms for %d Euler steps of one trajectory after %d tokens: %.3f fused, %.3f engine)",
        "the fused kernels sample actions" if runner.uses_fused else "the engine samples actions",
        steps,
        context,
        times.fused * 1e3,
        times.engine * 1e3,
    )
