# SPDX-License-Identifier: Apache-2.0
"""Images and sounds in JSON files as OpenAI's chat API writes them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import soundfile

from edgellm_ros.cli.requests.request_files import read_conversation, read_request_list, request_fields
from edgellm_ros.io.sound_file import read_sound
from edgellm_ros.messages.content_parts import FileReaders
from fixtures.reference_inputs import make_sound
from fixtures.refusal import assert_refused

READERS = FileReaders(lambda source: read_sound(source, 30), None)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
PNG = cv2.imencode(".png", PIXELS[..., ::-1])[1].tobytes()
SAMPLES = make_sound(0.5, 16000)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def sound_file(kind: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES, 16000, format=kind)
    return file.getvalue()


def talk(folder: Path, part: Any) -> Path:
    """Write a conversation whose third message has this part after a text."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    asked = {"role": "user", "content": [{"type": "text", "text": "look"}, part]}
    path = folder / "talk.json"
    path.write_text(json.dumps([*said, asked]))
    return path


def read(folder: Path, part: Any) -> Any:
    return read_conversation(talk(folder, part), READERS)["messages"][2].content[1]


@pytest.mark.parametrize("form", ["name", "path", "file", "localhost", "data"])
def test_an_image_url_is_a_file_or_a_data_url(tmp_path, form):
    (tmp_path / "a frame.png").write_bytes(PNG)
    url = {
        "name": "a frame.png",
        "path": str(tmp_path / "a frame.png"),
        "file": f"file://{tmp_path}/a%20frame.png",
        "localhost": f"file://localhost{tmp_path}/a%20frame.png",
        "data": f"data:image/png;base64,{text(PNG)}",
    }[form]
    part = read(tmp_path, {"type": "image_url", "image_url": {"url": url, "detail": "high"}})
    np.testing.assert_array_equal(part.image, PIXELS)


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
def test_an_input_audio_is_a_sound_file_in_base64(tmp_path, kind):
    data = sound_file(kind)
    part = read(tmp_path, {"type": "input_audio", "input_audio": {"data": text(data), "format": kind}})
    np.testing.assert_array_equal(part.sound.samples, read_sound(data, 30).samples)
    assert part.sound.sample_rate == 16000


def test_a_video_may_have_its_sound_beside_its_frames(tmp_path):
    (tmp_path / "clip.wav").write_bytes(sound_file("wav"))
    (tmp_path / "0.png").write_bytes(PNG)
    frames = {"type": "video", "frames": ["0.png", "0.png"], "fps": 2}
    video = read(tmp_path, {**frames, "audio": "clip.wav"}).video
    np.testing.assert_array_equal(video.sound.samples, read_sound(sound_file("wav"), 30).samples)
    assert (len(video.frames), video.fps) == (2, 2)
    assert read(tmp_path, frames).video.sound is None
    with pytest.raises(ValueError, match=r"content\[1\]\.audio: .*no\.wav: no such file"):
        read(tmp_path, {**frames, "audio": "no.wav"})


def test_all_places_of_images_and_sounds_take_data_urls(tmp_path):
    image, sound = f"data:image/png;base64,{text(PNG)}", f"data:audio/wav;base64,{text(sound_file('wav'))}"
    request = {"prompt": "go", "images": [image], "audio": [sound]}
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([request]))
    fields = request_fields(read_request_list(path)[0], "requests.json[0]", path, READERS)
    np.testing.assert_array_equal(fields["images"][0], PIXELS)
    assert len(fields["audio"][0].samples) == len(SAMPLES)
    np.testing.assert_array_equal(read(tmp_path, {"type": "image", "image": image}).image, PIXELS)
    assert len(read(tmp_path, {"type": "audio", "audio": sound}).sound.samples) == len(SAMPLES)


URL = "messages[2].content[1].image_url: "
SOUND = "messages[2].content[1].input_audio"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", [URL, "https://example.com/a.png: nothing is downloaded"]),
        ("HTTP://example.com/a.png", [URL, "nothing is downloaded"]),
        ("ftp://example.com/a.png", [URL, "expected a file name, a file:// URL or a data:image/...;base64"]),
        ("file://server/a.png", [URL, "expected file:///PATH"]),
        ("file:///no/such.png", [URL, "/no/such.png: no such file"]),
        ("no.png", [URL, "no.png: no such file"]),
        (5, [URL, "expected a file name, got 5"]),
        ("", [URL, "expected a file name, got ''"]),
        ("data:image/png,abc", [URL, "expected data:image/...;base64,..., got data:image/png"]),
        ("data:text/plain;base64,YQ==", [URL, "expected data:image/...;base64,..., got data:text/plain"]),
        ("data:image/png;base64,Y", [URL, "not valid base64 (1 characters)"]),
        ("data:image/png;base64,a b=", [URL, "not valid base64"]),
        ("data:image/png;base64,YQ==", [URL, "not an image that OpenCV can read (1 bytes)"]),
        ("data:image/png;base64,", [URL, "the image file is empty"]),
        (f"data:image/png;base64,{text(PNG[:-20])}", [URL, "the PNG file is truncated: "]),
        (text(PNG) * 4, [URL, "expected a file name or a data: URL, got", "characters)"]),
    ],
)
def test_a_wrong_image_url_is_refused_with_its_place(edgellm, tiny_engine, tmp_path, url, words):
    path = talk(tmp_path, {"type": "image_url", "image_url": {"url": url}})
    refused = edgellm("generate", tiny_engine, "--messages", path)
    assert_refused(refused, "talk.json: ", *words)
    assert len(refused.err) < 600


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("frame.png", [URL, "expected an object, got 'frame.png'"]),
        ({"detail": "auto"}, [URL, "missing key 'url'"]),
        ({"url": "a.png", "size": 5}, [URL, "unknown key 'size'"]),
        ({"url": "a.png", "detail": "huge"}, ["image_url.detail: expected one of auto, low, high"]),
    ],
)
def test_a_wrong_object_of_an_image_url_is_refused(edgellm, tiny_engine, tmp_path, value, words):
    path = talk(tmp_path, {"type": "image_url", "image_url": value})
    assert_refused(edgellm("generate", tiny_engine, "--messages", path), *words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("voice.wav", [SOUND, "expected an object, got 'voice.wav'"]),
        ({"data": ""}, [SOUND, "missing key 'format'"]),
        ({"data": "", "format": "mp3"}, [f"{SOUND}.format: expected one of wav, flac, ogg, got 'mp3'"]),
        ({"data": "", "format": "wav"}, [SOUND, "the sound file is empty"]),
        ({"data": 5, "format": "wav"}, [SOUND, "expected a text in base64, got 5"]),
        ({"data": "voice.wav", "format": "wav"}, [SOUND, "not valid base64 (9 characters)"]),
        ({"data": text(b"RIFF"), "format": "flac"}, [SOUND, "the sound is WAV, but its format is 'flac'"]),
        ({"data": text(sound_file("wav")[:-100]), "format": "wav"}, [SOUND, "the sound file is truncated"]),
    ],
)
def test_a_wrong_input_audio_is_refused_with_its_place(edgellm, tiny_engine, tmp_path, value, words):
    path = talk(tmp_path, {"type": "input_audio", "input_audio": value})
    assert_refused(edgellm("generate", tiny_engine, "--messages", path), *words)


def test_a_video_is_not_in_a_data_url(tmp_path):
    video = {"type": "video", "video": "data:video/mp4;base64,YQ==", "fps": 2}
    with pytest.raises(ValueError, match=r"content\[1\].video: a video is read from a file"):
        read(tmp_path, video)


def test_parts_of_openai_are_answered_as_the_same_files_are(edgellm, tiny_engine, tmp_path):
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "voice.wav").write_bytes(sound_file("wav"))
    forms = (
        [{"type": "image", "image": "frame.png"}, {"type": "audio", "audio": "voice.wav"}],
        [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text(PNG)}"}},
            {"type": "input_audio", "input_audio": {"data": text(sound_file("wav")), "format": "wav"}},
        ],
    )
    answers = []
    for number, parts in enumerate(forms):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps([{"role": "user", "content": [*parts, {"type": "text", "text": "go"}]}]))
        arguments = ("--messages", path, "--max-tokens", 8, "--json")
        answers.append(edgellm("generate", tiny_engine, *arguments).json)
    assert answers[0]["prompt_tokens"] == answers[1]["prompt_tokens"]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
