# SPDX-License-Identifier: Apache-2.0
"""Loading PEFT adapter directories; test/parity compares with PEFT itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from edgellm_ros.engine_directory.adapters.peft_adapter import read_adapter
from fixtures.tiny_adapter import PREFIX, module_shapes, write_adapter

Q, DOWN = "layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def targets(tiny_checkpoint):
    text = json.loads((tiny_checkpoint / "config.json").read_text())["text_config"]
    return {f"model.{name}": shape for name, shape in module_shapes(text).items()}


@pytest.fixture
def write(tiny_checkpoint, tmp_path):
    """Function that writes an adapter, its tensors changed by a function."""

    def write(change=lambda tensors: None, **arguments):
        directory = write_adapter(tmp_path / "adapter", tiny_checkpoint, **arguments)
        path = directory / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return directory

    return write


def tensor(directory, module, matrix, prefix=PREFIX):
    return load_file(directory / "adapter_model.safetensors")[f"{prefix}{module}.lora_{matrix}.weight"]


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        ({"r": 4, "lora_alpha": 8}, {}, {Q: (4, 2.0), DOWN: (4, 2.0)}),
        ({"r": 2, "lora_alpha": 0.5}, {}, {Q: (2, 0.25), DOWN: (2, 0.25)}),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, {}, {Q: (4, 4.0)}),
        (
            {"rank_pattern": {"q_proj": 2, "mlp.down_proj": 6}},
            {"q_proj": 2, "down_proj": 6},
            {Q: (2, 4.0), DOWN: (6, 8 / 6), "layers.1.self_attn.o_proj": (4, 2.0)},
        ),
        (
            {"alpha_pattern": {r"layers\.[02]\.self_attn\.q_proj": 16, "q_proj": 1, "_proj": 99}},
            {},
            {"layers.0.self_attn.q_proj": (4, 4.0), Q: (4, 0.25), DOWN: (4, 2.0)},
        ),
        (
            {"use_rslora": True, "rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 3}},
            {"q_proj": 1},
            {Q: (1, 3.0), DOWN: (4, 4.0)},
        ),
    ],
    ids=["plain", "small alpha", "rslora", "rank_pattern", "alpha_pattern", "all"],
)
def test_rank_and_scaling_follow_the_config(write, targets, config, ranks, expected):
    directory = write(ranks=ranks, **config)
    adapter = read_adapter(directory, targets, max_rank=8)
    for module, (rank, scaling) in expected.items():
        a, b = adapter.weights[f"model.{module}"]
        assert (a.shape[1], b.shape[0]) == (rank, rank)
        np.testing.assert_array_equal(a, tensor(directory, module, "A").T)
        np.testing.assert_allclose(b, tensor(directory, module, "B").T * scaling, rtol=1e-6)
    assert adapter.rank == max(a.shape[1] for a, _ in adapter.weights.values())


@pytest.mark.parametrize(
    "path",
    [
        "model.language_model.",  # a thinker in transformers 5
        "model.",  # a thinker in transformers 4, or a language model
        "thinker.model.",  # the whole Qwen3-Omni in transformers 4
        "thinker.model.language_model.",  # and in transformers 5
        "language_model.",  # the thinker's inner model
        "backbone.",  # Nemotron-H in its published code
        "",  # the decoder alone
    ],
)
def test_the_decoder_is_found_in_every_model_that_peft_may_have_wrapped(write, targets, path):
    prefix = f"base_model.model.{path}"
    directory = write(prefix=prefix)
    adapter = read_adapter(directory, targets, max_rank=8)
    assert adapter.weights.keys() == targets.keys()
    a, _ = adapter.weights[f"model.{DOWN}"]
    np.testing.assert_array_equal(a, tensor(directory, DOWN, "A", prefix).T)


def test_modules_without_lora_weights_are_left_out(write, targets):
    adapter = read_adapter(write(modules=("q_proj", "up_proj")), targets, max_rank=8)
    assert {name.rpartition(".")[2] for name in adapter.weights} == {"q_proj", "up_proj"}


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_half_precision_files_become_float32(write, targets, dtype):
    directory = write(dtype=dtype, lora_alpha=4)
    for array, matrix in zip(
        read_adapter(directory, targets, max_rank=8).weights[f"model.{Q}"], "AB", strict=True
    ):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensor(directory, Q, matrix).T.astype(np.float32))


def drop(key):
    return lambda tensors: tensors.pop(f"{PREFIX}{key}")


def put(key, *shape, value=1.0, dtype=np.float32):
    return lambda tensors: tensors.update({f"{PREFIX}{key}": np.full(shape, value, dtype)})


BAD_TENSORS = {
    "one of two": (drop(f"{Q}.lora_B.weight"), rf"lora_B of model\.language_model\.{Q} is missing"),
    "another model's width": (
        put(f"{Q}.lora_A.weight", 4, 99),
        rf"lora_A of model\.language_model\.{Q} is \[4, 99\], .* must be \[4, 48\]: an adapter of another",
    ),
    "another rank than the config's": (put(f"{Q}.lora_B.weight", 64, 3), r"is \[64, 3\], .* be \[64, 4\]"),
    "more layers": (
        put("layers.3.mlp.up_proj.lora_A.weight", 4, 48),
        r"lora_B of model\.language_model\.layers\.3\.mlp\.up_proj is missing",
    ),
    "DoRA": (put(f"{Q}.lora_magnitude_vector", 64), "lora_magnitude_vector' is not the lora_A or lora_B"),
    "embedding": (put("embed_tokens.lora_embedding_A", 4, 302), "lora_embedding_A' is not the lora_A"),
    "whole module": (put("norm.weight", 48), r"norm\.weight' is not the lora_A or lora_B of a linear layer"),
    "NaN": (put(f"{Q}.lora_B.weight", 64, 4, value=np.nan), rf"{Q} has values that are not finite"),
    "integers": (put(f"{Q}.lora_B.weight", 64, 4, dtype=np.int32), "has dtype I32; supported: F16, BF16"),
    "nothing": (lambda tensors: tensors.clear(), "no tensors"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_not_plain_lora_of_this_model_are_named(write, targets, change, message):
    with pytest.raises(ValueError, match=rf"adapter_model\.safetensors: .*{message}"):
        read_adapter(write(change), targets, max_rank=8)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("lm_head", "lm_head"),
        ("model.audio_tower.layers.0.self_attn.k_proj", r"model\.audio_tower\.layers\.0\.self_attn\.k_proj"),
        ("model.language_model.layers.3.mlp.up_proj", r"model\.layers\.3\.mlp\.up_proj"),
        ("talker.model.layers.0.mlp.up_proj", r"talker\.model\.layers\.0\.mlp\.up_proj"),
    ],
)
def test_modules_without_lora_inputs_are_named_beside_those_with(write, targets, module, named):
    def change(tensors):
        for matrix in "AB":
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = np.ones((4, 4), np.float32)

    message = rf"no LoRA inputs for {named}; it has them for model\.layers\.\*\.mlp\.down_proj, .*v_proj$"
    with pytest.raises(ValueError, match=message):
        read_adapter(write(change), targets, max_rank=8)


def test_two_adapters_of_one_module_are_refused(write, targets):
    def change(tensors):
        for key in [key for key in tensors if Q in key]:
            tensors[key.replace("language_model.", "")] = tensors[key]

    with pytest.raises(ValueError, match="a module has more than one adapter"):
        read_adapter(write(change), targets, max_rank=8)


def test_a_rank_above_the_engine_s_names_both(write, targets):
    with pytest.raises(ValueError, match=r"has rank 16; this engine supports at most 8 \(max_lora_rank\)"):
        read_adapter(write(r=16), targets, max_rank=8)


BAD_CONFIGS = {
    "kind": ({"peft_type": "IA3"}, "peft_type 'IA3': supported is LORA"),
    "DoRA": ({"use_dora": True}, "use_dora True: not supported, only plain LoRA is"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only': supported is 'none'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias True: not supported"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]: not supported"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication .*: not supported"),
    "activated LoRA": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens .*: not supported"),
    "key of the future": ({"use_quux": True}, "use_quux True: not supported"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa': it changes the base model's"),
    "rank 0": ({"r": 0}, "r 0: expected a positive integer"),
    "rank with a point": ({"r": 4.0}, r"r 4\.0: expected a positive integer"),
    "alpha as text": ({"lora_alpha": "8"}, "lora_alpha '8': expected a positive number"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha inf: expected a positive number"),
    "rslora of words": ({"use_rslora": "yes"}, "use_rslora 'yes': expected true or false"),
    "pattern of words": (
        {"rank_pattern": {"q_proj": "2"}},
        "rank_pattern .*: expected an object of positive",
    ),
    "pattern that is none": ({"alpha_pattern": {"q_(proj": 2}}, r"alpha_pattern 'q_\(proj': not a regular"),
}


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_another_kind_of_adapter_is_refused_by_key_and_value(write, targets, config, message):
    directory = write()
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {message}"):
        read_adapter(directory, targets, max_rank=8)


def test_training_keys_and_empty_keys_are_ignored(write, targets):
    config = {"lora_dropout": 0.1, "target_modules": "all-linear", "inference_mode": True, "use_quux": None}
    assert read_adapter(write(**config), targets, max_rank=8).rank == 4


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(write, targets, size):
    path = write() / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: damaged or cut short"):
        read_adapter(path.parent, targets, max_rank=8)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x80"])
def test_a_damaged_config_is_refused(write, targets, text):
    path = write() / "adapter_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"adapter_config\.json: (not valid JSON|expected an object)"):
        read_adapter(path.parent, targets, max_rank=8)


def test_missing_files_are_named(write, targets, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: expected the directory of a PEFT adapter"):
        read_adapter(tmp_path / "nowhere", targets, max_rank=8)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json not found"):
        read_adapter(tmp_path, targets, max_rank=8)
    directory = write()
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin is not read, save .* as safetensors"):
        read_adapter(directory, targets, max_rank=8)


class TestOneFile:
    """One `.safetensors` file gives the weights that the directory gives."""

    @pytest.fixture
    def directory(self, write):
        return write(r=4, lora_alpha=8, rank_pattern={"q_proj": 2}, ranks={"q_proj": 2})

    @pytest.fixture
    def expected(self, directory, targets):
        return read_adapter(directory, targets, 8)

    def assert_equal(self, found, expected):
        assert found.rank == expected.rank
        assert found.weights.keys() == expected.weights.keys()
        for module, pair in expected.weights.items():
            for array, other in zip(found.weights[module], pair, strict=True):
                np.testing.assert_array_equal(array, other)

    def test_with_the_configuration_beside_it(self, directory, targets, expected):
        self.assert_equal(read_adapter(directory / "adapter_model.safetensors", targets, 8), expected)

    def test_with_the_configuration_in_its_header(self, directory, targets, expected, tmp_path):
        """The header wins over a configuration of another adapter in the same folder."""
        metadata = {"lora_adapter_metadata": (directory / "adapter_config.json").read_text()}
        tensors = load_file(directory / "adapter_model.safetensors")
        save_file(tensors, tmp_path / "alone.safetensors", metadata)
        self.assert_equal(read_adapter(tmp_path / "alone.safetensors", targets, 8), expected)
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 99}')
        self.assert_equal(read_adapter(tmp_path / "alone.safetensors", targets, 8), expected)

    def test_converted_for_tensorrt_edge_llm(self, directory, targets, expected, tmp_path):
        """Its names are the engine's, A is [K, r], and the scaling is in B [r, N]."""
        tensors = {}
        for module, (a, b) in expected.weights.items():
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        save_file(tensors, tmp_path / "processed_adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 99}')
        path = tmp_path / "processed_adapter_model.safetensors"
        self.assert_equal(read_adapter(path, targets, 8), expected)

    def test_a_converted_file_of_another_size_is_refused_in_its_own_layout(self, targets, tmp_path):
        k, n = targets[f"model.{DOWN}"]
        tensors = {
            f"model.{DOWN}.lora_A.weight": np.zeros((k, 2), np.float16),
            f"model.{DOWN}.lora_B.weight": np.zeros((2, n + 1), np.float16),
        }
        save_file(tensors, tmp_path / "other.safetensors")
        expected = rf"other\.safetensors: lora_B of model\.{DOWN} is \[2, {n + 1}\], .* must be \[2, {n}\]"
        with pytest.raises(ValueError, match=expected):
            read_adapter(tmp_path / "other.safetensors", targets, 8)

    def test_without_a_configuration_the_error_says_how_to_give_one(self, directory, targets, tmp_path):
        (directory / "adapter_model.safetensors").rename(tmp_path / "alone.safetensors")
        expected = r"alone\.safetensors: rank and alpha are missing: .*adapter_config\.json .* beside the"
        with pytest.raises(ValueError, match=expected):
            read_adapter(tmp_path / "alone.safetensors", targets, 8)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "lora_adapter_metadata: not valid JSON"),
            ("[" * 10_000, "lora_adapter_metadata: JSON that is nested too deep"),
            ("[]", "lora_adapter_metadata: expected an object, got list"),
            ('{"r": 4}', "lora_adapter_metadata: lora_alpha None: expected a positive number"),
            ('{"r": 4, "lora_alpha": 8, "use_dora": true}', "use_dora True: not supported"),
            ('{"r": 6, "lora_alpha": 8}', r"lora_A of .* is \[\d+, \d+\], but by rank"),
        ],
    )
    def test_a_damaged_configuration_in_the_header_is_named(
        self, directory, targets, tmp_path, text, message
    ):
        tensors = load_file(directory / "adapter_model.safetensors")
        save_file(tensors, tmp_path / "alone.safetensors", {"lora_adapter_metadata": text})
        with pytest.raises(ValueError, match=rf"alone\.safetensors: .*{message}"):
            read_adapter(tmp_path / "alone.safetensors", targets, 8)

    @pytest.mark.parametrize("contents", [b"", b"not a file of tensors", b"\xff" * 100])
    def test_a_damaged_file_is_named(self, targets, tmp_path, contents):
        (tmp_path / "alone.safetensors").write_bytes(contents)
        with pytest.raises(ValueError, match=r"alone\.safetensors: damaged or cut short"):
            read_adapter(tmp_path / "alone.safetensors", targets, 8)

    def test_a_file_with_another_ending_is_refused(self, targets, tmp_path):
        (tmp_path / "adapter.bin").write_bytes(b"")
        with pytest.raises(FileNotFoundError, match=r"adapter\.bin: expected the directory of a PEFT"):
            read_adapter(tmp_path / "adapter.bin", targets, 8)
