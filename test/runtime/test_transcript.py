# SPDX-License-Identifier: Apache-2.0
"""Requests for transcripts, and transcripts of answers.

test/parity compares texts and languages with transformers.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from edgellm_ros.runtime.transcript import (
    LANGUAGES,
    Transcript,
    check_transcribes,
    collapse_repetitions,
    language_name,
    read_transcript,
    transcription_request,
)
from fixtures.qwen3_asr_checkpoint import LAYOUTS, write_qwen3_asr
from fixtures.reference_inputs import make_sound

MARK, STOP = 7, 9
CONFIG = SimpleNamespace(special_tokens=SimpleNamespace(transcript_token_id=MARK), stop_token_ids=(STOP,))
SOUND = Sound(make_sound(0.8, 16000), 16000)


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_asr")
    checkpoint = write_qwen3_asr(folder / "checkpoint", request.param)
    export(checkpoint, folder / "engine", max_input_len=64, max_kv_cache_capacity=192)
    return folder / "engine"


@pytest.fixture(scope="module")
def runtime(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


def answer(text: str, token_ids=(1, 2, 3), logprobs=None) -> SimpleNamespace:
    return SimpleNamespace(text=text, token_ids=list(token_ids), logprobs=logprobs)


@pytest.mark.parametrize(
    ("text", "words", "language"),
    [
        ("language English<asr_text>Go to the dock.", "Go to the dock.", "English"),
        ("language german<asr_text> Fahr los! ", "Fahr los!", "German"),
        ("language None<asr_text>", "", None),
        ("\nlanguage Chinese\nsecond line<asr_text>a<asr_text>b", "a<asr_text>b", "Chinese"),
        ("language Elvish<asr_text>mellon", "mellon", "Elvish"),
        ("language <asr_text>words", "words", "language"),
        ("French<asr_text>mots", "mots", "French"),
        ("<asr_text>words", "words", None),
        ("words without a mark", "words without a mark", None),
        ("", "", None),
    ],
)
def test_text_and_language_of_an_answer(text, words, language):
    assert read_transcript(answer(text), CONFIG) == Transcript(words, language, None)


def test_with_a_forced_language_the_answer_is_the_transcript():
    found = read_transcript(answer(" Go to the dock."), CONFIG, "en")
    assert found == Transcript("Go to the dock.", "English", None)


def test_confidence_is_the_mean_of_the_tokens_between_mark_and_stop_token():
    tokens = [4, MARK, 5, 6, STOP]
    values = [-9.0, -8.0, -0.25, -0.75, -7.0]
    logprobs = [[(1, -0.1), (token, value)] for token, value in zip(tokens, values, strict=True)]
    text = "language English<asr_text>ab"
    assert read_transcript(answer(text, tokens, logprobs), CONFIG).confidence == -0.5
    assert read_transcript(answer(text, tokens[:-1], logprobs[:-1]), CONFIG).confidence == -0.5
    forced = read_transcript(answer("ab", tokens[2:], logprobs[2:]), CONFIG, "English")
    assert forced.confidence == -0.5
    nothing = read_transcript(answer("language None<asr_text>", [4, MARK, STOP], logprobs[:3]), CONFIG)
    assert nothing.confidence is None
    without_mark = read_transcript(answer("ab", [5, 6, STOP], logprobs[2:]), CONFIG)
    assert without_mark.confidence == -0.5


@pytest.mark.parametrize(
    ("text", "collapsed"),
    [
        ("a" * 20 + "b", "a" * 20 + "b"),
        ("a" * 21 + "b", "ab"),
        ("a" * 20 + "b" * 20, "a" + "b" * 20),  # 40 characters: the first run counts as a pattern
        ("x" + "ab" * 19, "x" + "ab" * 19),
        ("x" + "ab" * 20 + "y", "xaby"),
        ("go to the dock. " * 25 + "end", "go to the dock. end"),
        ("\n" * 30, "\n"),
        ("abcdefghijklmnopqrst" * 20, "abcdefghijklmnopqrst"),
        ("abcdefghijklmnopqrstu" * 20, "abcdefghijklmnopqrstu" * 20),
    ],
)
def test_what_is_repeated_endlessly_is_collapsed(text, collapsed):
    assert collapse_repetitions(text) == collapsed


def test_the_languages_are_30_names_and_codes():
    assert len(LANGUAGES) == len(set(LANGUAGES.values())) == 30
    for code, name in LANGUAGES.items():
        assert [language_name(each) for each in (code, name, name.upper(), f" {code} ")] == [name] * 4
    with pytest.raises(ValueError, match=r"^language 'Elvish' is not known; expected one of Arabic \(ar\), "):
        language_name("Elvish")


def test_a_request_has_context_sound_and_the_beginning_of_the_answer(runtime):
    request = transcription_request([SOUND], "de", "forklift")
    (sequence,) = runtime.pipeline.preparer.prepare([request], 0)
    text = runtime.tokenizer.decode(sequence.token_ids, special_tokens=True)
    pads = "<|audio_pad|>" * 10
    assert text == (
        "<|im_start|>system\nforklift<|im_end|>\n"
        f"<|im_start|>user\n<|audio_start|>{pads}<|audio_end|><|im_end|>\n"
        "<|im_start|>assistant\nlanguage german<asr_text>"  # the tests' tokenizer has small letters
    )
    (found,) = runtime.pipeline.preparer.prepare([transcription_request([SOUND])], 0)
    empty = runtime.tokenizer.decode(found.token_ids, special_tokens=True)
    assert empty.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>")
    assert empty.endswith("<|im_start|>assistant\n")


def test_a_transcript_has_the_confidence_of_its_tokens(runtime):
    request = dataclasses.replace(
        transcription_request([SOUND], "en"), sampling=SamplingParams(temperature=0.0, max_tokens=6)
    )
    response = runtime.handle_request(request)
    values = [
        dict(entries)[token] for token, entries in zip(response.token_ids, response.logprobs, strict=True)
    ]
    found = read_transcript(response, runtime.config, "en")
    assert found.language == "English"
    assert found.confidence == pytest.approx(np.mean(values))


def test_text_of_the_user_is_refused(runtime):
    request = LLMGenerationRequest("what is said?", audio=(SOUND,))
    with pytest.raises(ValueError, match=r"reads no text of the user, got 'what is said\?'"):
        runtime.handle_request(request)


def test_a_saved_context_ends_before_the_sounds(runtime):
    context = "forklift and pallets"  # on a GPU no text shorter than a page of 32 tokens is reused
    tokens = runtime.gen_and_save_system_prompt_kv_cache(context)
    request = dataclasses.replace(
        transcription_request([SOUND], context=context), sampling=SamplingParams(max_tokens=2)
    )
    response = runtime.handle_request(request)
    ids = runtime.base_model_input_token_ids[0]
    sound = ids.index(runtime.config.audio_token_id)
    assert tokens == sound - 1  # the prefix without the start of the sound, which prompts of text lack
    assert response.reused_tokens == tokens


def test_a_request_without_sounds_is_refused():
    with pytest.raises(ValueError, match="needs at least one sound, got none"):
        transcription_request([])


def test_an_engine_for_conversations_is_refused(tiny_engine, engine):
    check_transcribes(EngineConfig.load(engine))
    with pytest.raises(ValueError, match=r"\(qwen3_omni_moe_thinker\) writes no transcripts"):
        check_transcribes(EngineConfig.load(tiny_engine))
