# SPDX-License-Identifier: Apache-2.0
"""Frequencies of each kind of RoPE, against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import is_plain, read_position_limit, read_rope

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
SEEDS = range(12)


def random_config(kind: str, seed: int) -> tuple[dict, int]:
    """Make a text section with RoPE of one kind, and its head size."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    head_dim = int(rng.choice([16, 36, 64, 80, 128, 256]))
    original = int(rng.choice([512, 2048, 8192]))
    factor = float(rng.choice([1.5, 4.0, 32.0]))
    rope: dict = {"rope_type": kind, "rope_theta": float(rng.choice([500.0, 1e4, 1e6, 5e6]))}
    if kind not in ("default", "longrope") or rng.random() < 0.5:
        rope["partial_rotary_factor"] = float(rng.choice([0.25, 0.5, 1.0]))
    if kind not in ("default", "proportional") or rng.random() < 0.5:
        rope["factor"] = factor
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        rope |= {"low_freq_factor": float(rng.choice([1, 2])), "high_freq_factor": float(rng.choice([4, 8]))}
    if kind == "yarn":
        choices = {
            "attention_factor": float(rng.uniform(0.8, 1.5)),
            "beta_fast": float(rng.choice([24, 32])),
            "beta_slow": float(rng.choice([1, 2])),
            "truncate": False,
        }
        rope |= {key: value for key, value in choices.items() if rng.random() < 0.5}
        if rng.random() < 0.5:
            rope |= {"mscale": 0.7, "mscale_all_dim": float(rng.choice([0.0, 1.2]))}
    if kind == "longrope":
        pairs = math.ceil(int(head_dim * rope.get("partial_rotary_factor", 1.0)) / 2)
        for name in ("short_factor", "long_factor"):
            rope[name] = rng.uniform(1, 4, pairs).tolist()
        if rng.random() < 0.5:
            rope["attention_factor"] = 1.25
    sizes = {"head_dim": head_dim, "max_position_embeddings": int(original * factor)}
    return {**sizes, "rope_parameters": rope}, head_dim


def make_section(values: dict) -> ConfigSection:
    return ConfigSection(values, "config.json")


def reference(values: dict, head_dim: int, sequence: int | None = None):
    """Compute frequencies and attention scaling as transformers does."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, **values
    )
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu", sequence)
        return frequencies.numpy(), scaling
    size = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float) / size  # as each model's rotary embedding
    return (1.0 / config.rope_parameters["rope_theta"] ** exponents).numpy(), 1.0


@pytest.mark.parity
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_scaling_equal_those_of_transformers(kind, seed):
    values, head_dim = random_config(kind, seed)
    found = read_rope(make_section(values), head_dim, partial_heads=True)
    frequencies, scaling = reference(values, head_dim)
    assert len(found.frequencies) == len(frequencies)
    # float32 powers of NumPy and PyTorch differ in the last bits
    np.testing.assert_allclose(found.frequencies, frequencies, rtol=1e-6, atol=0)
    assert found.attention_scaling == pytest.approx(scaling, rel=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_transformers_4_give_the_same(kind):
    """`rope_scaling` with `type`, and theta and partial factor beside it."""
    values, head_dim = random_config(kind, 3)
    rope = dict(values.pop("rope_parameters"))
    values |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    rope["type"] = rope.pop("rope_type")
    older = values | {"rope_scaling": None if rope["type"] == "default" else rope}
    found = read_rope(make_section(older), head_dim, partial_heads=True)
    assert found == read_rope(make_section(random_config(kind, 3)[0]), head_dim, partial_heads=True)
    np.testing.assert_allclose(found.frequencies, reference(older, head_dim)[0], rtol=1e-6, atol=0)


def test_default_frequencies_of_a_head_or_its_first_part_are_plain():
    assert is_plain(read_rope(make_section({"rope_theta": 5e5}), 64))
    assert is_plain(read_rope(make_section({"partial_rotary_factor": 0.5}), 64, partial_heads=True))
    assert not is_plain(read_rope(make_section({"rope_scaling": {"type": "linear", "factor": 2}}), 64))


def test_theta_of_a_checkpoint_without_one_is_the_model_code_s():
    assert read_rope(make_section({}), 64).theta == 10000
    assert read_rope(make_section({}), 64, default_theta=5e5).theta == 5e5


def test_longrope_has_as_many_positions_as_its_first_training():
    values, _ = random_config("longrope", 0)
    limit, name = read_position_limit(make_section(values))
    assert limit == values["rope_parameters"]["original_max_position_embeddings"]
    assert limit < values["max_position_embeddings"]
    assert "longrope" in name
    plain = make_section({"max_position_embeddings": 512})
    assert read_position_limit(plain) == (512, "max_position_embeddings")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic': supported: default, linear, llama3"),
        ({"type": "ntk"}, "type 'ntk': supported: default"),
        ({"rope_theta": 0.5}, r"rope_theta 0\.5: expected more than 1"),
        ({"rope_theta": 1e39}, r"rope_theta 1e\+39: expected at most 3\.4e\+38"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5: expected more than 0 and at most 1"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads, supported: 1"),
        ({"rope_type": "linear"}, "key 'factor' is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor 0: expected more than 0"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            r"high_freq_factor 4: expected more than low_freq_factor 4\.0",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor .*: expected 32 numbers above 0"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention .*: RoPE that differs between layers"),
    ],
)
def test_a_value_that_is_not_supported_is_named(rope, message):
    text = make_section({"max_position_embeddings": 512, "rope_parameters": rope})
    with pytest.raises(ValueError, match=f"config.json: rope_parameters.*{message}"):
        read_rope(text, 64)


def test_scaling_reaches_every_row_of_the_table(device):
    from edgellm_ros.runtime.prompt.rope import make_rope_table

    values, head_dim = random_config("longrope", 0)
    values["rope_parameters"]["attention_factor"] = 1.25
    config = read_rope(make_section(values), head_dim, partial_heads=True)
    table = make_rope_table(config, 20, device)
    angles = np.outer(np.arange(20), config.frequencies)
    np.testing.assert_allclose(device.download(table.cos), 1.25 * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(device.download(table.sin), 1.25 * np.sin(angles), atol=1e-5)
    assert math.isclose(float(device.download(table.cos)[0, 0]), 1.25)
