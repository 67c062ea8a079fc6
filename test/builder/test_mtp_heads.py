# SPDX-License-Identifier: Apache-2.0
"""MTP heads of checkpoints: what is read, and what is refused in one line."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.builder.draft.mtp import frequent_tokens
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.changed_json import change
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.mtp_checkpoints import MIMO, WRITERS, remove_tensor, replace_tensor
from fixtures.random_head import base_config, write_random_head

LIMITS = {"max_input_len": 48, "max_kv_cache_capacity": 64}
NAMES = {"qwen3_5": ("mtp.", "fc", "layers.0."), "mimo": (MIMO, "input_proj", "")}

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")


@pytest.fixture(params=WRITERS)
def family(request):
    return request.param


@pytest.fixture
def checkpoint(family, tmp_path):
    return WRITERS[family](tmp_path / "checkpoint")


def refused(checkpoint, message: str, **options) -> None:
    with pytest.raises(ValueError, match=message) as error:
        plan_export(checkpoint, ExportOptions(**LIMITS, **options))
    assert "\n" not in str(error.value)


def test_the_log_tells_what_was_read_and_what_it_weighs(checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "edgellm_ros.builder"):
        config = export(checkpoint, tmp_path / "engine", **LIMITS)
    assert (config.draft.kind, config.draft.num_layers, config.draft.base_state_layers) == ("mtp", 1, ())
    assert any(
        line.startswith("MTP head: 0.") and "MB, drafts 302 tokens" in line for line in caplog.messages
    )


def test_no_draft_leaves_the_head_out(checkpoint, tmp_path):
    config = export(checkpoint, tmp_path / "engine", **LIMITS, with_draft=False)
    assert config.draft is None
    assert not (tmp_path / "engine" / "draft").exists()


def test_a_head_directory_comes_before_the_head_of_the_checkpoint(tmp_path):
    checkpoint = WRITERS["mimo"](tmp_path / "checkpoint")
    head = write_random_head(tmp_path / "head", base_config(checkpoint))
    assert (
        export(checkpoint, tmp_path / "engine", **LIMITS, max_verify_tree_size=8, draft=head).draft.kind
        == "eagle"
    )


def test_a_missing_tensor_is_named(family, checkpoint):
    prefix, fc, _ = NAMES[family]
    remove_tensor(checkpoint, f"{prefix}{fc}.weight")
    refused(checkpoint, f"tensor '{prefix}{fc}.weight' of the MTP head is missing; --no-draft exports")


def test_a_head_of_another_size_is_named(family, checkpoint):
    prefix, _, layer = NAMES[family]
    name = f"{prefix}{layer}mlp.up_proj.weight"
    replace_tensor(checkpoint, name, np.zeros((9, 9), np.float16))
    refused(checkpoint, rf"tensor '{name}' has shape \[9, 9\], but by the config it is")


def test_several_modules_are_refused(tmp_path):
    checkpoint = WRITERS["qwen3_5"](tmp_path / "checkpoint")
    change(checkpoint / "config.json", ["mtp_num_hidden_layers"], 2)
    refused(checkpoint, r"2 MTP modules \(mtp\); supported is one; --no-draft exports the model alone")


def test_the_head_has_the_lm_head_s_rows_of_the_drafted_tokens(tmp_path):
    checkpoint = WRITERS["mimo"](tmp_path / "checkpoint")
    config = export(checkpoint, tmp_path / "engine", **LIMITS, draft_vocab_size=40)
    tokens = load_file(tmp_path / "engine/draft/d2t.safetensors")["token_of_draft_logit"]
    assert tokens.tolist() == frequent_tokens(checkpoint / "tokenizer.json", 302, 40).tolist()
    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]  # tied
    graph = onnx.load(tmp_path / "engine/draft/model.onnx").graph
    (matrix,) = (each for each in graph.initializer if each.name == "model.embed_tokens.weight")
    rows = onnx.numpy_helper.to_array(matrix, str(tmp_path / "engine/draft"))
    np.testing.assert_array_equal(rows[:, : config.draft.vocab_size], table[tokens].T.astype(np.float32))


@pytest.mark.parametrize("option", [{}, {"with_draft": False}])
def test_drafted_tokens_without_a_head_are_refused(tmp_path, option):
    checkpoint = (
        write_decoder_checkpoint(tmp_path / "c", "qwen2") if not option else WRITERS["mimo"](tmp_path / "c")
    )
    with pytest.raises(
        ValueError, match="--draft-vocab-size 40 is for an MTP head or a DFlash drafter, and none is"
    ):
        export(checkpoint, tmp_path / "engine", **LIMITS, draft_vocab_size=40, **option)


def test_a_head_without_its_base_is_refused(tmp_path):
    """As an EAGLE-3 head would be given."""
    base = write_decoder_checkpoint(tmp_path / "base", "qwen2")
    head = WRITERS["qwen3_5"](tmp_path / "head")
    refused(base, "an MTP head, which is read with its checkpoint", draft=head)


def test_a_head_in_the_layout_of_qwen3_5_is_read_with_any_model_of_such_layers(tmp_path):
    """The command training.mtp writes it."""
    checkpoint = write_decoder_checkpoint(
        tmp_path / "checkpoint", "llama", attention_bias=False, mlp_bias=False
    )
    stored = load_file(checkpoint / "model.safetensors")
    hidden = 64
    for name in [name for name in stored if name.startswith("model.layers.0.")]:
        replace_tensor(checkpoint, name.replace("model.layers.0.", "mtp.layers.0."), stored[name])
    replace_tensor(checkpoint, "mtp.fc.weight", np.zeros((hidden, 2 * hidden), np.float16))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        replace_tensor(checkpoint, f"mtp.{name}.weight", np.ones(hidden, np.float16))
    assert export(checkpoint, tmp_path / "engine", **LIMITS).draft.kind == "mtp"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_head_of_a_quantised_export_stays_in_16_bits(tmp_path, precision):
    checkpoint = WRITERS["qwen3_5"](tmp_path / "checkpoint", 2)
    plan = plan_export(
        checkpoint, ExportOptions(**LIMITS, precision=precision, quantize="int4", group_size=32)
    )
    head = plan.graphs["draft/model.onnx"].graph
    assert {value.dtype.name for value in head.initializers.values()} <= {
        "FLOAT",
        "FLOAT16",
        "BFLOAT16",
        "INT64",
    }


class TestTokens:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        """Letters a to d, merges in another order than ids, a special token."""
        vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "cd": 4, "ab": 5, "abcd": 6, "<|end|>": 7}
        model = {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "c d", "ab cd"]}
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({"model": model, "added_tokens": [{"id": 7, "content": "<|end|>"}]}))
        return path

    @pytest.mark.parametrize(
        ("count", "tokens"),
        [(3, [0, 1, 2, 3, 7]), (6, [0, 1, 2, 3, 5, 7]), (7, [0, 1, 2, 3, 4, 5, 7])],
    )
    def test_merges_come_in_their_order_after_letters_and_special_tokens(self, tokenizer, count, tokens):
        assert frequent_tokens(tokenizer, 8, count).tolist() == tokens

    def test_all_tokens_need_no_table(self, tokenizer):
        assert frequent_tokens(tokenizer, 8, 8) is None

    def test_without_merges_the_first_ids_are_taken(self, tmp_path):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": []}, "added_tokens": [{"id": 9}]}))
        assert frequent_tokens(path, 10, 4).tolist() == [0, 1, 2, 9]
