# SPDX-License-Identifier: Apache-2.0
"""What is reset after a failure: some rows, or all state of the batch.

Queued work must be complete before its memory is used again. Values that are not finite may come from KV rows
of an earlier prompt, so an EngineError also clears the prefix cache. The rows of sounds that were kept may be
those of an encoder that was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.batch.sequence import GenerationSequence

if TYPE_CHECKING:
    from edgellm_ros.runtime.pipeline import Pipeline


def recover_after(pipeline: Pipeline, error: BaseException) -> None:
    """Reset all state of the batch after a failure."""
    with suppress(EngineError):  # `error` itself, or a consequence
        pipeline.device.synchronize()
    with suppress(DeviceLostError):  # the device is not used again
        pipeline.batch.clear()
        pipeline.runner.kv_cache.clear()
        if pipeline.runner.recurrent is not None:
            pipeline.runner.recurrent.clear()
        if pipeline.drafter is not None:
            for row in range(pipeline.batch.max_size):
                pipeline.drafter.clear_row(row)
        pipeline.device.synchronize()
    _forget_results(pipeline, error)


def drop_after(pipeline: Pipeline, sequences: Sequence[GenerationSequence], error: BaseException) -> None:
    """Reset the state of these sequences after their failure, and free their rows.

    Other sequences of the batch are not changed, if they had no part in what failed. EngineError if the
    device fails; then the batch needs `recover_after`.
    """
    with suppress(EngineError):
        pipeline.device.synchronize()
    gone = [sequence for sequence in sequences if sequence in pipeline.batch.sequences]
    recurrent = pipeline.runner.recurrent
    if recurrent is not None:
        recurrent.forget_verified()
    for row in map(pipeline.batch.row_of, gone):  # NaN must not stay in slots that another row moves to
        pipeline.runner.kv_cache.clear_row(row)
        if pipeline.drafter is not None:
            pipeline.drafter.clear_row(row)
        if recurrent is not None:
            recurrent.clear_row(row)
    pipeline.batch.evict(gone)
    pipeline.device.synchronize()
    _forget_results(pipeline, error)


def _forget_results(pipeline: Pipeline, error: BaseException) -> None:
    if pipeline.audio is not None:
        pipeline.audio.forget()
    if isinstance(error, EngineError):
        pipeline.reuse.clear()
