# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.prompt.rope import get_rope_index, make_rope_table
from fixtures.on_device import put
from fixtures.reference_inputs import IMAGE_TOKEN, VISION_START, prompt_ids

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "transformers_references.json").read_text())


@pytest.mark.parametrize("reference", REFERENCES["rope"], ids=lambda r: str(r["grids"]))
def test_positions_equal_those_of_transformers(reference):
    ids = prompt_ids(reference["texts"], reference["grids"])
    positions, delta = get_rope_index(ids, reference["grids"], IMAGE_TOKEN, VISION_START)
    assert positions.tolist() == reference["positions"]
    assert delta == reference["delta"]


def test_text_alone_counts_up():
    positions, delta = get_rope_index([5, 6, 7], [], None, None)
    assert positions.tolist() == [[0, 1, 2]] * 3
    assert delta == 0
    assert get_rope_index([5], [], IMAGE_TOKEN, VISION_START)[0].tolist() == [[0]] * 3


def test_images_that_are_not_in_the_prompt_are_an_error():
    ids = prompt_ids([2, 2], [(2, 3)])
    with pytest.raises(ValueError, match="the prompt has 1 images, expected 2"):
        get_rope_index(ids, [(2, 3), (2, 3)], IMAGE_TOKEN, VISION_START)
    for grid in [(2, 4), (20, 30)]:
        with pytest.raises(ValueError, match=r"an image of \d+ x \d+ tokens needs \d+ placeholders in a row"):
            get_rope_index(ids, [grid], IMAGE_TOKEN, VISION_START)


@pytest.mark.parity
def test_rotary_rows_equal_those_of_transformers(device, kernels, tiny_engine):
    torch = pytest.importorskip("torch")
    omni = pytest.importorskip("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    config = EngineConfig.load(tiny_engine).llm
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope.theta,
        "mrope_section": list(config.rope.mrope_section),
    }
    text = omni.Qwen3OmniMoeTextConfig(head_dim=config.head_dim, rope_parameters=rope)
    ids = prompt_ids([3, 2, 9], [(2, 3), (4, 5)])
    positions, _ = get_rope_index(ids, [(2, 3), (4, 5)], IMAGE_TOKEN, VISION_START)
    half = config.head_dim // 2
    expected = omni.Qwen3OmniMoeThinkerTextRotaryEmbedding(text)(
        torch.zeros(1), torch.tensor(positions)[:, None]
    )

    table = make_rope_table(config.rope, 64, device)
    cos, sin = (device.empty((1, len(ids), half), np.float32) for _ in "cs")
    kernels.mrope_rows(table, put(device, positions[None]), config.rope.mrope_section, True, cos, sin)
    np.testing.assert_allclose(device.download(cos), expected[0][..., :half].numpy(), atol=2e-6)
    np.testing.assert_allclose(device.download(sin), expected[1][..., :half].numpy(), atol=2e-6)
