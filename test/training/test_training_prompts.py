# SPDX-License-Identifier: Apache-2.0
"""Prompts as training writes them are those of the runtime; no PyTorch needed."""

from __future__ import annotations

from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from training.data import IMAGE_SHAPE, SequenceWriter, training_situations
from training.spec import SYSTEM_PROMPTS
from training.styles import PLAIN

STANDS = np.zeros((8, 2))
BARELY_BACK = np.linspace(7e-9, 0, 8)[:, None] * [1, 0]  # another bin than that of a robot that stands


def test_prompts_have_the_tokens_of_the_runtime(arena_engine):
    writer = SequenceWriter(Tokenizer.from_file(str(arena_engine / "tokenizer.json")))
    moments = [(each.command.text, each.history) for each in islice(training_situations(3, PLAIN), 20)]
    moments += [("stop", STANDS), ("stop", BARELY_BACK)]
    written = [writer.prompt(text, history, SYSTEM_PROMPTS[0]).ids for text, history in moments]
    image = np.zeros(IMAGE_SHAPE, np.uint8)
    with LLMInferenceRuntime(arena_engine) as runtime:
        for (text, history), ids in zip(moments, written, strict=True):
            request = LLMGenerationRequest(text, SYSTEM_PROMPTS[0], images=(image,), history=history)
            assert runtime.pipeline.prepare([request], 0)[0].token_ids == ids
    assert written[-1] != written[-2]
