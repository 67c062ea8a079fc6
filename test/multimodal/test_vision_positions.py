# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

from edgellm_ros.multimodal.vision_positions import vision_positions
from fixtures.vision_config import CONFIG, EAGLE, WINDOWS

GRIDS = [(14, 20), (2, 2), (2, 36), (24, 24), (46, 30)]


@pytest.mark.parity
@pytest.mark.parametrize("grid", GRIDS)
def test_positions_equal_those_of_transformers(grid):
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    omni = pytest.importorskip("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    grid_thw = torch.tensor([[1, *grid]])
    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        grid_thw, CONFIG.grid_side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    positions = vision_positions(*grid, CONFIG)
    np.testing.assert_array_equal(positions["pos_embed_index"], index.T.numpy())
    np.testing.assert_array_equal(positions["pos_embed_weight"], weight.T.numpy())

    omni_config = omni.Qwen3OmniMoeVisionEncoderConfig(
        hidden_size=CONFIG.hidden_size, num_heads=CONFIG.num_heads, rope_parameters={"rope_theta": 10000.0}
    )
    rotary = omni.Qwen3OmniMoeVisionRotaryEmbedding(omni_config)
    ids = vision_utils.get_vision_position_ids(grid_thw, 2)
    cos, sin = rotary(torch.zeros(1), ids)
    half = CONFIG.head_dim // 2
    np.testing.assert_allclose(positions["rope_cos"], cos[:, :half].numpy(), atol=2e-6)
    np.testing.assert_allclose(positions["rope_sin"], sin[:, :half].numpy(), atol=2e-6)


@pytest.mark.parity
@pytest.mark.parametrize("grid", [*GRIDS, (4, 6), (6, 4)])
def test_positions_of_siglip_2_are_resampled_as_by_pytorch(grid):
    torch = pytest.importorskip("torch")
    table = np.random.default_rng(0).normal(size=(EAGLE.num_position_embeddings, 8)).astype(np.float32)
    learned = torch.tensor(table).reshape(1, EAGLE.grid_side, EAGLE.grid_side, 8).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        learned, size=grid, mode="bilinear", align_corners=False, antialias=True
    )
    rows, columns = (side // 2 for side in grid)
    expected = resized[0].numpy().reshape(8, rows, 2, columns, 2).transpose(1, 3, 2, 4, 0).reshape(-1, 8)
    np.testing.assert_allclose(
        vision_positions(*grid, EAGLE)["pos_embed_shares"] @ table, expected, atol=1e-5
    )


def test_patches_of_siglip_2_have_shares_of_the_points_around_them():
    side = EAGLE.grid_side
    shares = vision_positions(2, 4, EAGLE)["pos_embed_shares"]
    assert shares.shape == (8, side**2)
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-6)
    places = shares @ np.stack(np.divmod(np.arange(side**2), side), axis=1)
    assert (places[2:4] - places[:2])[:, 0].min() > 1  # patches 2 and 3 are below 0 and 1
    assert (places[4:6] - places[:2])[:, 1].min() > 1  # 4 and 5 are in the next block
    np.testing.assert_allclose(places[:2].mean(axis=0)[1] + places[4:6].mean(axis=0)[1], side - 1, atol=1e-5)
    exact = vision_positions(side * 2, side * 2, EAGLE)["pos_embed_shares"]
    assert exact[0].argmax() == 0
    assert exact[0].max() == 1


def test_patches_come_merge_block_by_merge_block():
    positions = vision_positions(4, 4, CONFIG)
    side = CONFIG.grid_side
    corners = positions["pos_embed_index"][0][[0, 5, 10, 15]]  # one of each block: (0,0), (0,3), (3,0), (3,3)
    rows, columns = corners // side, corners % side
    assert rows.tolist() == [0, 0, side - 1, side - 1]
    assert columns.tolist() == [0, side - 1, 0, side - 1]


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_of_a_patch_sum_to_one_and_corners_keep_the_learned_values(grid):
    positions = vision_positions(*grid, CONFIG)
    np.testing.assert_allclose(positions["pos_embed_weight"].sum(axis=0), 1, atol=1e-6)
    assert positions["pos_embed_index"].min() == 0
    assert positions["pos_embed_index"].max() == CONFIG.grid_side**2 - 1
    np.testing.assert_array_equal(positions["pos_embed_weight"][:, 0], [1, 0, 0, 0])


WHOLE, PARTIAL, SMALL = (16, 24), (34, 46), (2, 6)


@pytest.mark.parity
@pytest.mark.parametrize("grid", [WHOLE, PARTIAL, SMALL])
def test_windows_have_the_patches_that_they_have_in_transformers(grid):
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    order, ends = vision_utils.get_vision_window_index(torch.tensor([[1, *grid]]), 2, 112, 14)
    patches = (order[:, None] * 4 + torch.arange(4)).flatten().numpy()
    positions = vision_positions(*grid, WINDOWS)
    filled = positions["window_mask"][:, 0, 0]
    assert filled.sum(axis=1).tolist() == ends.diff().tolist()
    np.testing.assert_array_equal(positions["window_index"][filled], patches)


@pytest.mark.parametrize("grid", [WHOLE, PARTIAL, SMALL])
def test_each_patch_is_at_its_place_in_the_windows(grid):
    positions = vision_positions(*grid, WINDOWS)
    places = positions["patch_index"]
    np.testing.assert_array_equal(positions["window_index"].reshape(-1)[places], np.arange(grid[0] * grid[1]))
    assert positions["window_mask"][:, 0, 0].reshape(-1)[places].all()


def test_every_patch_of_a_window_sees_the_same_patches():
    mask = vision_positions(*PARTIAL, WINDOWS)["window_mask"]
    assert mask.shape == (30, 1, 64, 64)
    assert (mask == mask[:, :, :1]).all()


def test_towers_without_windows_have_no_inputs_for_them():
    config = dataclasses.replace(WINDOWS, full_attention_blocks=(0, 1, 2, 3))
    assert vision_positions(*PARTIAL, config).keys() == {"rope_cos", "rope_sin"}
