# SPDX-License-Identifier: Apache-2.0
"""Answers a few words when a runtime is made.

So a user's first answer is as fast as later ones: pinned buffers, the sampler's kernels and Python's
own caches are made on first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.runtime.stages.recovery import recover_after

if TYPE_CHECKING:
    from edgellm_ros.runtime.pipeline import Pipeline

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
REQUEST = LLMGenerationRequest("hello", sampling=GREEDY)
WITHOUT_TEXT = LLMGenerationRequest(sampling=GREEDY)  # for engines for speech to text
TIMES = 2  # what repeats is recorded then


def answer_in_advance(pipeline: Pipeline, metrics: RuntimeMetrics) -> None:
    """Answer a few words, on devices with graphs; the batch must be empty.

    Neither counters nor the prefix cache change. The log says why nothing could be answered. Plans of
    TensorRT are left out, of which each recorded run takes memory.
    """
    if not pipeline.device.has_graphs or pipeline.runner.prefill_executor.is_plan:
        return
    request = WITHOUT_TEXT if pipeline.config.transcribes else REQUEST
    try:
        for _ in range(TIMES):
            sequences = pipeline.prepare([request], noise_seed=0)
            with metrics.unchanged():
                pipeline.prefill(sequences)
                while pipeline.batch.sequences:
                    pipeline.batch.evict(pipeline.decode())
    except DeviceLostError:
        raise
    except (EngineError, ValueError) as error:
        recover_after(pipeline, error)
        logger.warning("nothing is answered in advance: %s", error)
