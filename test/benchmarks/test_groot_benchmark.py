# SPDX-License-Identifier: Apache-2.0
"""The benchmark of GR00T: sizes of the published model, and a run at small ones."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest

from benchmarks import groot
from benchmarks.groot_n16_shapes import EAGLE, N1_6
from benchmarks.groot_shapes import MODEL, N1_7, VLM, groot_shapes
from fixtures.groot_checkpoint import TINY, model_config, write_vlm
from fixtures.groot_n16_checkpoint import write_eagle


@pytest.mark.parametrize(
    ("part", "billions"),
    [("backbone.", 1.5), ("action_head.model.", 1.09), ("action_head.vl_self_attention.", 0.2)],
)
def test_shapes_have_the_published_number_of_weights(part, billions):
    shapes = groot_shapes(MODEL, VLM)
    values = sum(prod(shape) for name, shape in shapes.items() if name.startswith(part))
    assert values / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_weights_of_embodiments_are_a_third_of_a_billion():
    shapes = groot_shapes(MODEL, VLM).items()
    values = sum(prod(shape) for name, shape in shapes if name.endswith((".W", ".b")))
    assert values / 1e9 == pytest.approx(0.33, rel=0.02)


def test_a_run_tells_the_time_of_a_chunk_by_stage(tmp_path, monkeypatch, capsys):
    vlm = write_vlm(tmp_path)
    vlm = vlm | {"image_token_id": VLM["image_token_id"]}
    vlm["text_config"]["vocab_size"] = VLM["text_config"]["vocab_size"]
    model = model_config(TINY, vlm["text_config"]["hidden_size"]) | {"max_num_embodiments": 11}
    version = dataclasses.replace(N1_7, small=lambda layers: (model, vlm))
    monkeypatch.setitem(groot.VERSIONS, "n1.7", version)
    found = groot.main(["--layers", "2", "--precision", "fp32", "--runs", "2", "--cameras", "1"])
    assert found["chunk"]["median"] >= found["action"]["median"] > 0
    assert found["parameters"] == sum(map(prod, groot_shapes(model, vlm).values()))
    assert '"benchmark": "groot"' in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_n16_has_its_sizes(tmp_path, monkeypatch):
    eagle = write_eagle(tmp_path) | {"image_token_index": EAGLE["image_token_index"]}
    eagle["text_config"]["vocab_size"] = EAGLE["text_config"]["vocab_size"]
    model, _ = N1_6.small(2)
    tiny = model_config(TINY, eagle["text_config"]["hidden_size"]) | {"max_num_embodiments": 11}
    del tiny["vl_self_attention_cfg"]
    names = ("model_type", "model_name", "backbone_model_type")
    tiny |= {name: model[name] for name in names}
    version = dataclasses.replace(N1_6, small=lambda layers: (tiny, eagle))
    monkeypatch.setitem(groot.VERSIONS, "n1.6", version)
    options = ["--version", "n1.6", "--layers", "2", "--precision", "fp32", "--runs", "1", "--cameras", "1"]
    found = groot.main(options)
    assert found["parameters"] == sum(map(prod, N1_6.shapes(tiny, eagle).values()))
    assert found["version"] == "n1.6"


@pytest.mark.parametrize(
    ("part", "billions"), [("backbone.model.vision", 0.41), ("backbone.", 1.5), ("action_head.model.", 1.09)]
)
def test_shapes_of_n16_are_those_of_its_parts(part, billions):
    """SigLIP So400m, 16 layers of a Qwen3-1.7B with its table, the DiT of N1.7."""
    shapes = N1_6.shapes(N1_6.model, N1_6.vlm)
    values = sum(prod(shape) for name, shape in shapes.items() if name.startswith(part))
    assert values / 1e9 == pytest.approx(billions, rel=0.05)


def test_pytorch_is_for_n17_alone(capsys):
    with pytest.raises(SystemExit):
        groot.main(["--version", "n1.6", "--pytorch"])
    assert "LeRobot has GR00T N1.7 alone, not n1.6" in capsys.readouterr().err
