# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: what is read from the published layout, and what is refused.

test/parity compares exported checkpoints with transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import check, export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.audio.config import Qwen2_5AudioConfig
from fixtures.changed_json import change
from fixtures.qwen2_5_omni_checkpoint import AUDIO, PATCH, TOKENS, VISION, omni_tokenizer, write_qwen2_5_omni

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
CONFIG, WEIGHTS, THINKER = "config.json", "model.safetensors", "thinker_config"
LIMITS = {"max_input_len": 400, "max_kv_cache_capacity": 500}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_qwen2_5_omni(tmp_path_factory.mktemp("qwen2_5_omni") / "checkpoint")


@pytest.fixture
def checkpoint(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoint")


def refused(checkpoint: Path, message: str) -> None:
    """Check that an export is refused with one line that begins with a file."""
    with pytest.raises(ValueError, match=rf"^{re.escape(str(checkpoint))}/{message}") as error:
        check(checkpoint)
    assert "\n" not in str(error.value)


def test_an_engine_has_what_the_published_files_say(checkpoint, tmp_path):
    config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert config == EngineConfig.load(tmp_path / "engine")
    assert isinstance(config.audio, Qwen2_5AudioConfig)
    assert (config.audio.n_window, config.audio.chunk_frames, config.audio.chunk_tokens) == (100, 200, 50)
    assert config.vision.kind == "qwen2_5_vl"
    assert (config.vision.min_pixels, config.vision.max_pixels) == (4 * 80**2, 20 * 80**2)
    assert (config.video.min_pixels, config.video.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    assert (config.video.timestamps, config.video.tokens_per_second) == ("whole_positions", 25.0)
    assert config.video.sound_chunk == 50
    assert config.llm.rope.mrope_section == (2, 3, 3)
    assert not config.llm.rope.mrope_interleaved
    ids = {key: omni_tokenizer().token_to_id(token) for key, token in TOKENS.items()}
    tokens = config.special_tokens
    assert (tokens.image_token_id, tokens.audio_token_id) == (
        ids["image_token_index"],
        ids["audio_token_index"],
    )
    assert (tokens.audio_start_token_id, tokens.vision_end_token_id) == (
        ids["audio_start_token_id"],
        ids["vision_end_token_id"],
    )
    assert config.video_token_id == ids["video_token_index"]
    assert config.stop_token_ids == (omni_tokenizer().token_to_id("<|im_end|>"),)


def test_talker_and_voice_are_not_read(checkpoint):
    unread = {row.name for row in check(checkpoint).unread}
    assert unread == {"talker.*", "token2wav.*", "thinker.audio_tower.audio_bos_eos_token.*"}
    tensors = load_file(checkpoint / WEIGHTS)
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("thinker.")}
    save_file(own, checkpoint / WEIGHTS)
    change(checkpoint / CONFIG, ["talker_config"], ...)
    change(checkpoint / CONFIG, ["token2wav_config"], ...)
    assert check(checkpoint).parameters


def test_ids_of_placeholders_may_have_the_names_of_other_models(checkpoint):
    expected = check(checkpoint).config
    data = json.loads((checkpoint / CONFIG).read_text())[THINKER]
    for kind in ("image", "video", "audio"):
        change(checkpoint / CONFIG, [THINKER, f"{kind}_token_id"], data[f"{kind}_token_index"])
        change(checkpoint / CONFIG, [THINKER, f"{kind}_token_index"], ...)
    assert check(checkpoint).config.special_tokens == expected.special_tokens
    change(checkpoint / CONFIG, [THINKER, "image_token_index"], 5)
    refused(checkpoint, rf"config\.json: {THINKER}: image_token_index 5: expected image_token_id, which is ")


@pytest.mark.parametrize(
    "key",
    [
        "thinker_config",
        "thinker_config.text_config",
        "thinker_config.audio_config",
        "thinker_config.vision_config",
        "thinker_config.position_id_per_seconds",
        "thinker_config.seconds_per_chunk",
        "thinker_config.vision_start_token_id",
        "thinker_config.audio_end_token_id",
        "thinker_config.text_config.num_key_value_heads",
        "thinker_config.text_config.rms_norm_eps",
        "thinker_config.text_config.rope_theta",
        "thinker_config.text_config.rope_scaling.mrope_section",
        *(
            f"thinker_config.audio_config.{key}"
            for key in AUDIO
            if key not in ("model_type", "scale_embedding")
        ),
        *(
            f"thinker_config.vision_config.{key}"
            for key in VISION
            if key not in ("model_type", "in_channels")
        ),
    ],
)
def test_sizes_ids_and_times_have_no_defaults(checkpoint, key):
    *sections, last = key.split(".")
    change(checkpoint / CONFIG, key.split("."), ...)
    where = ": ".join([CONFIG, ".".join(sections)] if sections else [CONFIG])
    refused(checkpoint, rf"{re.escape(where)}: key '{last}' is missing$")


@pytest.mark.parametrize("key", TOKENS)
def test_the_ids_of_all_tokens_must_be_there(checkpoint, key):
    change(checkpoint / CONFIG, [THINKER, key], ...)
    name = key.replace("_token_index", "_token_id")
    refused(checkpoint, rf"config\.json: {THINKER}: key '{name}' is missing$")


AUDIO_CONFIG = f"{THINKER}.audio_config"
REFUSED = [
    (f"{AUDIO_CONFIG}.n_window", 25, "n_window must be even, so that chunks have whole tokens, got 25"),
    (f"{AUDIO_CONFIG}.max_source_positions", 99, "max_source_positions 99: expected at least n_window 100"),
    (f"{AUDIO_CONFIG}.activation_function", "relu", "activation_function 'relu': supported: gelu"),
    (f"{AUDIO_CONFIG}.d_model", 25, "d_model 25 must be even"),
    (f"{THINKER}.text_config.hidden_act", "gelu", "hidden_act 'gelu': supported: silu"),
    (f"{THINKER}.vision_config.hidden_act", "gelu", "hidden_act 'gelu': supported: silu"),
    (
        f"{THINKER}.seconds_per_chunk",
        0.01,
        "seconds_per_chunk 0.01: expected a whole position, of 25 per second",
    ),
    (f"{THINKER}.position_id_per_seconds", "25", "position_id_per_seconds '25': expected a number"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_what_the_graphs_do_not_compute_is_refused(checkpoint, key, value, message):
    change(checkpoint / CONFIG, key.split("."), value)
    refused(checkpoint, rf"config\.json: {re.escape(key.rpartition('.')[0])}: {re.escape(message)}")


def test_another_feature_extractor_is_refused(checkpoint):
    change(checkpoint / "preprocessor_config.json", ["feature_extractor_type"], "ClapFeatureExtractor")
    refused(checkpoint, r"preprocessor_config\.json: .*'ClapFeatureExtractor': supported: Whisper")


def test_a_template_without_videos_makes_an_engine_without_them(checkpoint):
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|VIDEO|>", "<|IMAGE|>"))
    assert check(checkpoint).config.video is None


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.1.attn.k.bias",
        "audio_tower.conv2.weight",
        "audio_tower.layers.1.self_attn.v_proj.bias",
        "audio_tower.proj.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_refused_by_its_name(checkpoint, name):
    tensors = load_file(checkpoint / WEIGHTS)
    del tensors[f"thinker.{name}"]
    save_file(tensors, checkpoint / WEIGHTS)
    with pytest.raises(ValueError, match=rf"thinker\.{re.escape(name)}"):
        check(checkpoint)


def test_the_report_tells_frames_and_seconds(checkpoint):
    report = check(checkpoint)
    assert report.family == "qwen2_5_omni"
    assert report.config.vision.size_factor == 2 * PATCH
    # 320 tokens of 4 frames each, and 2 frames more that make no further one
    assert report.config.audio.max_seconds(320) == pytest.approx(12.82)
