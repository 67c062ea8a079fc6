# SPDX-License-Identifier: Apache-2.0
"""Opens the application around a runtime."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from edgellm_ros.serving.openai.app import OpenAIApp
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.wire.logprobs import Vocabulary


@contextmanager
def open_app(
    runtime: LLMInferenceRuntime, engine_dir: str | Path, name: str, limits: Limits, token: str = ""
) -> Iterator[OpenAIApp]:
    """Yield the application; at the end its requests are cancelled.

    The runtime stays open. name: of the model. ValueError for an engine that answers with no text.
    """
    # A tokenizer has state while it encodes, and the runtime's works on another thread.
    tokenizer = functools.cache(lambda: Tokenizer(Path(engine_dir) / "tokenizer.json"))

    def encode(text: str) -> Sequence[int]:
        return tokenizer().encode_whole(text)

    vocabulary = Vocabulary(lambda token: tokenizer().token_bytes(token), runtime.config.stop_token_ids)
    app = OpenAIApp(
        runtime.submit,
        runtime.config,
        Models(runtime, name),
        vocabulary=vocabulary,
        encode=encode,
        limits=limits,
        token=token,
    )
    with closing(app):
        yield app
