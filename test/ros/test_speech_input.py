# SPDX-License-Identifier: Apache-2.0
"""Spoken to the node: utterances on ~/audio and in goals.

The model hears, and has random weights.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk
from rclpy.clock import Clock
from rclpy.logging import get_logger

from edgellm_ros.multimodal.audio.pcm import PcmFormat
from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.settings.hearing import HearingSettings
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.speech_input import SpeechInput, audio_type
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.node_limits import limits
from fixtures.peer import image_message
from fixtures.spoken_commands import PIECE, RATE, recorded_sentence, say

QUIET_S = 0.5
EIGHT_TOKENS = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def node(start_node, peer, tiny_engine):
    """The node, active, with an engine that has an audio encoder."""
    child = start_node(
        engine_dir=tiny_engine, autostart="true", max_input_age=10.0, plan_timeout=30.0, max_tokens=8,
        input_reliability="reliable",
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture
def fresh(node, peer):
    assert peer.transition("deactivate")
    assert peer.transition("activate")
    peer.set_parameter("plan_on", "command")
    peer.connect()
    peer.clear()


@pytest.fixture(scope="module")
def recorded() -> np.ndarray:
    """A sentence with silence around it, as the robot's microphone records it: int16."""
    return recorded_sentence()


def utterance(peer) -> AudioChunk:
    return peer.wait(lambda: peer.received["utterance"], "utterance")[-1]


def generations(peer, count=1):
    return peer.wait(
        lambda: len(peer.received["generation"]) >= count and peer.received["generation"], "plan"
    )


def sound_of(chunk: AudioChunk) -> Sound:
    return Sound(np.frombuffer(chunk.data, "<f4"), chunk.sample_rate)


@pytest.mark.usefixtures("fresh")
class TestOnTopics:
    def test_an_utterance_is_planned_once_with_the_newest_frame(self, peer, scene, recorded):
        frame = peer.frame(scene.pixels)
        peer.listen(0.2)
        say(peer, recorded)
        generation = generations(peer)[0]
        assert generation.header == frame.header
        assert generation.request_id.startswith("utterance-")
        assert generation.audio_latency > 0
        peer.listen(QUIET_S)
        assert len(peer.received["generation"]) == 1

    def test_the_model_gets_the_utterance_that_is_published(self, peer, scene, recorded, tiny_engine):
        peer.frame(scene.pixels)
        peer.listen(0.2)
        say(peer, recorded)
        generation = generations(peer)[0]
        heard = utterance(peer)
        assert (heard.encoding, heard.sample_rate, heard.channels) == ("F32LE", RATE, 1)
        assert 0.5 < sound_of(heard).seconds < len(recorded) / RATE
        with LLMInferenceRuntime(tiny_engine) as runtime:
            response = runtime.handle_request(
                LLMGenerationRequest(
                    "", images=(scene.pixels,), audio=(sound_of(heard),), action_samples=1,
                    sampling=EIGHT_TOKENS,
                )
            )  # fmt: skip
        assert list(generation.token_ids) == response.token_ids
        assert generation.prompt_token_count == response.prompt_tokens

    def test_the_size_of_the_pieces_does_not_matter(self, peer, recorded):
        heard = []
        for piece in (700, PIECE, len(recorded)):
            peer.clear()
            say(peer, recorded, piece)
            heard.append(bytes(utterance(peer).data))
        assert heard[0] == heard[1] == heard[2]

    def test_on_image_an_utterance_stands_until_the_next_command(self, peer, scene, recorded):
        peer.set_parameter("plan_on", "image")
        say(peer, recorded)
        utterance(peer)
        for count in (1, 2):
            frame = peer.frame(scene.pixels)
            generation = generations(peer, count)[-1]
            assert generation.header == frame.header
            assert generation.request_id.startswith("utterance-")
        peer.command("stop")
        assert generations(peer, 3)[-1].request_id.startswith("command-")

    def test_a_newer_utterance_preempts(self, peer, scene, recorded):
        before = peer.metrics()
        peer.frame(scene.pixels)
        peer.listen(0.2)
        say(peer, np.concatenate([recorded, recorded]), piece=10 * RATE)
        generations(peer)
        peer.wait(lambda: peer.metrics()["jobs_pending"] == 0, "end of the plans")
        after = peer.metrics()
        for name, count in (("utterances", 2), ("plans_preempted", 1), ("plans_completed", 1)):
            assert after[name] == before[name] + count, name

    def test_silence_and_noise_are_nothing_to_plan(self, peer, scene):
        before = peer.metrics()
        peer.frame(scene.pixels)
        noise = np.clip(1e5 * np.random.default_rng(0).standard_normal(5 * RATE), -32768, 32767)
        for samples in (np.zeros(5 * RATE), noise):
            say(peer, samples.astype("<i2"))
        peer.wait(lambda: peer.metrics()["audio_received"] == before["audio_received"] + 100, "sound")
        peer.listen(QUIET_S)
        assert not peer.received["generation"]
        assert peer.metrics()["utterances"] == before["utterances"]

    def test_an_endless_sound_is_one_utterance_of_the_longest_length(self, peer, recorded):
        peer.set_parameter("utterance.max_length", 1.0)
        before = peer.metrics()
        endless = np.tile(recorded[RATE // 2 : -int(1.3 * RATE)], 8)
        say(peer, endless)
        peer.wait(
            lambda: peer.metrics()["audio_received"] - before["audio_received"] >= len(endless) // PIECE,
            "all of the sound",
        )
        peer.set_parameter("utterance.max_length", 10.0)
        after = peer.metrics()
        assert after["utterances_cut"] == before["utterances_cut"] + 1
        assert sound_of(utterance(peer)).seconds <= 1.0

    def test_a_microphone_that_falls_silent_during_speech_is_noticed(self, peer, scene, recorded):
        peer.set_parameter("max_input_age", 1.0)
        say(peer, recorded[: -int(1.2 * RATE)], end_s=2.0)
        peer.listen(QUIET_S)
        assert not peer.received["utterance"]
        peer.frame(scene.pixels)
        peer.listen(0.2)
        frame = peer.frame(scene.pixels)
        peer.set_parameter("max_input_age", 10.0)
        assert generations(peer)[0].header == frame.header

    def test_what_is_heard_too_late_is_refused(self, peer, scene, recorded):
        before = peer.metrics()["utterances_stale"]
        peer.frame(scene.pixels)
        say(peer, recorded, end_s=60.0)
        peer.wait(lambda: peer.metrics()["utterances_stale"] == before + 1, "refusal")
        assert "limit 10 s (parameter max_input_age)" in peer.status("inputs").message
        assert not peer.received["generation"]


BAD_PIECES = {
    "odd bytes": ({"data": b"123"}, "sound has 3 bytes, not a multiple of 2"),
    "unknown encoding": ({"encoding": "MP3"}, "sound encoding 'MP3' is not supported"),
    "zero rate": ({"sample_rate": 0}, "sample_rate must be from 4000 to 192000 Hz, got 0"),
    "six channels": ({"channels": 6}, "channels must be 1 (mono) or 2 (stereo), got 6"),
    "NaN": ({"encoding": "F32LE", "data": np.float32([0, np.nan]).tobytes()}, "F32LE sound must be finite"),
    "ten minutes": ({"data": bytes(600 * 2 * RATE)}, "a chunk of at most 30 s of sound, got 600.0 s"),
}


@pytest.mark.usefixtures("fresh")
class TestBadSound:
    @pytest.mark.parametrize("name", BAD_PIECES)
    def test_is_named_counted_and_the_next_utterance_is_heard(self, peer, recorded, name):
        fields, message = BAD_PIECES[name]
        before = peer.metrics()["audio_refused"]
        peer.sound(**{"data": b"12", **fields})
        peer.wait(lambda: peer.metrics()["audio_refused"] == before + 1, "refusal")
        status = peer.status("inputs")
        assert message in status.message
        assert status.level == status.WARN
        say(peer, recorded)
        assert utterance(peer)

    def test_a_rate_that_changes_within_a_stream(self, peer, recorded):
        say(peer, recorded[:RATE])
        peer.sound(bytes(800), peer.now(), sample_rate=8000)
        message = peer.wait(lambda: "changed" in (m := peer.status("inputs").message) and m, "diagnostics")
        assert "the format changed within the stream from S16LE at 16000 Hz" in message


@pytest.fixture
def goal(scene, recorded):
    return Plan.Goal(
        images=[image_message(scene.pixels)],
        audio=[AudioChunk(encoding="S16LE", sample_rate=RATE, data=recorded.tobytes())],
    )


def bad_audio(**fields):
    def spoil(goal):
        for name, value in fields.items():
            setattr(goal.audio[0], name, value)

    return spoil


def two_formats(goal):
    goal.audio = [*goal.audio, AudioChunk(encoding="S16LE", sample_rate=8000, data=b"12")]


BAD_GOALS = {
    "odd bytes": (bad_audio(data=b"123"), "sound has 3 bytes, not a multiple of 2"),
    "unknown encoding": (bad_audio(encoding="MP3"), "sound encoding 'MP3' is not supported"),
    "two formats": (two_formats, "chunk 1 is S16LE at 8000 Hz"),
    "empty": (bad_audio(data=b""), "the sound is empty"),
    "ten minutes": (bad_audio(data=bytes(600 * 2 * RATE)), "a sound of 600.00 s becomes"),
}


@pytest.mark.usefixtures("node")
class TestGoals:
    def test_a_spoken_goal_is_planned_as_in_process(self, peer, goal, scene, recorded, tiny_engine):
        whole = peer.plan(goal)
        assert whole.termination_reason == Plan.Result.COMPLETED, whole.message
        with LLMInferenceRuntime(tiny_engine) as runtime:
            sound = Sound(recorded.astype(np.float32) / np.float32(32768), RATE)
            response = runtime.handle_request(
                LLMGenerationRequest(
                    "", images=(scene.pixels,), audio=(sound,), action_samples=1, sampling=EIGHT_TOKENS
                )
            )
        assert list(whole.generation.token_ids) == response.token_ids

    def test_one_sound_may_come_in_pieces(self, peer, goal, recorded):
        whole = peer.plan(goal)
        goal.audio = [
            AudioChunk(encoding="S16LE", sample_rate=RATE, data=recorded[start : start + 7000].tobytes())
            for start in range(0, len(recorded), 7000)
        ]
        pieces = peer.plan(goal)
        assert pieces.generation.token_ids == whole.generation.token_ids
        assert pieces.generation.prompt_token_count == whole.generation.prompt_token_count

    @pytest.mark.parametrize("name", BAD_GOALS)
    def test_bad_sound_ends_with_a_clear_error_and_the_node_goes_on(self, peer, goal, name):
        good = list(goal.audio[0].data)
        spoil, message = BAD_GOALS[name]
        spoil(goal)
        result = peer.plan(goal)
        assert result.termination_reason == Plan.Result.ERROR
        assert message in result.message
        goal.audio = [AudioChunk(encoding="S16LE", sample_rate=RATE, data=good)]
        assert peer.plan(goal).termination_reason == Plan.Result.COMPLETED


class TestAudioCommonMsgs:
    """Without the package itself, which PyPI does not have: messages with its fields."""

    @pytest.fixture
    def speech(self):
        published = []
        parameters = SimpleNamespace(
            utterance=UtteranceSettings(),
            audio_data=PcmFormat("S16LE", RATE, 1),
            max_input_age=1.0,
            limits=limits(message_bytes=10**6),
        )
        node = SimpleNamespace(get_clock=Clock, get_logger=lambda: get_logger("test_speech_input"))
        outputs = SimpleNamespace(publish_utterance=published.append)
        made = SpeechInput(node, LiveParameters(parameters), VoiceActivity(), outputs, NodeMetrics())
        made.published = published
        return made

    def test_audio_data_is_read_as_the_parameters_say(self, speech, recorded):
        commands = speech.on_message(SimpleNamespace(data=recorded.tobytes()))
        assert len(commands) == len(speech.published) == 1
        assert to_nanoseconds(speech.published[0].header.stamp) == 0

    def test_audio_data_stamped_brings_its_time(self, speech, recorded):
        now = Clock().now().nanoseconds
        message = SimpleNamespace(
            header=SimpleNamespace(stamp=to_time(now - len(recorded) * 10**9 // RATE)),
            audio=SimpleNamespace(data=recorded.tobytes()),
        )
        (command,) = speech.on_message(message)
        stamp = to_nanoseconds(speech.published[0].header.stamp)
        assert now - 10**10 < stamp < now - command.sound.seconds * 1e9

    def test_a_chunk_beyond_the_limit_drops_the_utterance(self, speech, recorded):
        speech.on_message(SimpleNamespace(data=recorded[: len(recorded) // 2].tobytes()))
        assert speech.on_message(SimpleNamespace(data=bytes(10**6 + 2))) == []
        assert speech.problem == (
            "the chunk has 1000002 bytes of data, at most 1000000 are taken (parameter limits.message_bytes)"
        )
        assert speech.on_message(SimpleNamespace(data=b"")) == []  # the end of the stream
        assert len(speech.on_message(SimpleNamespace(data=recorded.tobytes()))) == 1

    def test_that_it_is_not_installed_is_said(self):
        with pytest.raises(ValueError, match="audio_common_msgs is not installed"):
            audio_type("audio_data")
        assert audio_type("chunk") is AudioChunk


class LoudIsSpeech:
    """A voice detector for which all sound that is not silence is speech."""

    def reset(self) -> None:
        pass

    def probability(self, frame: np.ndarray) -> float:
        return float(frame.any())


class TestSpeechInProgress:
    @pytest.fixture
    def listener(self):
        heard = SimpleNamespace(idle=True, followed=[], added=[])
        heard.follow, heard.add = heard.followed.append, heard.added.append
        return heard

    @pytest.fixture
    def speech(self, listener):
        parameters = SimpleNamespace(
            utterance=UtteranceSettings(),
            hearing=HearingSettings(partial_interval=0.5),
            audio_data=PcmFormat("S16LE", RATE, 1),
            max_input_age=1.0,
            limits=limits(message_bytes=10**6),
        )
        node = SimpleNamespace(get_clock=Clock, get_logger=lambda: get_logger("test_speech_input"))
        outputs = SimpleNamespace(publish_utterance=lambda message: None)
        return SpeechInput(
            node, LiveParameters(parameters), LoudIsSpeech(), outputs, NodeMetrics(), listener=listener
        )

    def send(self, speech: SpeechInput, seconds: float, level: int) -> None:
        for _ in range(round(seconds * 10)):
            speech.on_message(SimpleNamespace(data=np.full(RATE // 10, level, "<i2").tobytes()))

    def test_it_is_followed_each_time_that_there_is_an_interval_more(self, speech, listener):
        self.send(speech, 1.8, 1000)
        lengths = [each.sound.seconds for each in listener.followed]
        assert len(lengths) == 3
        assert all(0.5 <= later - earlier < 0.7 for earlier, later in pairwise([0.0, *lengths]))

    def test_it_is_not_followed_while_the_engine_is_busy(self, speech, listener):
        listener.idle = False
        self.send(speech, 1.8, 1000)
        assert not listener.followed

    def test_the_next_utterance_is_followed_from_its_begin_also_if_the_engine_was_busy(
        self, speech, listener
    ):
        self.send(speech, 3.0, 1000)
        listener.idle = False
        self.send(speech, 1.2, 0)
        assert len(listener.added) == 1
        self.send(speech, 0.3, 1000)
        listener.idle, listener.followed[:] = True, []
        self.send(speech, 0.5, 1000)
        assert [round(each.sound.seconds) for each in listener.followed] == [1]
