# SPDX-License-Identifier: Apache-2.0
"""Opens the application around a runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.serving.openai.app import OpenAIApp
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.wire.logprobs import Vocabulary


@contextmanager
def open_app(runtime: LLMInferenceRuntime, name: str, limits: Limits, token: str = "") -> Iterator[OpenAIApp]:
    """Yield the application; at the end its requests are cancelled.

    The runtime stays open. name: of the model. ValueError for an engine that answers with no text.
    """
    app = OpenAIApp(
        runtime.submit,
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
