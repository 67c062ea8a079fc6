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
from edgellm_ros.runtime.request import LLMGenerationResponse
from edgellm_ros.runtime.transcript import (
    Transcript,
    check_transcribes,
    read_transcript,
    transcription_request,
)


def speech_engine_config(engine_dir: str | Path) -> EngineConfig:
    """Return the configuration of an engine that writes transcripts.

    ValueError, which names the directory, for another engine.
    """
    try:
        config = EngineConfig.load(engine_dir)
        check_transcribes(config)
    except ValueError as error:
        raise ValueError(f"{engine_dir}: {error}") from None
    return config


class Transcriber:
    """An engine that writes transcripts.

    One thread at a time may transcribe.
    """

    def __init__(self, engine_dir: str | Path, device: str = "cpu", **options: Any) -> None:
        """Open the engine.

        options: further arguments of LLMInferenceRuntime. ValueError for an engine that writes no
        transcripts; OSError or EngineError for one that cannot be loaded.
        """
        speech_engine_config(engine_dir)
        self._runtime = LLMInferenceRuntime(engine_dir, device, **options)

    @classmethod
    def on(cls, runtime: LLMInferenceRuntime) -> Transcriber:
        """Return a transcriber on an open runtime of such an engine, which it closes."""
        transcriber = cls.__new__(cls)
        transcriber._runtime = runtime
        return transcriber

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
        return self.answer(sound, language, context, cancel)[0]

    def answer(
        self, sound: Sound, language: str = "", context: str = "", cancel: Event | None = None
    ) -> tuple[Transcript, LLMGenerationResponse]:
        """Do as `transcribe`; return the engine's answer too, with its times."""
        request = replace(transcription_request([sound], language or None, context), cancel=cancel)
        response = self._runtime.handle_request(request)
        return read_transcript(response, self._runtime.config, language or None), response

    def close(self) -> None:
        """Free the engine; may be called twice."""
        self._runtime.close()

    def __enter__(self) -> Transcriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
