# SPDX-License-Identifier: Apache-2.0
"""`edgellm say`: the file that it writes, and what it refuses."""

from __future__ import annotations

import pytest
import soundfile

from fixtures.tiny_voice import RATE, write_tiny_voice


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_voice(tmp_path_factory.mktemp("voice"))


@pytest.mark.parametrize("text", ["I go to the red box. Then, I stop.", "**Stop**"])
def test_it_writes_the_sound_of_the_text(edgellm, tiny, tmp_path, text):
    done = edgellm("say", text, "--voice", tiny, "--out", tmp_path / "said.wav", "--json")
    samples, rate = soundfile.read(tmp_path / "said.wav")
    assert done.code == 0
    assert (rate, samples.ndim) == (RATE, 1)
    assert done.json["seconds"] == pytest.approx(len(samples) / RATE)
    assert done.json["sentences"] == max(1, text.count("."))
    assert len(samples) / RATE > len(text) * 0.05
    assert done.json["language"] == "en-us"


def test_without_a_model_espeak_speaks(edgellm, tmp_path):
    done = edgellm("say", "hello", "--voice", "espeak:de", "--out", tmp_path / "said.wav")
    assert done.code == 0
    assert "language de" in done.out
    assert soundfile.info(tmp_path / "said.wav").duration > 0.3


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "hello",
            ["--voice", "none.onnx"],
            "none.onnx: no such file, expected the MODEL.onnx of a Piper voice",
        ),
        ("hello", ["--voice", "espeak:xx-none"], "espeak-ng has no voice 'xx-none'"),
        (" \x00...", [], "TEXT has nothing to say: expected letters or digits, got"),
        ("hello", ["--noise-scale", "-1"], "expected a number from 0 to 10, got -1"),
        ("hello", ["--out", "missing/said.wav"], "missing/said.wav: No such file or directory"),
        ("hello", ["--out", "."], ".: is a folder, expected the name of a WAV file"),
    ],
)
def test_bad_input_ends_with_one_line(edgellm, tmp_path, monkeypatch, text, options, words):
    monkeypatch.chdir(tmp_path)
    done = edgellm("say", text, "--out", "said.wav", *options)
    assert done.code == 2
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "said.wav").exists()
