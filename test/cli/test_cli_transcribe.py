# SPDX-License-Identifier: Apache-2.0
"""`edgellm transcribe`: text of sound files, and what is refused."""

from __future__ import annotations

import json

import pytest
import soundfile

from edgellm_ros.builder import export
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.transcript import read_transcript, transcription_request
from fixtures.qwen3_asr_checkpoint import TRANSFORMERS, write_qwen3_asr
from fixtures.reference_inputs import make_sound
from fixtures.refusal import assert_refused

SECONDS = {"one.wav": 0.2, "other.wav": 1.3}
SAMPLES = {name: make_sound(seconds, 16000) for name, seconds in SECONDS.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    text = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of rounded weights
    return write_qwen3_asr(tmp_path_factory.mktemp("qwen3_asr") / "checkpoint", TRANSFORMERS, text=text)


@pytest.fixture(scope="module")
def engine(checkpoint):
    directory = checkpoint.with_name("engine")
    export(checkpoint, directory, max_input_len=64, max_kv_cache_capacity=128)
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    for name, samples in SAMPLES.items():
        soundfile.write(folder / name, samples, 16000, subtype="FLOAT")
    return {name: str(folder / name) for name in SAMPLES}


@pytest.fixture(scope="module")
def transcripts(engine, runtime_device):
    """Function: language and context -> transcript of each file."""

    def make(language, context):
        with LLMInferenceRuntime(engine, runtime_device) as runtime:
            responses = [
                runtime.handle_request(transcription_request([Sound(samples, 16000)], language, context))
                for samples in SAMPLES.values()
            ]
            return [read_transcript(response, runtime.config, language) for response in responses]

    return make


def test_the_text_of_each_file_is_printed(edgellm, engine, files, transcripts):
    expected = transcripts(None, "")
    found = edgellm("transcribe", engine, *files.values())
    lines = [f"{path}: {each.text}" for path, each in zip(files.values(), expected, strict=True)]
    assert (found.code, found.out) == (0, "".join(f"{line}\n" for line in lines))
    assert found.err.count("[language: none, confidence -") == 2
    assert f", cut off after {128 - 38} tokens, 0.2 s of sound in " in found.err
    alone = edgellm("transcribe", engine, files["one.wav"])
    assert alone.out == f"{expected[0].text}\n"


def test_language_and_context_are_those_of_the_request(edgellm, engine, files, transcripts):
    expected = transcripts("German", "forklift")
    options = ("--language", "de", "--context", "forklift", "--json")
    found = edgellm("transcribe", engine, *files.values(), *options).json["transcripts"]
    assert [each["text"] for each in found] == [each.text for each in expected]
    assert expected != transcripts("German", "")
    for each, (name, seconds), transcript in zip(found, SECONDS.items(), expected, strict=True):
        assert (each["file"], each["language"]) == (files[name], "German")
        assert each["sound_s"] == pytest.approx(seconds)
        assert each["confidence"] == pytest.approx(transcript.confidence, abs=1e-4)
        assert each["finish_reason"] == "length"
        assert each["total_s"] > 0


@pytest.mark.only_on("cpu", reason="refused before a device is used")
def test_bad_input_is_refused_with_one_line(edgellm, engine, tiny_engine, files, tmp_path):
    long, other = tmp_path / "long.wav", tmp_path / "a.txt"
    soundfile.write(long, make_sound(6.0, 16000), 16000)
    other.write_text("no sound")
    for arguments, parts in (
        ((tiny_engine, files["one.wav"]), [tiny_engine, "writes no transcripts"]),
        (
            (engine, files["one.wav"], "--language", "Elvish"),
            ["language 'Elvish' is not known", "English (en)"],
        ),
        ((engine, files["one.wav"], other), [other, "not a sound"]),
        ((engine, tmp_path / "missing.wav"), [tmp_path / "missing.wav"]),
        ((engine, long), [long, "a sound of 6.00 s, the engine takes less than 4.97 s"]),
        ((tmp_path, files["one.wav"]), [tmp_path, "not an engine directory"]),
        ((engine,), ["SOUND"]),
        ((engine, files["one.wav"], "--context", "word " * 60), [files["one.wav"], "max_kv_cache_capacity"]),
    ):
        assert_refused(edgellm("transcribe", *arguments), *map(str, parts))


def test_bench_hears_a_sound(edgellm, engine):
    found = edgellm("bench", engine, "--runs", 1, "--warmup", 0, "--max-tokens", 4)
    assert found.code == 0, found.err
    assert found.json["prompt_tokens"] == 31 + 64  # as long as the engine takes


@pytest.mark.only_on("cpu", reason="the report runs on the CPU")
def test_rounded_weights_have_a_report_on_sounds(edgellm, checkpoint, files, tmp_path):
    options = ("--quantize", "int8", "--json")
    found = edgellm("export", checkpoint, tmp_path / "plain", *options)
    assert (found.code, "quantization" in found.json) == (0, False)
    assert "no report: a model for speech to text needs sounds" in found.err
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        "".join(f"{json.dumps({'audio': [path], 'system': 'dock'})}\n" for path in files.values())
    )
    options += ("--prompts", requests, "--calibrate", requests)
    found = edgellm("export", checkpoint, tmp_path / "calibrated", *options)
    assert found.code == 0, found.err
    assert found.json["quantization"]["prompts"] == 2
    assert 0 < found.json["quantization"]["relative_error"] < 0.1
