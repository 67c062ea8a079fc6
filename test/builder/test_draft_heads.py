# SPDX-License-Identifier: Apache-2.0
"""Draft heads: what is read from their files, and what is refused.

test/parity/test_parity_draft.py compares what the graphs compute.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import ExportOptions, check, export, inspect, render, render_check
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.draft.base_states import read_base_state_layers
from edgellm_ros.builder.exporter import artefacts
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.changed_json import change
from fixtures.decoder_checkpoint import LLAMA3, write_decoder_checkpoint
from fixtures.random_head import LIST, base_config, write_random_head
from fixtures.tiny_checkpoint import write_json

pytestmark = pytest.mark.only_on("cpu", reason="files are the same for every device")
HIDDEN, VOCABULARY = 64, 302  # of the base
ANY = np.zeros(2, np.float16)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_decoder_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", "llama")


@pytest.fixture
def head(base, tmp_path) -> Path:
    return write_random_head(tmp_path / "head", base_config(base))


def write_head(base: Path, directory: Path, **options) -> Path:
    return write_random_head(directory / "head", base_config(base), **options)


def draft_config(base: Path, head: Path, **options):
    return check(base, ExportOptions(draft=head, **options)).config.draft


def edit(head: Path, **tensors: np.ndarray | None) -> None:
    """Replace tensors of a head.

    None removes one, and `__` in a name stands for a dot.
    """
    found = load_file(head / "model.safetensors")
    for name, value in tensors.items():
        if value is None:
            del found[name.replace("__", ".")]
        else:
            found[name.replace("__", ".")] = value
    save_file(found, head / "model.safetensors")


def assert_refused(base: Path, head: Path, *words: str, **options) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check(base, ExportOptions(draft=head, **options))
    for word in (str(head), *words):
        assert word in str(error.value)


# Which states


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        ({}, 28, (2, 14, 25)),
        ({}, 7, (2, 3, 4)),
        ({"eagle_config": {LIST: [1, 13, 24]}}, 28, (2, 14, 25)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 36, (2, 18, 33)),
        ({"eagle_config": {LIST: []}}, 28, (2, 14, 25)),
        ({LIST: [1, 13, 24]}, 28, (2, 14, 25)),
        ({LIST: [2, 14, 25], "speculators_model_type": "eagle3"}, 28, (2, 14, 25)),
        ({"eagle_config": {LIST: [1, 13, 24]}, "speculators_model_type": "eagle3"}, 28, (2, 14, 25)),
        ({LIST: [0, 1, 2]}, 3, (1, 2, 3)),
        ({LIST: [0, 2, 3], "speculators_model_type": "eagle3"}, 3, (0, 2, 3)),
    ],
)
def test_lists_of_layers_count_outputs_except_those_of_speculators(config, layers, expected):
    assert read_base_state_layers(ConfigSection(config, "config.json"), layers) == expected


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        ({}, 5, f"key '{LIST}' is missing: for a language model of 5 layers"),
        ({}, 6, "of 6 layers it must list the three layers"),  # 2, 3, 3
        ({LIST: [1, 2]}, 28, f"{LIST} [1, 2]: expected 3 rising layers from 0 to 27"),
        ({LIST: [1, 2, 2]}, 28, "expected 3 rising layers"),
        ({LIST: [5, 3, 9]}, 28, "expected 3 rising layers"),
        ({LIST: [-1, 3, 9]}, 28, "expected 3 rising layers"),
        ({LIST: [1, 3, 28]}, 28, "from 0 to 27 for a language model of 28 layers"),
        ({LIST: [1, 3, 29], "speculators_model_type": "eagle3"}, 28, "from 0 to 28"),
        ({LIST: "all"}, 28, "expected a list of integers"),
        ({"eagle_config": {LIST: [1, 2, 99]}}, 28, f"eagle_config: {LIST} [1, 2, 99]"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            28,
            "use_aux_hidden_state False: supported: True",
        ),
    ],
)
def test_a_list_of_layers_that_makes_no_sense_is_refused(config, layers, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_base_state_layers(ConfigSection(config, "config.json"), layers)


# What a head has


def test_the_rope_is_the_head_s_own(base, tmp_path):
    assert base_config(base)["rope_parameters"]["rope_theta"] == 5e5
    found = draft_config(base, write_head(base, tmp_path)).rope
    assert found.theta == 10000.0
    assert found.frequencies[1] == pytest.approx(10000.0 ** (-1 / 8))


def test_rope_of_type_llama3_is_read(base, tmp_path):
    scaling = {**LLAMA3, "original_max_position_embeddings": 128}
    found = draft_config(base, write_head(base, tmp_path, rope_theta=5e5, rope_scaling=scaling)).rope
    assert found.frequencies[0] == 1.0
    assert found.frequencies[-1] == pytest.approx(5e5 ** (-7 / 8) / 8)


@pytest.mark.parametrize(("interleaved", "expected"), [(True, True), (False, False), (None, False)])
def test_sections_of_mrope_are_read(base, tmp_path, interleaved, expected):
    given = {} if interleaved is None else {"mrope_interleaved": interleaved}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], **given}
    found = draft_config(base, write_head(base, tmp_path, rope_theta=5e6, rope_scaling=rope)).rope
    assert found.mrope_section == (4, 2, 2)
    assert found.mrope_interleaved == expected


def test_an_embedding_table_equal_to_the_base_s_is_shared(base, tmp_path):
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    assert draft_config(base, write_head(base, tmp_path, embedding=table)).shares_embedding


def test_an_embedding_table_of_its_own_is_written(base, tmp_path):
    table = np.random.default_rng(0).standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    config = export(base, tmp_path / "engine", draft=write_head(base, tmp_path, embedding=table))
    assert not config.draft.shares_embedding
    written = load_file(tmp_path / "engine" / "draft" / "embedding.safetensors")["embedding"]
    np.testing.assert_array_equal(written, table)


def test_a_head_may_be_narrower_than_its_base(base, tmp_path):
    table = np.ones((VOCABULARY, 40), np.float16)
    head = write_head(base, tmp_path, hidden_size=40, embedding=table)
    config = export(base, tmp_path / "engine", draft=head)
    assert (config.draft.hidden_size, config.llm.hidden_size) == (40, HIDDEN)
    graphs = {part.name: part for part in inspect(tmp_path / "engine").parts}
    shapes = {binding.name: binding.shape for binding in graphs["llm/verify"].outputs}
    assert shapes["fused_hidden_states"] == ("B", "S", 40)
    shapes = {binding.name: binding.shape for binding in graphs["draft"].inputs}
    assert shapes["inputs_embeds"] == shapes["hidden_states"] == ("B", "S", 40)


def test_a_head_without_an_lm_head_has_the_base_s_whole_vocabulary(base, tmp_path):
    config = export(base, tmp_path / "engine", draft=write_head(base, tmp_path, vocabulary=None))
    assert config.draft.vocab_size == VOCABULARY
    assert not (tmp_path / "engine" / "draft" / "d2t.safetensors").exists()


def test_a_vocabulary_without_a_size_in_the_config_is_that_of_the_lm_head(base, head):
    change(head / "config.json", ["draft_vocab_size"], ...)
    assert draft_config(base, head).vocab_size == 40


def test_leftovers_of_training_are_skipped(base, head):
    edit(
        head,
        target_model__norm__weight=ANY,
        verifier_lm_head__weight=ANY,
        midlayer__self_attn__rotary_emb__inv_freq=ANY,
    )
    assert draft_config(base, head) is not None


# Refusals


def test_a_pickle_of_pytorch_is_refused_with_advice(base, head):
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    assert_refused(base, head, "pytorch_model.bin: a PyTorch pickle", "weights_only=True")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dspark_config": {}, "block_size": 7},
            "a DSpark drafter; supported are heads of EAGLE-3 and DFlash",
        ),
        ({"kv_lora_rank": 512}, "kv_lora_rank 512: a head with latent attention (MLA)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8': quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': supported: silu"),
        ({"vocab_size": 999}, "vocab_size 999: the language model has 302"),
        ({"draft_vocab_size": 999}, "draft_vocab_size 999: expected at most the language model's 302"),
        ({"draft_vocab_size": 41}, "tensor 'd2t' has shape [40], but by the config it is [41]"),
        ({"num_attention_heads": 3}, "num_attention_heads 3: 'midlayer.self_attn.q_proj.weight' has 64 rows"),
        ({"num_key_value_heads": 1}, "'midlayer.self_attn.k_proj.weight' has shape [32, 128]"),
        ({"intermediate_size": 60}, "by the config it is [64, 60]"),
        ({"hidden_size": 32}, "by the config it is"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2: the last layer in model.safetensors is 'layers.0'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000: the last layer in model.safetensors is"),
        ({"fc_norm": True}, "tensor 'fc_norm.0.weight' is missing"),
        ({"norm_before_fc": True}, "tensor 'input_norm.weight' is missing"),
        ({"attention_bias": True}, "tensor 'layers.0.self_attn.k_proj.bias' (or 'midlayer.self_attn.k_proj"),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            "short_factor",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic': supported"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(base, head, changes, message):
    config = json.loads((head / "config.json").read_text())
    write_json(head / "config.json", config | changes)
    assert_refused(base, head, message)


def test_longrope_beyond_its_first_limit_is_refused(base, tmp_path):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8}
    head = write_head(base, tmp_path, rope_scaling=rope)
    assert_refused(base, head, "max_kv_cache_capacity 448 exceeds original_max_position_embeddings, up to")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mask_hidden": ANY}, "tensor 'mask_hidden': a P-EAGLE head"),
        ({"midlayer__self_attn__kv_a_proj_with_mqa__weight": ANY}, "a head with latent attention (MLA)"),
        ({"mtp__pre_fc_norm_hidden__weight": ANY}, "an MTP head, which is read with its checkpoint"),
        ({"midlayer__mlp__up_proj__weight_scale": ANY}, "weight_scale': a quantised head"),
        ({"midlayer__self_attn__o_proj._pre_quant_scale": ANY}, "_pre_quant_scale': a quantised head"),
        ({"lm_head__bias": ANY}, "tensor 'lm_head.bias' is no part of a draft head"),
        ({"midlayer__hidden_norm__weight": None}, "(or 'midlayer.hidden_norm.weight') is missing"),
        ({"midlayer__self_attn__q_proj__weight": None}, "(or 'midlayer.self_attn.q_proj.weight') is"),
        ({"fc__weight": None}, "tensor 'fc.weight' is missing"),
        ({"norm__weight": np.zeros(9, np.float16)}, "tensor 'norm.weight' has shape [9]"),
        ({"norm__weight": np.zeros(HIDDEN, np.int32)}, "tensor 'norm.weight' has dtype I32"),
        ({"layers__0__hidden_norm__weight": ANY}, "are the same part of the head"),
        ({"embed_tokens__weight": np.zeros((9, HIDDEN), np.float16)}, "by the config it is [302, 64]"),
        ({"d2t": None}, "tensor 'd2t' is missing: draft_vocab_size 40 is not the language model's"),
        ({"lm_head__weight": None}, "tensor 'lm_head.weight' is missing: draft_vocab_size 40"),
        ({"d2t": np.zeros(40, np.float16)}, "tensor 'd2t' has dtype F16; supported: I32, I64"),
        ({"d2t": np.full(40, 263)}, "tensor 'd2t': logit 39 is that of token 302, outside of the vocabulary"),
        ({"d2t": np.full(40, -1)}, "tensor 'd2t': logit 0 is that of token -1"),
        ({"d2t": -np.arange(40)}, "tensor 'd2t': 40 logits are those of token 0, expected one"),
    ],
)
def test_tensors_that_are_not_supported_are_refused(base, head, tensors, message):
    edit(head, **tensors)
    assert_refused(base, head, message)


def test_a_head_of_another_width_is_refused(base, head):
    edit(head, fc__weight=np.zeros((HIDDEN, 3 * 32), np.float16))
    assert_refused(base, head, "takes three states of 32 values", "hidden_size 64: a head of another model")


def test_a_head_of_another_eagle_is_refused(base, head):
    edit(head, fc__weight=np.zeros((HIDDEN, 2 * HIDDEN), np.float16))
    assert_refused(base, head, "'fc.weight' has shape [64, 128]: no EAGLE-3 head", "3 x 64 = 192 values")


def test_a_drafter_of_another_kind_is_named_if_its_tensors_are_unknown(base, head):
    change(head / "config.json", ["architectures"], ["Qwen3DFlashDraftModel"])
    edit(head, midlayer__hidden_norm__weight=None)
    assert_refused(base, head, "is missing; DFlash by its config ('Qwen3DFlashDraftModel')")


def test_a_quantised_head_of_model_optimizer_is_refused(base, head):
    write_json(head / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    assert_refused(base, head, "quant_algo 'NVFP4': quantised weights are not supported")


def test_both_norms_before_fc_are_refused(base, tmp_path):
    head = write_head(base, tmp_path, fc_norm=True, input_norm=True)
    assert_refused(base, head, "fc_norm and input_norm in one head")


def test_a_norm_that_the_config_denies_is_refused(base, tmp_path):
    head = write_head(base, tmp_path, fc_norm=True)
    change(head / "config.json", ["fc_norm"], False)
    assert_refused(base, head, "fc_norm False: the tensors of this norm are in the file")


def test_a_narrower_head_needs_a_table_of_its_own(base, tmp_path):
    head = write_head(base, tmp_path, hidden_size=40)
    assert_refused(base, head, "tensor 'embed_tokens.weight' is missing: a head of hidden_size 40")


def test_a_narrower_head_needs_an_lm_head_of_its_own(base, tmp_path):
    table = np.ones((VOCABULARY, 40), np.float16)
    head = write_head(base, tmp_path, hidden_size=40, embedding=table, vocabulary=None)
    assert_refused(base, head, "tensor 'lm_head.weight' is missing: a head of hidden_size 40")


def test_a_directory_without_a_head_is_refused(base, tmp_path):
    assert_refused(base, tmp_path / "none", "expected the directory of a draft head, found none")
    (tmp_path / "empty").mkdir()
    assert_refused(base, tmp_path / "empty", "config.json not found")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_verify_tree_size": 448}, "must be less than max_kv_cache_capacity 448"),
        ({"max_verify_tree_size": 1}, "max_verify_tree_size must be at least 2, got 1"),
        ({"max_draft_tree_size": 0}, "max_draft_tree_size must be at least 1, got 0"),
    ],
)
def test_a_tree_that_is_not_possible_is_refused(base, head, limits, message):
    with pytest.raises(ValueError, match=message):
        check(base, ExportOptions(draft=head, **limits))


# The engine directory


@pytest.fixture(scope="module")
def engine(base, tmp_path_factory) -> Path:
    """An engine with a head from the checkpoint's folder `draft`."""
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = write_decoder_checkpoint(folder / "checkpoint", "llama")
    write_random_head(checkpoint / "draft", base_config(checkpoint), layers=2)
    export(checkpoint, folder / "engine", max_batch_size=3, max_draft_tree_size=20, max_verify_tree_size=12)
    return folder / "engine"


def test_a_head_in_the_checkpoint_is_exported_unless_it_is_left_out(engine, tmp_path):
    checkpoint = engine.parent / "checkpoint"
    assert EngineConfig.load(engine).draft.max_verify_tree_size == 12
    config = export(checkpoint, tmp_path / "engine", with_draft=False)
    assert config.draft is None
    assert not (tmp_path / "engine" / "draft").exists()
    assert not (tmp_path / "engine" / "llm" / "verify.onnx").exists()


def test_an_export_without_a_head_removes_the_files_of_an_earlier_one(engine, tmp_path):
    checkpoint = engine.parent / "checkpoint"
    export(checkpoint, tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    export(checkpoint, tmp_path, with_draft=False)
    removed = {path.relative_to(tmp_path).as_posix() for path in before if not path.exists()}
    endings = (".onnx", ".cpu.onnx", ".cuda.onnx", ".chain.cuda.onnx", ".onnx.data")
    of_draft = ("d2t.safetensors", *(f"model{ending}" for ending in endings))
    of_base = tuple(f"verify{ending}" for ending in endings)
    assert removed == {f"draft/{name}" for name in of_draft} | {f"llm/{name}" for name in of_base}


def test_the_weights_of_the_base_are_stored_once(engine, tmp_path):
    export(engine.parent / "checkpoint", tmp_path, with_draft=False)
    data = "llm/model.onnx.data"
    assert (engine / data).read_bytes() == (tmp_path / data).read_bytes()
    assert (engine / "llm" / "verify.onnx.data").stat().st_size == 3 * HIDDEN * HIDDEN * 4  # fc


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_check_tells_files_and_memory_of_the_export(engine, tmp_path, precision):
    checkpoint = engine.parent / "checkpoint"
    report = check(checkpoint, ExportOptions(precision=precision))
    export(checkpoint, tmp_path, precision=precision)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    del files["config.json"]
    assert report.files == {name: path.stat().st_size for name, path in sorted(files.items())}
    exported = inspect(tmp_path)
    assert (report.memory, report.parts) == (exported.memory, exported.parts)


def test_reports_tell_of_the_head_and_its_memory(engine):
    report = inspect(engine)
    rows = 3 * (448 + 20)
    assert report.memory.draft_kv_cache == rows * 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size
    assert report.memory.draft_embedding == 0
    assert [part.name for part in report.parts] == ["llm", "llm/verify", "draft"]
    weights = {part.name: part.weight_bytes for part in report.parts}
    assert weights["llm/verify"] < 1.1 * 3 * HIDDEN * HIDDEN * 4
    texts = render(report), render_check(check(engine.parent / "checkpoint"))
    for text in texts:
        assert "2 layers of 64, vocabulary 40, states at the inputs of layers 1, 2 and 3" in text
        assert "KV cache of the draft head" in text
    assert "llm/verify.onnx: opset 24" in texts[0]


def test_a_graph_with_weights_of_its_own_names_all_its_files_of_weights(engine):
    import hashlib

    import onnx

    files = [engine / "llm" / f"{name}.onnx.data" for name in ("model", "verify")]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    for name, expected in (("model", digests[:1]), ("verify", digests)):
        model = onnx.load(engine / "llm" / f"{name}.onnx", load_external_data=False)
        found = {entry.key: entry.value for entry in model.metadata_props}
        assert found["weights_sha256"] == ",".join(expected)


def test_only_the_head_s_map_is_read_before_the_files_are_written(base, head, monkeypatch):
    from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor

    read, original = [], StoredTensor.read

    def recorded(self, *rows):
        read.append(self.name)
        return original(self, *rows)

    monkeypatch.setattr(StoredTensor, "read", recorded)
    check(base, ExportOptions(draft=head))
    assert read == ["d2t"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_state_layers": [1, 2]}, r"config\.json\.draft: base_state_layers must be 3 rising numbers"),
        ({"base_state_layers": [1, 2, 4]}, "the language model has 3 layers"),
        ({"vocab_size": 999}, "draft vocab_size 999 is more than llm vocab_size 302"),
        ({"hidden_size": 32}, "it cannot share the embedding table"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 14}, "8 frequencies, more than the pairs of head_dim 14"),
        ({"max_verify_tree_size": 448}, "must be less than max_kv_cache_capacity 448"),
        ({"theta": 1}, r"draft: unknown key 'theta'"),
    ],
)
def test_a_wrong_section_of_an_engine_is_an_error(engine, tmp_path, changes, message):
    data = json.loads((engine / "config.json").read_text())
    data["draft"] |= changes
    write_json(tmp_path / "config.json", data)
    with pytest.raises(ValueError, match=message):
        EngineConfig.load(tmp_path)


def test_the_fusion_of_large_states_stays_finite_in_half_precision(base, tmp_path):
    """The first token of a text may have such states.

    NaN there would be NaN everywhere.
    """
    from edgellm_ros.engine.onnxruntime.session import open_session
    from fixtures.exported_graphs import CAPACITY

    head = write_head(base, tmp_path, tensors={"fc.weight": np.full((HIDDEN, 3 * HIDDEN), 8, np.float16)})
    export(base, tmp_path / "engine", precision="fp16", draft=head)
    session = open_session(tmp_path / "engine" / "llm" / "verify.onnx")
    inputs = {
        node.name: np.zeros(
            [size if isinstance(size, int) else 1 for size in node.shape],
            {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(bool)": bool}.get(
                node.type, np.int64
            ),
        )
        for node in session.get_inputs()
    }
    inputs["inputs_embeds"][:] = 2e4
    inputs["attention_mask"][..., 0] = True
    assert inputs["attention_mask"].shape[3] == CAPACITY
    (fused,) = session.run(["fused_hidden_states"], inputs)
    assert float(fused.max()) == 65504.0
    assert math.isfinite(float(fused.min()))


@pytest.mark.parametrize(
    ("large_from", "precision", "rounds"), [(1, "fp32", True), (1, "fp16", False), (2**30, "fp32", False)]
)
def test_a_large_head_multiplies_in_8_bits_on_a_cpu(
    base, head, tmp_path, monkeypatch, large_from, precision, rounds
):
    monkeypatch.setattr(artefacts, "LARGE_HEAD", large_from)
    export(base, tmp_path / "engine", draft=head, precision=precision)
    graph = onnx.load(tmp_path / "engine" / "draft" / "model.cpu.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert ("DynamicQuantizeMatMul" in operators) == rounds
    assert ("MatMul" in operators) != rounds
