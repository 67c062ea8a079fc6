# SPDX-License-Identifier: Apache-2.0
"""A node with a speech engine: what is said becomes a typed command.

Both models have random weights: the words are arbitrary, but they are the same for the same sound.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr
from fixtures.spoken_commands import RATE, recorded_sentence, say

EIGHT_TOKENS = SamplingParams(max_tokens=8)
QUIET_S = 0.5


@pytest.fixture(scope="module")
def speech_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    export(write_qwen3_asr(folder / "checkpoint", ORIGINAL, seed=9), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module", autouse=True)
def node(start_node, peer, tiny_engine, speech_engine):
    child = start_node(
        engine_dir=tiny_engine, speech_engine_dir=speech_engine, autostart="true", max_input_age=10.0,
        plan_timeout=30.0, max_tokens=8, input_reliability="reliable", **{
            "hearing.min_confidence": -100.0, "hearing.max_letters_per_second": 1000.0,
            "hearing.language": "en",
        },
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(scope="module")
def recorded() -> np.ndarray:
    """A sentence with silence around it, as the robot's microphone records it: int16."""
    return recorded_sentence()


def test_an_utterance_is_planned_as_the_words_of_its_transcript(
    peer, scene, recorded, tiny_engine, speech_engine
):
    peer.clear()
    frame = peer.frame(scene.pixels)
    peer.listen(0.2)
    say(peer, recorded)
    generation = peer.wait(lambda: peer.received["generation"], "plan")[0]
    (message,) = peer.received["transcript"]
    heard = peer.received["utterance"][-1]
    sound = Sound(np.frombuffer(heard.data, "<f4"), heard.sample_rate)
    with Transcriber(speech_engine) as transcriber:
        expected = transcriber.transcribe(sound, "English")
    assert (message.text, message.language, message.final) == (expected.text, "English", True)
    assert message.confidence == pytest.approx(expected.confidence, abs=1e-5)
    assert message.command == expected.text
    assert not message.reason
    assert message.header.stamp == heard.header.stamp
    with LLMInferenceRuntime(tiny_engine) as runtime:
        answer = runtime.handle_request(
            LLMGenerationRequest(
                expected.text.strip(), images=(scene.pixels,), action_samples=1, sampling=EIGHT_TOKENS
            )
        )
    assert list(generation.token_ids) == answer.token_ids
    assert generation.header == frame.header
    assert generation.request_id.startswith("command-")


def test_unsure_words_are_published_and_not_planned(peer, scene, recorded):
    assert peer.set_parameter("hearing.min_confidence", -0.001).successful
    peer.clear()
    peer.frame(scene.pixels)
    peer.listen(0.2)
    say(peer, recorded)
    message = peer.wait(lambda: peer.received["transcript"], "transcript")[0]
    assert message.text
    assert not message.command
    assert message.reason.startswith("unsure")
    peer.listen(QUIET_S)
    assert not peer.received["generation"]
    assert peer.set_parameter("hearing.min_confidence", -100.0).successful


def test_speech_in_progress_is_transcribed_and_not_planned(peer, scene, recorded):
    assert peer.set_parameter("hearing.partial_interval", 0.3).successful
    peer.clear()
    peer.frame(scene.pixels)
    say(peer, recorded[: RATE * 3 // 2])
    message = peer.wait(lambda: peer.received["transcript"], "partial transcript")[0]
    assert not message.final
    assert not message.command
    assert message.text
    peer.listen(QUIET_S)
    assert not peer.received["generation"]
    assert peer.set_parameter("hearing.partial_interval", 0.0).successful
    peer.sound(b"")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hearing.language", "Klingon", "language 'Klingon' is not known"),
        ("hearing.wake_word", "?", "wake_word must"),
    ],
)
def test_parameters_without_a_meaning_are_refused(peer, name, value, message):
    result = peer.set_parameter(name, value)
    assert not result.successful
    assert message in result.reason
