# SPDX-License-Identifier: Apache-2.0
"""Opens the application around a runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.serving.openai.app import OpenAIApp
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.runs import Submit
from edgellm_ros.serving.openai.wire.logprobs import Vocabulary


def model_name(engine_dir: str | Path) -> str:
    """Return the name of a model by that of its folder, or of its GGUF file."""
    return Path(os.path.abspath(engine_dir)).name.removesuffix(".gguf")


@contextmanager
def open_app(
    runtime: LLMInferenceRuntime, name: str, limits: Limits, token: str = "", submit: Submit | None = None
) -> Iterator[OpenAIApp]:
    """Yield the application; at the end its requests are cancelled.

    The runtime stays open. ValueError for an engine that answers with no text.

    - name: of the model
    - submit: gives requests to the runtime; None = `runtime.submit`, with priority 0
    """
    app = OpenAIApp(
        submit or runtime.submit,
        runtime.config,
        Models(runtime, name),
        vocabulary=Vocabulary(
            lambda token: runtime.tokenizer.token_bytes(token), runtime.config.stop_token_ids
        ),
        encode=lambda text: runtime.tokenizer.encode_whole(text),
        limits=limits,
        token=token,
    )
    with closing(app):
        yield app
