# SPDX-License-Identifier: Apache-2.0
"""Chooses between engine and fused kernels by the times of recorded runs.

The runs are decode steps, verifications and prompts.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.loading.agreement import disagreement
from edgellm_ros.kernels import DraftTree, TreeKernels
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.decoding.recorded_steps import batch_sizes
from edgellm_ros.runtime.engines.llm_engine_runner import LLMEngineRunner
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun, upload_prompts

logger = logging.getLogger(__name__)

CONTEXT = 500  # KV rows that the last tokens of measured steps attend to, fewer if the cache has fewer
SEED = 0  # of the tokens: random ones, since a trained model amplifies rounding where it sees no text before
PROMPT_TOKENS = 128  # of the measured prompt, fewer if the engine takes fewer
SAMPLES, STEPS = 7, 4  # the time of a step is the median of SAMPLES means of STEPS steps


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one batch size, or of a prompt."""

    rows: int  # sequences of a step, tokens of a prompt
    engine: float
    fused: float


@dataclass(frozen=True)
class Verification:
    """A verification of trees with `size` nodes; kernels: those that prepare it."""

    kernels: TreeKernels
    size: int


def choose_by_time(
    device: Device,
    runner: LLMEngineRunner,
    embedder: InputEmbedder,
    logits: Tensor,
    verification: Verification | None = None,
    cuda_graphs: bool = True,
) -> None:
    """Set what the fused kernels run: which batches, and whether prompts.

    So each batch gets the faster of kernels and engine. The batch must be empty. The fused kernels are not
    used if their logits differ from the engine's, or from run to run.
    logits [max batch,1,V]: the buffer of all decode steps; cuda_graphs: whether the measured steps are
    recorded. The log has the choice and the times.
    """
    batch, vocabulary = logits.shape[0], logits.shape[2]
    most, most_verified = runner.most_fused_rows, runner.most_verified_rows
    chosen, chosen_nodes, fuses_prompts = 0, 0, runner.fuses_prompts
    runner.fuses_prompts = False
    try:
        measurement = _Measurement(device, runner, embedder, cuda_graphs)
        times, chosen = measurement.compare(batch_sizes(most), lambda rows: logits.rows(0, rows))
        text = describe(times, chosen)
        if verification is not None and most_verified:
            size = verification.size
            sizes = [rows for rows in batch_sizes(batch) if rows * size <= most_verified]
            nodes = device.empty((sizes[-1], size, vocabulary), np.float32)
            verified, largest = measurement.compare(sizes, lambda rows: nodes.rows(0, rows), verification)
            chosen_nodes = largest * size
            text += f"; {describe_verification(verified, largest, size)}"
        if fuses_prompts:
            fuses_prompts, reason = _prefers_fused_prompts(measurement, logits.rows(0, 1))
            text += f"; {reason}"
        logger.info("%s", text)
    except DeviceLostError:
        raise
    except _WrongLogits as problem:
        chosen, chosen_nodes, fuses_prompts = 0, 0, False
        logger.warning("the engine decodes: %s", problem)
    except EngineError as error:
        chosen, chosen_nodes, fuses_prompts = 0, 0, False
        logger.warning("the engine decodes: the fused kernels failed: %s", error)
    finally:
        runner.most_fused_rows = runner.most_verified_rows = 0
        device.fill_zero(runner.kv_cache.lengths(range(batch)))
        runner.kv_cache.clear()
        if runner.recurrent is not None:
            runner.recurrent.clear()
    runner.most_fused_rows, runner.most_verified_rows = chosen, chosen_nodes
    runner.fuses_prompts = fuses_prompts


def _prefers_fused_prompts(measurement: _Measurement, logits: Tensor) -> tuple[bool, str]:
    """Return whether the fused kernels compute prompts, and why; logits [1,1,V]."""
    try:
        times = measurement.prompt(logits)
    except DeviceLostError:
        raise
    except (_WrongLogits, EngineError) as problem:
        logger.warning("the fused kernels do not compute prompts: %s", problem)
        return False, "the engine computes prompts"
    return times.fused < times.engine, describe_prompt(times)


def describe(times: list[StepTimes], most_rows: int) -> str:
    """Describe the times of decode steps for the log."""
    chosen = "the engine decodes"
    if most_rows:
        chosen = f"the fused kernels decode batches of up to {most_rows}"
    return f"{chosen} (ms per step of {CONTEXT} tokens of context, {_list(times)})"


def describe_verification(times: list[StepTimes], most_rows: int, size: int) -> str:
    """Describe the times of verifications for the log."""
    chosen = "the engine verifies"
    if most_rows:
        chosen = f"the fused kernels verify batches of up to {most_rows}"
    return f"{chosen} (ms per verification of {size} tokens, {_list(times)})"


def describe_prompt(times: StepTimes) -> str:
    """Describe the times of a prompt for the log."""
    chosen = "fused kernels compute" if times.fused < times.engine else "engine computes"
    return (
        f"the {chosen} prompts (ms per prompt of {times.rows} tokens: {times.fused * 1e3:.3f} fused, "
        f"{times.engine * 1e3:.3f} engine)"
    )


def _list(times: list[StepTimes]) -> str:
    return ", ".join(
        f"batch {each.rows}: {each.fused * 1e3:.3f} fused, {each.engine * 1e3:.3f} engine" for each in times
    )


class _WrongLogits(Exception):
    """The fused kernels' logits are wrong; the text tells how."""


class _Measurement:
    """Measures steps of the engine and of the fused kernels, after CONTEXT KV rows."""

    def __init__(
        self, device: Device, runner: LLMEngineRunner, embedder: InputEmbedder, cuda_graphs: bool
    ) -> None:
        self._device, self._runner, self._embedder = device, runner, embedder
        self._cuda_graphs = cuda_graphs
        self._tokens = np.random.default_rng(SEED)
        self._filled = 0  # rows of the batch that have KV rows

    def compare(
        self,
        sizes: list[int],
        logits_of: Callable[[int], Tensor],
        verification: Verification | None = None,
    ) -> tuple[list[StepTimes], int]:
        """Return times of batch sizes, and the last size before the engine is faster.

        Sizes after the first one that the engine runs faster are not measured. logits_of: the steps' output
        for a batch size. _WrongLogits if the kernels' logits differ from the engine's.
        """
        times: list[StepTimes] = []
        for rows in sizes:
            times.append(self._measure(logits_of(rows), verification))
            if times[-1].fused >= times[-1].engine:
                return times, times[-2].rows if len(times) > 1 else 0
        return times, sizes[-1]

    def _measure(self, logits: Tensor, verification: Verification | None) -> StepTimes:
        device, runner, (rows, size, _) = self._device, self._runner, logits.shape
        while self._filled < rows:
            self._fill(self._filled, logits.shape[2])
            self._filled += 1
        context = min(CONTEXT, runner.kv_cache.capacity) - size
        device.upload(runner.kv_cache.lengths(range(rows)), np.full(rows, context, np.int64))
        step = self._step(self._random_ids(rows, size), logits, verification)
        seconds, results = [], []
        for most in (0, rows * size):
            runner.most_fused_rows = runner.most_verified_rows = most
            device.fill_zero(logits)
            step()
            results.append(device.download(logits))
            seconds.append(_time(device, step, self._cuda_graphs))
        repeated = device.download(logits)
        engine, fused = results
        problem = disagreement(engine, fused, [repeated])
        if problem:
            trees = f" of {size} tokens" if verification is not None else ""
            raise _WrongLogits(f"with {rows} rows{trees} the logits of the fused kernels {problem}")
        return StepTimes(rows, *seconds)

    def prompt(self, logits: Tensor) -> StepTimes:
        """Return the times of a prompt; logits [1,1,V].

        _WrongLogits if the kernels' logits differ from the engine's.
        """
        device, runner = self._device, self._runner
        tokens = min(PROMPT_TOKENS, runner.config.max_supported_input_length, runner.kv_cache.capacity)
        run = self._prompt_run(0, 0, tokens, logits)
        seconds, results = [], []
        for fused in (False, True):
            runner.fuses_prompts = fused
            runner.kv_cache.clear_row(0)
            self._clear_states()
            run()
            results.append(device.download(logits))
            self._clear_states()  # the run has committed those after the prompt
            executor = runner.prefill_executor
            if self._cuda_graphs:
                executor.record(device.stream, "a measured prompt")
            seconds.append(_time(device, partial(executor.execute, device.stream), False))
        engine, fused_logits = results
        problem = disagreement(engine, fused_logits, [device.download(logits)])
        if problem:
            raise _WrongLogits(f"the logits of the fused kernels for a prompt {problem}")
        return StepTimes(tokens, *seconds)

    def _fill(self, row: int, vocabulary: int) -> None:
        """Let the engine compute KV rows of CONTEXT random tokens, in a row of the batch."""
        most = self._runner.config.max_supported_input_length
        count = min(CONTEXT, self._runner.kv_cache.capacity)
        logits = self._device.empty((1, 1, vocabulary), np.float32)
        for start in range(0, count, most):
            self._prompt_run(row, start, min(most, count - start), logits)()

    def _prompt_run(self, row: int, start: int, tokens: int, logits: Tensor) -> Callable[[], None]:
        """Return a function that queues a run of random tokens at the end of a row.

        start: tokens of the row before them. logits [1,1,V]: of the last token.
        """
        device, runner = self._device, self._runner
        embeds, deepstack = self._embedder.embed_prompts(self._random_ids(1, tokens))  # without images
        positions = np.tile(np.arange(start, start + tokens, dtype=np.float32), (1, 3, 1))
        inputs = upload_prompts(device, [tokens], positions, [start])
        is_first = start == 0
        run = PromptRun(tokens, range(row, row + 1), adapters=(), first=(is_first,), continues=not is_first)
        states = [device.empty(embeds.shape, embeds.dtype) for _ in runner.state_layers]

        def queue() -> None:
            runner.execute_prefill_step(
                embeds,
                inputs,
                run,
                deepstack_embeds=deepstack,
                output_logits=logits,
                output_hidden_states=states,
            )

        return queue

    def _random_ids(self, batch: int, tokens: int) -> Tensor:
        """Return token ids [batch,tokens] on the device."""
        size = self._embedder.table.shape[0]
        return on_device(self._device, self._tokens.integers(size, size=(batch, tokens)))

    def _clear_states(self) -> None:
        """Zero the states of recurrent layers, if there are any."""
        if self._runner.recurrent is not None:
            self._runner.recurrent.clear()

    def _step(self, tokens: Tensor, logits: Tensor, verification: Verification | None) -> Callable[[], None]:
        """Return a function that queues a step of tokens [B,S].

        The tokens of a verification are chains.
        """
        runner = self._runner
        embeds = self._embedder.embed_tokens(tokens)
        if verification is None:
            return lambda: runner.execute_vanilla_decoding_step(embeds, logits)
        batch, size = tokens.shape
        depths = np.tile(np.arange(size), (batch, 1))
        chains = (on_device(self._device, each) for each in (depths - 1, depths))
        tree, kernels = DraftTree(tokens, *chains), verification.kernels
        return lambda: runner.execute_tree_decoding_step(embeds, tree, kernels, logits)


def _time(device: Device, step: Callable[[], None], cuda_graphs: bool) -> float:
    """Return the median seconds of a step, which has run before.

    The step is recorded if the device has graphs, and if wanted.
    """
    graph = device.capture(step) if cuda_graphs else None
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
