# SPDX-License-Identifier: Apache-2.0
"""Writes transcripts of sounds with a model for speech, such as Qwen3-ASR."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.transcript import (
    Transcript,
    check_transcribes,
    language_name,
    read_transcript,
    transcription_request,
)


def check_speech_engine(engine_dir: str | Path) -> None:
    """Raise ValueError unless an engine writes transcripts.

    The error names the directory.
    """
    try:
        check_transcribes(EngineConfig.load(engine_dir))
    except ValueError as error:
        raise ValueError(f"{engine_dir}: {error}") from None


class Transcriber:
    """An engine that writes transcripts.

    One thread at a time may transcribe.
    """

    def __init__(self, engine_dir: str | Path, device: str = "cpu", **options: Any) -> None:
        """Open the engine.

        options: further arguments of LLMInferenceRuntime. ValueError for an engine that writes no
        transcripts; OSError or EngineError for one that cannot be loaded.
        """
        check_speech_engine(engine_dir)
        self._runtime = LLMInferenceRuntime(engine_dir, device, **options)

    @property
    def runtime(self) -> LLMInferenceRuntime:
        return self._runtime

    def transcribe(
        self, sound: Sound, language: str = "", context: str = "", cancel: Event | None = None
    ) -> Transcript:
        """Write down what a sound says.

        language: English name or code; "" = the model finds it. context: words that may be said, such as
        names of places and objects. cancel: when set, the transcript ends at the next token. ValueError for
        an unknown language, or a sound that is too long for the engine.
        """
        forced = language_name(language) if language else None
        request = replace(transcription_request([sound], forced, context), cancel=cancel)
        return read_transcript(self._runtime.handle_request(request), self._runtime.config, forced)

    def close(self) -> None:
        """Free the engine; may be called twice."""
        self._runtime.close()

    def __enter__(self) -> Transcriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
