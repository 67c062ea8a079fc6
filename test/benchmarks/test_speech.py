# SPDX-License-Identifier: Apache-2.0
"""The speech benchmark from random weights to its last line, with small models."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import speech
from benchmarks.speech_shapes import SPEECH_SHAPES, parse_speech_shape, write_speech_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.hearing.transcriber import Transcriber

SMALL = (
    "qwen3-asr-0.6b,hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=16,vocab_size=400,d_model=24,encoder_layers=2,encoder_attention_heads=3,"
    "encoder_ffn_dim=40,downsample_hidden_size=4"
)
TOKENS = 6


def options(*more: str) -> list[str]:
    return ["--shape", SMALL, "--seconds", "1.3", "--tokens", str(TOKENS), "--runs", "3", *more]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech") / "checkpoint"
    return write_speech_checkpoint(folder, parse_speech_shape(SMALL))


@pytest.fixture(scope="module")
def engine(checkpoint):
    export(checkpoint, checkpoint.parent / "engine", max_kv_cache_capacity=64, max_input_len=60)
    return checkpoint.parent / "engine"


@pytest.mark.parametrize("name, text, encoder", [("0.6b", 596_049_920, 186), ("1.7b", 1_720_574_976, 317)])
def test_shapes_have_the_published_number_of_weights(name, text, encoder):
    """`text`: that of Qwen3-0.6B and Qwen3-1.7B; `encoder`: millions."""
    shape = SPEECH_SHAPES[f"qwen3-asr-{name}"]
    assert shape.text.parameters == text
    assert round((shape.parameters - text) / 1e6) == encoder


@pytest.mark.parametrize("text", ["qwen3-0.6b", "qwen3-asr-0.6b,layers=2", "qwen3-asr-0.6b,encoder_layers=x"])
def test_unknown_shapes_and_sizes_are_refused(text):
    with pytest.raises(
        ValueError, match=r"unknown shape 'qwen3-0.6b'|d_model.*got '(layers=2|encoder_layers=x)'"
    ):
        parse_speech_shape(text)


@pytest.mark.slow
def test_the_last_line_is_the_result_as_json(capsys, device_arguments):
    returned = speech.main(options("--no-transformers", "--quantize", "int8", *device_arguments))
    told = capsys.readouterr()
    last = json.loads(told.out.splitlines()[-1])
    assert last == {"benchmark": "speech", **returned}
    assert (last["quantize"], last["tokens"], last["sound_s"]) == ("int8", TOKENS, 1.3)
    assert f"changed from the defaults: max_tokens={TOKENS}\n" in told.err
    assert last["transformers"] is None
    assert last["sounds_encoded"] == 3 + speech.WARM_UP  # each is another one: encoded sounds are cached
    ours = last["ours"]
    medians = {stage: ours[f"{stage}_ms"]["median"] for stage in speech.STAGES}
    assert all(0 < ours[f"{stage}_ms"]["median"] <= ours[f"{stage}_ms"]["p90"] for stage in speech.STAGES)
    assert max(medians["encoder"], medians["prefill"], medians["token"] * (TOKENS - 1)) < medians["total"]
    assert ours["times_real_time"] == pytest.approx(1300 / medians["total"])


def test_a_transcript_that_is_too_short_is_no_figure(engine):
    request = speech.transcript_request(speech.make_sound(1.3, 0), 100)
    with Transcriber(engine) as transcriber, pytest.raises(RuntimeError, match="tokens, expected 100"):
        speech.transcribe(transcriber, request)


def test_only_a_long_sound_changes_the_sizes_of_the_export():
    args = speech.parse([])
    assert speech.export_options(args)[1] == {}
    args.seconds, args.tokens = 25.0, 200
    made, sizes = speech.export_options(args)
    assert sizes == {"max_input_len": 341, "max_kv_cache_capacity": 541}
    assert made == replace(speech.export_options(speech.parse([]))[0], **sizes)


@pytest.mark.parametrize("given", [["--node"], ["--speech-engine", "somewhere"], ["--seconds", "0"]])
def test_options_that_do_not_fit_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        speech.parse(given)
    assert (
        "--node needs --speech-engine" in (told := capsys.readouterr().err) or "from 0.1 to 60, got 0" in told
    )


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_writes_the_same_tokens():
    pytest.importorskip("transformers")
    found = speech.main(options())
    assert list(found["transformers"]) == ["fp32", "bf16"]
    assert found["transformers"]["fp32"]["same_tokens"] == TOKENS
    for figures in found["transformers"].values():
        assert 0 < figures["encoder_ms"]["median"] < figures["total_ms"]["median"]


@pytest.mark.real_time
@pytest.mark.timeout(120)
def test_the_node_answers_spoken_commands(tiny_engine, engine, capsys):
    """Words of random weights are never sure: obeyed only where all are."""
    given = ["--node", "--speech-engine", str(engine), "--engine", str(tiny_engine), "--runs", "2"]
    found = speech.main([*given, "--obey-all"])
    assert found["answered"] == 2
    assert found["changed_from_defaults"]["hearing.min_confidence"] == -100
    # The silence that ends an utterance, less what the room's echo adds to the speech.
    assert 600 < found["utterance_ms"]["median"] < 5000
    parts = [found[f"{part}_ms"]["median"] for part in ("utterance", "transcript", "word")]
    assert all(part > 0 for part in parts)
    assert found["total_ms"]["median"] == pytest.approx(sum(parts), rel=0.5)
    assert "heard '" in capsys.readouterr().err


@pytest.mark.parametrize(
    "times, result",
    [
        ((10.0, 0.0, 0.0, 0.0, False), "unheard"),
        ((10.0, 9.0, 9.5, 9.8, False), "early"),
        ((10.0, 11.0, 11.5, 0.0, True), "not_obeyed"),
        ((10.0, 11.0, 11.5, 0.0, False), "no_word"),
        ((10.0, 11.0, 11.5, 11.75, False), {"utterance": 1, "transcript": 0.5, "word": 0.25, "total": 1.75}),
    ],
)
def test_delays_are_between_the_outputs_of_one_command(times, result):
    from benchmarks.speech_node import delays

    assert delays(*times) == result


def test_a_transcript_is_right_by_its_words():
    from benchmarks.speech_node import words

    assert words("Ok robot, go to the box.") == words("ok robot go to the box")
    assert words("go to the box") != words("go to the ball")


def test_the_speech_of_a_command_ends_where_it_is_loud_for_the_last_time():
    from benchmarks.speech_node import AFTER_S, BEFORE_S, spoken_command

    command = spoken_command(20_000)
    seconds = len(command.samples) / 16000
    assert BEFORE_S + 0.3 < command.end_s <= seconds - AFTER_S + 0.01
    level = np.abs(command.samples.astype(float))
    end = round(command.end_s * 16000)
    assert level[end - 3200 : end].max() > 2 * level[end + 8000 :].max()
