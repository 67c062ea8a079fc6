# SPDX-License-Identifier: Apache-2.0
"""Qwen3-ASR: what is read from both layouts, and what is refused.

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
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from fixtures.changed_json import change
from fixtures.qwen3_asr_checkpoint import ALIASES, AUDIO, LAYOUTS, ORIGINAL, TRANSFORMERS, write_qwen3_asr
from fixtures.tiny_checkpoint import write_json

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qwen3_asr")
    return {layout: write_qwen3_asr(folder / layout, layout) for layout in LAYOUTS}


@pytest.fixture(params=LAYOUTS)
def layout(request) -> str:
    return request.param


@pytest.fixture
def checkpoint(written, layout, tmp_path) -> Path:
    return shutil.copytree(written[layout], tmp_path / "checkpoint")


def keys_of(layout: str, *keys: str) -> list[str]:
    """Return the path of a key of the section with encoder and text."""
    return ["thinker_config", *keys] if layout == ORIGINAL else list(keys)


def refused(checkpoint: Path, message: str) -> None:
    """Check that an export is refused with one line.

    The line begins with a file of the checkpoint.
    """
    with pytest.raises(ValueError, match=rf"^{re.escape(str(checkpoint))}/{message}") as raised:
        check(checkpoint)
    assert "\n" not in str(raised.value)


def rename(checkpoint: Path, old: str, new: str) -> None:
    """Rename tensors whose names begin with `old`."""
    tensors = load_file(checkpoint / WEIGHTS)
    renamed = {name.replace(old, new) if name.startswith(old) else name: t for name, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, checkpoint / WEIGHTS)


def test_both_layouts_give_the_same_engine(written, tmp_path):
    configs = [export(written[layout], tmp_path / layout) for layout in LAYOUTS]
    one, other = (json.loads((tmp_path / layout / CONFIG).read_text()) for layout in LAYOUTS)
    assert one["audio"] == other["audio"]
    assert one["llm"] == other["llm"]
    assert (
        one["special_tokens"] | {"audio_start_token_id": None, "audio_end_token_id": None}
        == (other["special_tokens"])
    )
    assert one["stop_token_ids"] == other["stop_token_ids"]
    assert (configs[0].audio.min_samples, configs[0].audio.whole_chunks) == (8000, True)
    assert configs[0].llm.rope.mrope_section == ()
    assert configs[0].vision is None


def test_the_plan_reads_every_tensor(checkpoint):
    assert check(checkpoint).unread == ()


def test_experts_are_found_by_their_tensors_and_not_by_keys(checkpoint, layout):
    """The original's text section has the keys; they may also be missing."""
    check(checkpoint)
    module = "thinker.model" if layout == ORIGINAL else "model.language_model"
    rename(checkpoint, f"{module}.layers.1.mlp.", f"{module}.layers.1.mlp.experts.0.")
    refused(checkpoint, rf"model\.safetensors: tensors of '{module}\.layers\.1\.mlp\.experts': a mixture of ")


@pytest.mark.parametrize("layout", [TRANSFORMERS])
def test_sizes_of_the_encoder_may_have_their_other_names(written, checkpoint, tmp_path):
    every = write_qwen3_asr(tmp_path / "every", TRANSFORMERS, aliases=tuple(ALIASES))
    none = write_qwen3_asr(tmp_path / "none", TRANSFORMERS, aliases=())
    sizes = [check(each).config.audio for each in (written[TRANSFORMERS], every, none)]
    assert sizes[0] == sizes[1] == sizes[2]
    for name, alias in ALIASES.items():
        change(none / CONFIG, ["audio_config", alias], AUDIO[name])
    assert check(none).config.audio == sizes[0]
    change(none / CONFIG, ["audio_config", "hidden_size"], 25)
    refused(none, r"config\.json: audio_config: hidden_size 25: expected d_model, which is 24$")


@pytest.mark.parametrize(
    "key",
    ["n_window", "n_window_infer", "num_mel_bins", "output_dim", "downsample_hidden_size", "encoder_layers"],
)
def test_sizes_of_the_encoder_have_no_defaults(checkpoint, layout, key):
    change(checkpoint / CONFIG, keys_of(layout, "audio_config", key), ...)
    refused(checkpoint, rf"config\.json: (thinker_config\.)?audio_config: key '{key}' is missing$")


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"])
def test_sizes_of_the_text_have_no_defaults(checkpoint, layout, key):
    change(checkpoint / CONFIG, keys_of(layout, "text_config", key), ...)
    refused(checkpoint, rf"config\.json: (thinker_config\.)?text_config: key '{key}' is missing$")


def test_the_base_of_rope_has_no_default(checkpoint, layout):
    key = ("rope_theta",) if layout == ORIGINAL else ("rope_parameters", "rope_theta")
    change(checkpoint / CONFIG, keys_of(layout, "text_config", *key), ...)
    refused(checkpoint, r"config\.json: (thinker_config\.)?text_config: key 'rope_theta' is missing$")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_window", 100, "n_window 100: supported: 50"),
        ("n_window_infer", 50, "n_window_infer 50 must be at least a chunk of 100 frames"),
        ("activation_function", "relu", "activation_function 'relu': supported: gelu"),
        ("d_model", "24", "d_model '24': expected an integer"),
    ],
)
def test_encoders_that_the_graph_does_not_compute_are_refused(checkpoint, layout, key, value, message):
    change(checkpoint / CONFIG, keys_of(layout, "audio_config", key), value)
    refused(checkpoint, rf"config\.json: (thinker_config\.)?audio_config: {re.escape(message)}$")


def test_another_feature_extractor_is_refused(checkpoint, layout):
    if layout == ORIGINAL:
        file, keys, kind = "preprocessor_config.json", [], "WhisperFeatureExtractor"
    else:
        file, keys, kind = "processor_config.json", ["feature_extractor"], "Qwen3ASRFeatureExtractor"
    change(checkpoint / file, [*keys, "feature_extractor_type"], "ClapFeatureExtractor")
    refused(checkpoint, rf"{file}: .*'ClapFeatureExtractor': supported: {kind}$")


@pytest.mark.parametrize("layout", [TRANSFORMERS])
def test_the_feature_extractor_tells_how_long_a_sound_is_at_least(checkpoint):
    change(checkpoint / "processor_config.json", ["feature_extractor", "min_length"], 4000)
    assert check(checkpoint).config.audio.min_samples == 4000
    change(checkpoint / "processor_config.json", ["feature_extractor", "min_length"], -1)
    refused(checkpoint, r"processor_config\.json: .*min_samples must be at least 0, got -1$")
    change(checkpoint / "processor_config.json", ["feature_extractor", "min_length"], 8000)
    change(checkpoint / "processor_config.json", ["feature_extractor", "n_window"], 100)
    refused(checkpoint, r"processor_config\.json: .*n_window 100: supported: 50$")


def test_neither_layout_is_refused(checkpoint, layout):
    change(checkpoint / CONFIG, ["thinker_config" if layout == ORIGINAL else "audio_config"], ...)
    refused(checkpoint, r"config\.json: expected thinker_config .* or audio_config .*, found neither$")


def test_a_forced_aligner_is_refused(checkpoint, layout):
    if layout == ORIGINAL:
        change(checkpoint / CONFIG, ["thinker_config", "classify_num"], 5000)
        refused(checkpoint, r"config\.json: thinker_config: classify_num 5000: a forced aligner, ")
    else:
        tensors = load_file(checkpoint / WEIGHTS)
        tensors["score.weight"] = tensors["model.language_model.norm.weight"][None]
        save_file(tensors, checkpoint / WEIGHTS)
        refused(checkpoint, r"model\.safetensors: tensor 'score\.weight': a forced aligner, ")


def test_the_mark_before_a_transcript_is_a_token_that_texts_show(checkpoint):
    tokens = json.loads((checkpoint / TOKENIZER).read_text())["added_tokens"]
    assert tokens[-1]["content"] == "<asr_text>"
    change(checkpoint / TOKENIZER, ["added_tokens"], [*tokens[:-1], tokens[-1] | {"special": True}])
    refused(checkpoint, r"tokenizer\.json: the added token '<asr_text>' is special, so answers would leave")
    change(checkpoint / TOKENIZER, ["added_tokens"], tokens[:-1])
    refused(checkpoint, r"tokenizer\.json: the added token '<asr_text>' is missing$")


@pytest.mark.parametrize("layout", [ORIGINAL])
@pytest.mark.parametrize("as_parts", [False, True])
def test_the_exported_template_writes_the_beginning_of_an_answer(checkpoint, tmp_path, as_parts):
    """The original template has no turns of the assistant."""
    messages = [{"role": "user", "content": [{"type": "audio"}]}]
    begun = (
        [{"type": "text", "text": "language German<asr_text>"}] if as_parts else "language German<asr_text>"
    )
    export(checkpoint, tmp_path / "engine")
    template = ChatTemplate(tmp_path / "engine" / "chat_template.jinja")
    answer = {"role": "assistant", "content": begun}
    text = template.render([*messages, answer], continue_final_message=True)
    assert text == f"{template.render(messages)}language German<asr_text>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<|audio_pad|>", "leaves out the system's text, which is the context"),
        ("{{ messages[0].content }}<|audio_pad|>", "writes another beginning of the answer than is given"),
    ],
)
def test_other_templates_are_refused(checkpoint, layout, template, message):
    if layout == ORIGINAL:
        write_json(checkpoint / "chat_template.json", {"chat_template": template})
    else:
        (checkpoint / "chat_template.jinja").write_text(template)
    refused(checkpoint, rf"chat_template\.\w+: a chat template that {message}$")
