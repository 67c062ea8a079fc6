# SPDX-License-Identifier: Apache-2.0
"""Speech to text: requests for a transcript, and transcripts of answers.

  answer    language English<asr_text>Go to the dock.     or, with a language that the request forces,
  answer    Go to the dock.

The after-processing is that of the published model code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.tokenizer_file import TRANSCRIPT_MARK
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.conversation import ASSISTANT, USER, AudioPart, Message
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.sampling_params import SamplingParams

MAX_TOKENS = 512  # of an answer, as in the published code
LANGUAGES = {  # code -> the name that the model writes and reads
    "ar": "Arabic",
    "yue": "Cantonese",
    "zh": "Chinese",
    "cs": "Czech",
    "da": "Danish",
    "nl": "Dutch",
    "en": "English",
    "fil": "Filipino",
    "fi": "Finnish",
    "fr": "French",
    "de": "German",
    "el": "Greek",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "fa": "Persian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "es": "Spanish",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
_BY_NAME = {each.lower(): name for code, name in LANGUAGES.items() for each in (code, name)}
NO_SPEECH = "none"  # in place of a language
SAME_CHARACTERS = re.compile(r"(.)\1{20,}", re.DOTALL)
# A pattern of up to 20 characters, repeated 20 times or more. Where fewer than 40 characters follow, the
# published code no longer looks for patterns.
SAME_PATTERNS = re.compile(r"(?=.{40})(.{1,20}?)\1{19,}", re.DOTALL)


@dataclass(frozen=True)
class Transcript:
    """What a sound says.

    confidence: mean of the natural log-probabilities of the transcript's tokens, those after the mark and
    before the stop token, each among all tokens and before sampling rules; 0 is certainty. It is not
    calibrated. None without tokens, or if the request had no logprobs.
    """

    text: str  # without white space around it; "" if the model hears no speech
    language: str | None  # English name, forced or as the model writes it; None = no speech, or not written
    confidence: float | None


def check_transcribes(config: EngineConfig) -> None:
    """Raise ValueError unless an engine writes transcripts."""
    if not config.transcribes:
        raise ValueError(
            f"this engine ({config.model_type}) writes no transcripts, expected a model for speech to text, "
            "such as Qwen3-ASR"
        )


def language_name(given: str) -> str:
    """Return the name of a language, given its English name or code in any case.

    ValueError lists the languages.
    """
    name = _BY_NAME.get(given.strip().lower())
    if name is None:
        known = ", ".join(f"{name} ({code})" for code, name in LANGUAGES.items())
        raise ValueError(f"language {quoted(given)} is not known; expected one of {known}")
    return name


def transcription_request(
    sounds: Sequence[Sound], language: str | None = None, context: str = ""
) -> LLMGenerationRequest:
    """Make the request for one transcript of sounds, one after the other.

    language: name or code; None = the model finds it. context: words that may be said, such as names of
    places and objects, which the model then writes more readily. ValueError without sounds, and for an
    unknown language.
    """
    if not sounds:
        raise ValueError("a transcript needs at least one sound, got none")
    messages = [Message("system", context)] if context else []
    messages.append(Message(USER, tuple(map(AudioPart, sounds))))
    if language is not None:
        messages.append(Message(ASSISTANT, f"language {language_name(language)}{TRANSCRIPT_MARK}"))
    return LLMGenerationRequest(
        messages=tuple(messages),
        continue_final_message=language is not None,
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        logprobs=1,
    )


def read_transcript(
    response: LLMGenerationResponse, config: EngineConfig, language: str | None = None
) -> Transcript:
    """Read the transcript of an answer.

    language: as in the request. An answer without the mark is a transcript as a whole.
    """
    forced = None if language is None else language_name(language)
    tokens = response.token_ids
    end = len(tokens) - (bool(tokens) and tokens[-1] in config.stop_token_ids)
    mark = config.special_tokens.transcript_token_id
    start = tokens.index(mark) + 1 if forced is None and mark in tokens else 0
    confidence = None
    if response.logprobs is not None and start < end:
        chosen = zip(tokens[start:end], response.logprobs[start:end], strict=True)
        confidence = sum(dict(entries)[token] for token, entries in chosen) / (end - start)
    answer = response.text.strip()
    text, found = (answer, forced) if forced is not None else split_answer(answer)
    return Transcript(collapse_repetitions(text).strip(), found, confidence)


def collapse_repetitions(text: str) -> str:
    """Collapse what a model repeats endlessly.

    A character that occurs more than 20 times in a row remains once, and so does a pattern of up to 20
    characters that is repeated 20 times or more.
    """
    return SAME_PATTERNS.sub(r"\1", SAME_CHARACTERS.sub(r"\1", text))


def split_answer(answer: str) -> tuple[str, str | None]:
    """Return text and language of an answer that begins with the language."""
    before, mark, text = answer.partition(TRANSCRIPT_MARK)
    if not mark:
        return answer, None
    line = next((line.strip() for line in before.splitlines() if line.strip()), "")
    name = line[len("language ") :].strip() if line.lower().startswith("language ") else line
    return text, None if name.lower() in ("", NO_SPEECH) else _BY_NAME.get(name.lower(), name)
