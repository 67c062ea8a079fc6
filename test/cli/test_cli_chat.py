# SPDX-License-Identifier: Apache-2.0
"""`edgellm chat`: turns from a pipe and in a terminal, commands, and Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys

import pytest
import soundfile

from edgellm_ros.builder import export
from edgellm_ros.cli import chat
from edgellm_ros.echo import printable
from edgellm_ros.hearing.transcriber import Transcriber
from edgellm_ros.io.image_file import read_image
from edgellm_ros.io.sound_file import read_sound
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr
from fixtures.reference_inputs import make_sound

TOKENS = ("--max-tokens", 6)


@pytest.fixture
def talk(edgellm, tiny_engine, monkeypatch):
    """`talk(lines...)`: the chat with these lines of standard input."""

    def run(*lines: str, options: tuple = (), engine=tiny_engine):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return edgellm("chat", engine, *TOKENS, *options)

    return run


@pytest.fixture(scope="module")
def runtime(tiny_engine, runtime_device):
    with LLMInferenceRuntime(tiny_engine, runtime_device) as runtime:
        yield runtime


def answer(runtime, *messages: Message, **parameters) -> str:
    one = LLMGenerationRequest(messages=messages, sampling=SamplingParams(max_tokens=6), **parameters)
    return runtime.handle_request(one).text


def user(*content) -> Message:
    return Message("user", content[0] if len(content) == 1 else content)


def said(text: str) -> Message:
    return Message("assistant", text)


def test_each_line_is_answered_with_all_turns_before_it(talk, runtime):
    first = answer(runtime, user("hello"))
    second = answer(runtime, user("hello"), said(first), user("and now?"))
    told = talk("hello", "", "and now?")
    assert (told.code, told.out, told.err) == (0, f"{first}\n{second}\n", "")


def test_images_and_sounds_go_before_the_next_line(talk, runtime, image, tmp_path):
    soundfile.write(tmp_path / "a b.wav", make_sound(1.0, 16000), 16000, subtype="FLOAT")
    parts = ImagePart(read_image(image)), AudioPart(read_sound(tmp_path / "a b.wav", 9))
    first = answer(runtime, user(*parts, TextPart("what?")))
    second = answer(runtime, user(*parts, TextPart("what?")), said(first), user("why?"))
    told = talk(f"/image {image}", f"/audio {tmp_path / 'a b.wav'}", "what?", "why?")
    assert told.out == f"{first}\n{second}\n"


def test_images_and_sounds_are_acknowledged_with_name_and_size(talk, image, tmp_path):
    soundfile.write(tmp_path / "a b.wav", make_sound(1.0, 16000), 16000, subtype="FLOAT")
    told = talk(f"/image {image}", f"/audio {tmp_path / 'a b.wav'}")
    assert (told.out, told.err) == ("", "image: frame.png, 128x96\nsound: a b.wav, 1.0 s\n")


def test_a_sound_alone_is_a_message_after_an_empty_line(talk, runtime, tmp_path):
    soundfile.write(tmp_path / "a.wav", make_sound(1.0, 16000), 16000, subtype="FLOAT")
    sound = AudioPart(read_sound(tmp_path / "a.wav", 9))
    assert talk(f"/audio {tmp_path / 'a.wav'}", "").out == answer(runtime, Message("user", [sound])) + "\n"


def test_the_system_prompt_survives_a_reset(talk, runtime):
    system = Message("system", "be brief")
    first, second = answer(runtime, system, user("hello")), answer(runtime, system, user("bye"))
    assert talk("/system be brief", "hello", "/reset", "bye").out == f"{first}\n{second}\n"
    assert talk("hello", options=("--system", "be brief")).out == f"{first}\n"


def test_quit_ends_the_chat(talk):
    assert talk("/quit", "hello").out == ""


def test_two_slashes_begin_a_message_with_one(talk, runtime):
    assert talk("//quit").out == answer(runtime, user("/quit")) + "\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/dance", "error: unknown command '/dance'; /help shows the commands"),
        ("/image", "error: /image needs a file"),
        ("/image no.png", "error: no.png: no such file"),
        ("x" * 500, "this engine takes at most 447 (max_kv_cache_capacity)"),
    ],
)
def test_a_wrong_line_is_reported_and_the_chat_goes_on(talk, runtime, line, words):
    told = talk(line, "hello")
    assert (told.code, told.out) == (0, answer(runtime, user("hello")) + "\n")
    assert words in told.err
    assert len(told.err.splitlines()) == 1


def test_a_sound_for_an_engine_without_ears_is_reported(talk, engine_without_audio, tmp_path):
    soundfile.write(tmp_path / "a.wav", make_sound(1.0, 16000), 16000)
    told = talk(f"/audio {tmp_path / 'a.wav'}", engine=engine_without_audio)
    assert "has no audio encoder" in told.err


def test_help_shows_every_command(talk):
    shown = talk("/help").err
    assert all(name in shown for name in chat.COMMANDS)


def test_wrong_options_are_refused_before_the_first_line(talk):
    told = talk("hello", options=("--lora", "polite"))
    assert told.code == 2
    assert "no such adapter" in told.err


def test_ctrl_c_ends_the_answer_and_not_the_chat(talk, runtime, monkeypatch):
    whole = answer(runtime, user("hello"))

    class Interrupted(chat.Streamer):
        interrupted = False

        def __call__(self, progress):
            super().__call__(progress)
            if progress.tokens == 3 and not Interrupted.interrupted:
                Interrupted.interrupted = True
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "Streamer", Interrupted)
    told = talk("hello", "and now?")
    assert told.code == 0
    cut = told.out.splitlines()[0]
    assert len(cut) < len(whole.splitlines()[0])
    assert told.out == f"{cut}\n{answer(runtime, user('hello'), said(cut), user('and now?'))}\n"


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="a process of its own")
def test_a_terminal_shows_a_prompt_and_ctrl_d_ends_the_chat(tiny_engine, runtime):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "edgellm_ros", "chat", str(tiny_engine), *map(str, TOKENS)]
    child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(theirs)
    os.write(ours, b"hello\n\x04")
    out, err = child.communicate(timeout=60)
    os.close(ours)
    assert (child.returncode, err) == (0, b"")
    assert out.count(chat.PROMPT.encode()) == 2
    assert answer(runtime, user("hello")) in out.decode()


@pytest.fixture(scope="module")
def speech_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    export(write_qwen3_asr(folder / "checkpoint", ORIGINAL, seed=9), folder / "engine")
    return folder / "engine"


@pytest.mark.only_on("cpu", reason="the speech engine is opened on the same device")
def test_with_a_speech_engine_the_words_of_a_sound_are_a_line(talk, runtime, speech_engine, tmp_path):
    path = tmp_path / "voice.wav"
    soundfile.write(path, make_sound(1.0, 16000), 16000)
    with Transcriber(speech_engine) as transcriber:
        words = transcriber.transcribe(read_sound(path, 30.0)).text
    told = talk(f"/audio {path}", options=("--speech-engine", speech_engine))
    assert told.out == f"{answer(runtime, user(words))}\n"
    assert f"heard: {printable(words)}\n" in told.err


def test_an_engine_that_writes_no_transcripts_is_refused_as_a_speech_engine(talk, tiny_engine):
    told = talk("hello", options=("--speech-engine", tiny_engine))
    assert told.code == 2
    assert f"{tiny_engine}: this engine" in told.err
    assert "writes no transcripts" in told.err
