# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import shutil

import pytest

from edgellm_ros.engine_directory.config import EngineConfig


@pytest.fixture
def engine(tiny_engine, tmp_path):
    shutil.copytree(tiny_engine, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def edit(engine):
    """Change the engine's config.json as a nested object."""

    def edit(change):
        path = engine / "config.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


def test_a_saved_config_loads_unchanged(engine):
    config = EngineConfig.load(engine)
    config.save(engine)
    assert EngineConfig.load(engine) == config


def test_a_directory_without_config_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json not found: .* is not an engine directory"):
        EngineConfig.load(tmp_path)


def test_a_config_that_is_not_json_is_an_error_that_names_the_file(engine):
    (engine / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        EngineConfig.load(engine)


def test_an_unknown_and_a_missing_key_are_named_with_their_path(engine, edit):
    edit(lambda data: data["llm"].update(hidden=data["llm"].pop("hidden_size")))
    with pytest.raises(
        ValueError, match=r"config\.json\.llm: unknown key 'hidden', missing key 'hidden_size'"
    ):
        EngineConfig.load(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["llm"].update(head_dim="16"), r"llm\.head_dim: expected int, got str '16'"),
        (lambda d: d["llm"].update(head_dim=True), r"llm\.head_dim: expected int, got bool True"),
        (
            lambda d: d["llm"]["rope"].update(mrope_section=[4, 2, 2.5]),
            r"mrope_section\[2\]: expected int, got float",
        ),
        (lambda d: d["llm"]["rope"].update(mrope_section=8), r"mrope_section: expected a list, got int 8"),
        (lambda d: d.update(vision=[1]), r"vision: expected an object, got list"),
        (lambda d: d["vision"].pop("kind"), r"vision: missing key 'kind'"),
        (
            lambda d: d["vision"].update(kind="clip"),
            r"vision\.kind: expected one of qwen3_vl, qwen2_5_vl, siglip2, internvl, got str 'clip'",
        ),
        (lambda d: d["vision"].update(kind="internvl"), r"vision: unknown key 'deepstack_visual_indexes'"),
        (lambda d: d["audio"].update(n_fft=401), r"audio: n_fft must be even, got 401"),
        (lambda d: d["audio"].update(d_model=25), "d_model 25 must be even"),
        (lambda d: d["audio"].update(encoder_attention_heads=5), "multiple of encoder_attention_heads 5"),
        (lambda d: d["audio"].update(n_window_infer=99), "n_window_infer 99 must be at least a chunk of 100"),
        (lambda d: d["audio"].update(hop_length=0), "hop_length must be at least 1, got 0"),
        (lambda d: d["audio"].update(min_samples=-1), "min_samples must be at least 0, got -1"),
        (lambda d: d["audio"].update(whole_chunks=1), r"audio\.whole_chunks: expected bool, got int 1"),
        (
            lambda d: d["special_tokens"].update(transcript_token_id=5) or d.update(audio=None),
            "transcript_token_id, which needs an audio encoder",
        ),
        (lambda d: d["audio"].update(output_dim=64), "audio output_dim 64 is not hidden_size 48"),
        (lambda d: d["special_tokens"].update(audio_token_id=None), "needs audio_token_id"),
        (lambda d: d.update(format_version=99), "format_version is 99, expected 24: export again"),
        (lambda d: d.update(precision="int3"), "precision must be one of fp32, fp16, bf16, got 'int3'"),
        (lambda d: d.update(stop_token_ids=[]), "stop_token_ids must not be empty"),
        (lambda d: d["llm"].update(num_key_value_heads=3), "num_attention_heads 4 is not a multiple"),
        (lambda d: d["llm"].update(head_dim=14), "8 frequencies, more than the pairs of head_dim 14"),
        (lambda d: d["llm"]["rope"].update(mrope_section=[4, 2, 3]), "must sum to the 8 frequencies"),
        (lambda d: d["llm"]["rope"].update(frequencies=[]), "frequencies must be finite"),
        (lambda d: d["llm"]["rope"].update(attention_scaling=0.0), "attention_scaling must be positive"),
        (lambda d: d["llm"].update(num_deepstack_features=1), "llm takes num_deepstack_features 1"),
        (lambda d: d["llm"].update(hidden_size=64), "out_hidden_size 48 is not hidden_size 64"),
        (lambda d: d["action"].update(head_dim=8), "action head_dim 8 is not llm head_dim 16"),
        (lambda d: d["action"].update(future_start_token_id=3), "must have future_start_token_id 3"),
        (lambda d: d["builder"].update(max_batch_size=0), "max_batch_size must be at least 1, got 0"),
        (lambda d: d["builder"].update(max_input_len=448), "448 must be greater than max_input_len 448"),
        (lambda d: d["special_tokens"].update(image_token_id=None), "needs image_token_id"),
        (lambda d: d["generation"].update(top_p=0.0), "top_p in"),
        (lambda d: d["files"][0].update(path="../secret"), "must stay inside the engine directory"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(engine, edit, change, message):
    edit(change)
    with pytest.raises(ValueError, match=message):
        EngineConfig.load(engine)


def test_a_missing_file_is_named(engine):
    (engine / "llm" / "model.onnx").unlink()
    with pytest.raises(FileNotFoundError, match=r"llm/model\.onnx is missing: .* export it again"):
        EngineConfig.load(engine)


def test_a_truncated_file_is_found_by_its_size(engine):
    path = engine / "embedding.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"embedding\.safetensors has \d+ bytes, expected \d+"):
        EngineConfig.load(engine)


def test_an_altered_file_of_the_same_size_is_found_on_demand(engine):
    path = engine / "embedding.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    EngineConfig.load(engine)
    with pytest.raises(ValueError, match=r"embedding\.safetensors has another SHA-256"):
        EngineConfig.load(engine, verify=True)


def test_a_language_model_alone_is_a_valid_engine(tiny_engine):
    config = EngineConfig.load(tiny_engine)
    text = dataclasses.replace(config.llm, num_deepstack_features=0)
    alone = dataclasses.replace(config, llm=text, vision=None, action=None)
    assert alone.vision is None
