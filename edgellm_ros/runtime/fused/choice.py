# SPDX-License-Identifier: Apache-2.0
"""Chooses between engine and fused kernels by the time of a recorded decode step."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.decoding.recorded_steps import batch_sizes
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner

logger = logging.getLogger(__name__)

CONTEXT = 500  # KV rows that the measured steps attend to, as far as the cache has them
SAMPLES, STEPS = 7, 4  # medians of so many times of so many steps
LARGEST_DIFFERENCE = 0.25  # of logits of the same model, in shares of their root mean square


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one batch size."""

    rows: int
    engine: float
    fused: float


def choose_by_time(device: Device, runner: LLMEngineRunner, embedder: InputEmbedder, logits: Tensor) -> None:
    """Set the largest batch that the fused kernels decode, so that each batch gets the faster one.

    The batch must be empty. The fused kernels are not used either if their logits are not the engine's, or
    not the same bits in every run. logits [max batch,1,V]: the buffer of all steps. The log tells the choice
    and the times.
    """
    most, chosen = runner.most_fused_rows, 0
    times: list[StepTimes] = []
    try:
        for rows in batch_sizes(most):
            measured, problem = _measure(device, runner, embedder, logits.rows(0, rows), rows)
            if problem:
                logger.warning(
                    "the engine decodes: with %d rows the logits of the fused kernels %s", rows, problem
                )
                return
            times.append(measured)
            if measured.fused >= measured.engine:
                break
            chosen = rows
    except DeviceLostError:
        raise
    except EngineError as error:
        logger.warning("the engine decodes: the fused kernels failed: %s", error)
        return
    finally:
        runner.most_fused_rows = 0
        device.fill_zero(runner.kv_cache.lengths(range(most)))
        runner.kv_cache.clear()
    runner.most_fused_rows = chosen
    logger.info("%s", describe(times, chosen))


def describe(times: list[StepTimes], most_rows: int) -> str:
    """Return the log's line about a choice."""
    chosen = "the engine decodes"
    if most_rows:
        chosen = f"the fused kernels decode batches of up to {most_rows}"
    measured = ", ".join(
        f"batch {each.rows}: {each.fused * 1e3:.3f} fused, {each.engine * 1e3:.3f} engine" for each in times
    )
    return f"{chosen} (ms per step of {CONTEXT} tokens of context, {measured})"


def _measure(
    device: Device, runner: LLMEngineRunner, embedder: InputEmbedder, logits: Tensor, rows: int
) -> tuple[StepTimes, str]:
    """Return the times of both, and what is wrong with the logits of the fused kernels; "" = nothing."""
    context = min(CONTEXT, runner.kv_cache.capacity) - 1
    device.upload(runner.kv_cache.lengths(range(rows)), np.full(rows, context, np.int64))
    tokens = device.empty((rows, 1), np.int64)
    device.upload(tokens, np.arange(1, rows + 1)[:, None] % embedder.table.shape[0])
    embeds = embedder.embed_tokens(tokens)
    seconds, results = [], []
    for most in (0, rows):
        runner.most_fused_rows = most
        device.fill_zero(logits)
        runner.execute_vanilla_decoding_step(embeds, logits)
        results.append(device.download(logits))
        seconds.append(_time(device, lambda: runner.execute_vanilla_decoding_step(embeds, logits)))
    repeated = device.download(logits)
    engine, fused = results
    return StepTimes(rows, *seconds), _problem(engine, fused, repeated)


def _problem(engine: np.ndarray, fused: np.ndarray, repeated: np.ndarray) -> str:
    """Compare logits of the engine, of the fused kernels, and of a later run of these."""
    found, expected = fused.astype(np.float64), engine.astype(np.float64)
    difference, size = (float(np.sqrt(np.mean(x**2))) for x in (found - expected, expected))
    if not difference <= LARGEST_DIFFERENCE * size:
        return f"differ from the engine's by {difference:.3g}, of a root mean square of {size:.3g}"
    return "" if np.array_equal(fused, repeated) else "differ from run to run"


def _time(device: Device, step: Callable[[], None]) -> float:
    """Return the median seconds of a step, which has run before; recorded if the device has graphs."""
    graph = device.capture(step)
    times = []
    for _ in range(SAMPLES + 1):  # the first warms up
        device.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            if graph is None:
                step()
            else:
                graph.launch(device.stream)
        device.synchronize()
        times.append((time.perf_counter() - start) / STEPS)
    return statistics.median(times[1:])
