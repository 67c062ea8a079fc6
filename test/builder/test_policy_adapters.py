# SPDX-License-Identifier: Apache-2.0
"""Policies that were trained with PEFT: an adapter in place of the weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.policy_folders import ALPHA, MODULES, RANK, change_json, copied, write_policy_adapter
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_smolvla(tmp_path_factory.mktemp("smolvla"))


def weights_of(folder):
    """Read all weights of the graphs that an export would write."""
    graphs = plan_export(folder, ExportOptions()).graphs
    return {
        (path, name): value.const_value.numpy()
        for path, graph in graphs.items()
        for name, value in graph.graph.initializers.items()
    }


@pytest.mark.parametrize("place", ["named", "in the folder"])
def test_an_adapter_is_merged_into_its_base(checkpoint, tmp_path, place):
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    merged.mkdir()
    tensors = write_policy_adapter(checkpoint, adapter, None if place == "named" else "someone/a_base")
    if place != "named":
        (adapter / "base").symlink_to(checkpoint)
    copied(checkpoint, merged)
    weights = load_file(checkpoint / "model.safetensors")
    for module in MODULES:
        a, b = (tensors[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + ALPHA / RANK * b @ a
    (merged / "model.safetensors").unlink()
    save_file(weights, merged / "model.safetensors")
    found, expected, base = (weights_of(folder) for folder in (adapter, merged, checkpoint))
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-5, err_msg=str(key))
    assert sum(not np.array_equal(found[key], base[key]) for key in base) >= len(MODULES)


def test_a_base_that_is_not_here_is_an_error_with_the_way_to_get_it(checkpoint, tmp_path):
    write_policy_adapter(checkpoint, tmp_path, "someone/a_base")
    message = r"adapter_config.json: base_model_name_or_path 'someone/a_base': .* hf download"
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA': supported is LORA"),
        ({"use_dora": True}, "use_dora True: not supported, only plain LoRA is"),
        ({"modules_to_save": ["action_out_proj"]}, "modules_to_save .*: not supported, only plain LoRA is"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path None: expected a string"),
        ({"base_model_name_or_path": ""}, "base_model_name_or_path '': expected the name of the base"),
        ({"r": 3}, r"lora_A of model.\S+ is \[2, \d+\], but by rank and engine it must be \[3"),
    ],
)
def test_another_adapter_is_refused(checkpoint, tmp_path, changes, message):
    write_policy_adapter(checkpoint, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        plan_export(tmp_path, ExportOptions())


def test_a_base_of_another_type_is_refused(checkpoint, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    write_policy_adapter(checkpoint, adapter, str(base))
    write_json(base / "config.json", {"type": "act"})
    with pytest.raises(ValueError, match=r"base/config.json: type 'act': supported: smolvla"):
        plan_export(adapter, ExportOptions())


def test_an_adapter_beside_weights_is_refused(checkpoint, tmp_path):
    """The base alone would answer."""
    write_policy_adapter(checkpoint, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    change_json(tmp_path / "config.json", lambda config: config.update(use_peft=False))
    assert not json.loads((tmp_path / "config.json").read_text())["use_peft"]
    with pytest.raises(ValueError, match=r"config.json: use_peft False: expected true beside adapter_config"):
        plan_export(tmp_path, ExportOptions())
