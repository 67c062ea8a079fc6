# SPDX-License-Identifier: Apache-2.0
"""The benchmark of GR00T: sizes of the published model, and a run at small ones."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks import groot
from benchmarks.groot_shapes import MODEL, VLM, groot_shapes
from fixtures.groot_checkpoint import TINY, model_config, write_vlm


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
    monkeypatch.setattr(groot, "small", lambda layers: (model, vlm))
    found = groot.main(["--layers", "2", "--precision", "fp32", "--runs", "2", "--cameras", "1"])
    assert found["chunk"]["median"] >= found["action"]["median"] > 0
    assert found["parameters"] == sum(map(prod, groot_shapes(model, vlm).values()))
    assert '"benchmark": "groot"' in capsys.readouterr().out.splitlines()[-1]
