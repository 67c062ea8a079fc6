# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools

import numpy as np
import pytest
from PIL import Image

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels import EXCLUDED, DenoisingFactors, PatchLayout, RopeTable, StopState, load_kernels

RNG = np.random.default_rng(0)


def test_kernels_of_an_unknown_device_are_an_error():
    class Other:
        name, memory = "abacus", "beads"

    with pytest.raises(EngineError, match=r"'beads' \(device 'abacus'\)"):
        load_kernels(Other())


def test_patches_are_cut_tile_by_tile_and_merge_block_by_merge_block(side):
    levels = RNG.standard_normal((3, 256)).astype(np.float32)
    frames = RNG.integers(0, 256, (2, 3, 12, 16), np.uint8)
    out = side.tensor(np.zeros((48, 3 * 3 * 4), np.float32))  # 6 tiles of 4 x 8 pixels, patches of 2 x 2
    layout = PatchLayout(tile_height=4, tile_width=8, patch_size=2, block_size=4)
    side.kernels.cut_patches(side.tensor(levels), side.tensor(frames), layout, out)
    expected = []
    for tile_y, tile_x in np.ndindex(3, 2):
        for block_x in range(2):
            for patch_y, patch_x in np.ndindex(2, 2):
                y, x = 4 * tile_y + 2 * patch_y, 8 * tile_x + 4 * block_x + 2 * patch_x
                patch = frames[[0, 1, 1], :, y : y + 2, x : x + 2]  # the last frame is repeated
                expected.append([levels[c][patch[:, c]] for c in range(3)])
    np.testing.assert_array_equal(side.read(out), np.array(expected).reshape(48, -1))


@pytest.mark.parametrize(
    ("size", "resized"),
    [((48, 64), (134, 179)), ((48, 64), (20, 11)), ((1, 7), (5, 1)), ((31, 30), (31, 17)), ((9, 8), (9, 8))],
)
def test_resize_has_the_bits_of_pillow(side, size, resized):
    image = RNG.integers(0, 256, (*size, 3), np.uint8)
    image[: size[0] // 2] = np.where(image[: size[0] // 2] > 127, 255, 0)  # sums beyond 0..255
    out = side.tensor(np.zeros((3, *resized), np.uint8))
    side.kernels.resize(side.tensor(image), out)
    expected = Image.fromarray(image).resize(resized[::-1], Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(side.read(out), np.asarray(expected).transpose(2, 0, 1))


def test_embed_takes_text_from_the_table_and_other_tokens_from_multimodal_rows(side):
    table, rows = RNG.standard_normal((10, 4)), RNG.standard_normal((3, 4))
    out = side.tensor(np.zeros((2, 3, 4), np.float32))
    side.kernels.embed(
        side.tensor([[1, 10, 12], [9, 11, 0]]),
        side.tensor(table, np.float32),
        side.tensor(rows, np.float32),
        out,
    )
    expected = [[table[1], rows[0], rows[2]], [table[9], rows[1], table[0]]]
    np.testing.assert_array_equal(side.read(out), np.array(expected, np.float32))


def test_embed_of_text_alone_needs_no_rows(side):
    table = RNG.standard_normal((10, 4)).astype(np.float32)
    out = side.tensor(np.zeros((1, 2, 4), np.float32))
    side.kernels.embed(
        side.tensor([[3, 9]]), side.tensor(table), side.tensor(np.zeros((0, 4), np.float32)), out
    )
    np.testing.assert_array_equal(side.read(out)[0], table[[3, 9]])


def test_deepstack_is_zero_for_text(side):
    rows = RNG.standard_normal((3, 4)).astype(np.float32)
    out = side.tensor(np.full((1, 4, 4), 9, np.float32))
    side.kernels.deepstack(side.tensor([[5, 12, 10, 9]]), 10, side.tensor(rows), out)
    np.testing.assert_array_equal(side.read(out)[0], [np.zeros(4), rows[2], rows[0], np.zeros(4)])


@pytest.fixture
def table(side) -> RopeTable:
    cos, sin = (side.tensor(RNG.standard_normal((20, 8)), np.float32) for _ in "cs")
    return RopeTable(cos, sin, side.tensor(RNG.uniform(0, 1, 8), np.float32))


def test_rope_rows_follow_each_sequences_length_and_delta(side, table):
    cos, sin = (side.tensor(np.zeros((2, 3, 8), np.float32)) for _ in "cs")
    side.kernels.rope_rows(table, side.tensor([5, 9]), side.tensor([0, -4], np.float32), cos, sin)
    positions = [[5, 6, 7], [5, 6, 7]]
    np.testing.assert_array_equal(side.read(cos), side.read(table.cos)[positions])
    np.testing.assert_array_equal(side.read(sin), side.read(table.sin)[positions])


@pytest.mark.parametrize("frequencies", [8, 0], ids=["RoPE", "no RoPE"])
def test_rope_rows_also_write_the_rows_with_the_new_tokens(side, frequencies):
    shapes = (20, frequencies), (20, frequencies), (frequencies,)
    table = RopeTable(*(side.tensor(np.zeros(shape), np.float32) for shape in shapes))
    cos, sin = (side.tensor(np.zeros((2, 3, frequencies), np.float32)) for _ in "cs")
    filled = side.tensor(np.zeros(2, np.int64))
    side.kernels.rope_rows(table, side.tensor([5, 9]), side.tensor([0, -4], np.float32), cos, sin, filled)
    np.testing.assert_array_equal(side.read(filled), [8, 12])


def test_rows_between_whole_positions_are_computed_with_the_scaling_of_the_table(side):
    frequencies, scaling = np.array([1, 0.25, 0.01], np.float32), np.float32(1.5)
    whole = np.arange(20)[:, None] * frequencies
    tables = (np.cos(whole) * scaling, np.sin(whole) * scaling, frequencies)
    table = RopeTable(*(side.tensor(values, np.float32) for values in tables))
    cos, sin = (side.tensor(np.zeros((2, 2, 3), np.float32)) for _ in "cs")
    side.kernels.rope_rows(table, side.tensor([5, 9]), side.tensor([0.25, -4.5], np.float32), cos, sin)
    angles = np.array([[5.25, 6.25], [4.5, 5.5]])[..., None] * frequencies
    np.testing.assert_allclose(side.read(cos), np.cos(angles) * 1.5, atol=1e-6)
    np.testing.assert_allclose(side.read(sin), np.sin(angles) * 1.5, atol=1e-6)
    positions = side.tensor(np.array([[[7, 7.5]], [[3, 3]], [[2.5, 4.75]]]).transpose(1, 0, 2), np.float32)
    cos, sin = (side.tensor(np.zeros((1, 2, 3), np.float32)) for _ in "cs")
    side.kernels.mrope_rows(table, positions, (1, 1, 1), True, cos, sin)
    angles = np.array([[7, 3, 2.5], [7.5, 3, 4.75]])[None] * frequencies
    np.testing.assert_allclose(side.read(cos), np.cos(angles) * 1.5, atol=1e-6)
    np.testing.assert_allclose(side.read(sin), np.sin(angles) * 1.5, atol=1e-6)


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [
        # time, height, width in turn; height and width have two each
        ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ((2, 2, 4), False, [0, 0, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_mrope_rows_give_each_frequency_to_its_axis(side, table, section, interleaved, axes):
    positions = RNG.integers(0, 20, (2, 3, 5))
    cos, sin = (side.tensor(np.zeros((2, 5, 8), np.float32)) for _ in "cs")
    side.kernels.mrope_rows(table, side.tensor(positions, np.float32), section, interleaved, cos, sin)
    for frequency, axis in enumerate(axes):
        chosen = positions[:, axis]
        np.testing.assert_array_equal(side.read(cos)[..., frequency], side.read(table.cos)[chosen, frequency])
        np.testing.assert_array_equal(side.read(sin)[..., frequency], side.read(table.sin)[chosen, frequency])


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_without_sections_is_plain_rope(side, table, interleaved):
    positions = np.broadcast_to(np.arange(5), (2, 3, 5))
    cos, sin = (side.tensor(np.zeros((2, 5, 8), np.float32)) for _ in "cs")
    side.kernels.mrope_rows(table, side.tensor(positions, np.float32), (), interleaved, cos, sin)
    np.testing.assert_array_equal(side.read(cos)[1], side.read(table.cos)[:5])


def test_a_new_token_sees_its_sequence_up_to_itself(side):
    out = side.tensor(np.zeros((2, 1, 3, 8), bool))
    side.kernels.causal_mask(side.tensor([0, 4]), out)
    np.testing.assert_array_equal(side.read(out)[0, 0], np.tri(3, 8, 0, dtype=bool))
    np.testing.assert_array_equal(side.read(out)[1, 0], np.tri(3, 8, 4, dtype=bool))


def test_an_euler_step_moves_along_the_velocity_to_the_next_time(side):
    x, velocity = (side.tensor(RNG.standard_normal((2, 3)), np.float32) for _ in "xv")
    time, expected = side.tensor([0.6], np.float32), side.read(x) + np.float32(0.1) * side.read(velocity)
    side.kernels.euler_step(x, velocity, 0.1, time, 0.7)
    np.testing.assert_array_equal(side.read(x), expected)
    np.testing.assert_array_equal(side.read(time), np.array([0.7], np.float32))


def test_an_euler_step_writes_the_next_time_of_every_row(side):
    x, time = (side.tensor(np.zeros(shape), np.float32) for shape in ((1, 2, 3), (5,)))
    side.kernels.euler_step(x, side.tensor(np.ones((1, 2, 3)), np.float32), 0.1, time, 0.7)
    np.testing.assert_array_equal(side.read(time), np.full(5, 0.7, np.float32))


@pytest.mark.parametrize("times", [1, 4])
def test_a_conditioned_step_moves_rows_by_their_factors_to_their_next_times(side, times):
    x, velocity = RNG.standard_normal((2, 3, 4, 2)).astype(np.float32)
    previous, factors = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 2), (3, 4)))
    moved, time = side.tensor(x), side.tensor(np.zeros(times), np.float32)
    rest = (side.tensor(array) for array in (velocity, previous, factors))
    side.kernels.conditioned_step(moved, *rest, 0.25, time)
    expected = x + 0.25 * (factors[0, :, None] * velocity + factors[1, :, None] * (previous - x))
    np.testing.assert_allclose(side.read(moved), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(side.read(time), factors[2, :times])


def test_a_conditioned_step_without_a_condition_has_the_bits_of_an_euler_step(side):
    x, velocity = RNG.standard_normal((2, 3, 4, 2)).astype(np.float32)
    plain, conditioned = side.tensor(x), side.tensor(x)
    time = side.tensor(np.zeros(1), np.float32)
    side.kernels.euler_step(plain, side.tensor(velocity), 0.3, time, 0.5)
    none = np.stack([np.ones(4), np.zeros(4), np.ones(4)]).astype(np.float32)
    previous = side.tensor(np.ones((4, 2)), np.float32)
    side.kernels.conditioned_step(conditioned, side.tensor(velocity), previous, side.tensor(none), 0.3, time)
    np.testing.assert_array_equal(side.read(conditioned), side.read(plain))


FACTORS = DenoisingFactors(
    of_x=0.7, of_output=-0.4, divisor=0.3, limit=1.0,
    clean_share=0.6, x_share=0.2, output_share=-0.3, noise_share=0.5,
)  # fmt: skip


@pytest.mark.parametrize("limit", [1.0, np.inf])
@pytest.mark.parametrize("adds_noise", [True, False])
def test_a_denoising_step_mixes_clipped_actions_with_what_it_has(side, limit, adds_noise):
    x, output, noise = RNG.standard_normal((3, 2, 4, 3)).astype(np.float32)
    moved, time = side.tensor(x), side.tensor(np.zeros(1), np.float32)
    given = side.tensor(noise) if adds_noise else None
    factors = dataclasses.replace(FACTORS, limit=limit)
    side.kernels.denoising_step(moved, side.tensor(output), given, factors, time, 42.0)
    clean = (0.7 * x - 0.4 * output) / 0.3
    assert np.abs(clean).max() > 1
    expected = 0.6 * np.clip(clean, -limit, limit) + 0.2 * x - 0.3 * output + 0.5 * adds_noise * noise
    np.testing.assert_allclose(side.read(moved), expected, rtol=1e-5, atol=1e-6)
    assert side.read(time) == [42.0]


def test_a_denoising_step_keeps_what_is_not_finite(side):
    moved, time = side.tensor(np.full((1, 1, 2), np.nan), np.float32), side.tensor(np.zeros(1), np.float32)
    side.kernels.denoising_step(moved, side.tensor(np.zeros((1, 1, 2)), np.float32), None, FACTORS, time, 0.0)
    assert np.isnan(side.read(moved)).all()


def test_cache_rows_are_copied_between_caches_of_different_capacity(side):
    source = side.tensor(RNG.standard_normal((6, 2, 2, 5, 4)), np.float32)
    target = side.tensor(np.full((6, 3, 2, 9, 4), 7), np.float32)
    side.kernels.copy_cache_rows(source, (1, 1), target, (2, 4), 3)
    copied = side.read(target)
    np.testing.assert_array_equal(copied[:, 2, :, 4:7], side.read(source)[:, 1, :, 1:4])
    copied[:, 2, :, 4:7] = 7
    assert (copied == 7).all()


def test_ranges_of_cache_rows_are_copied_as_one_by_one(side):
    source = side.tensor(RNG.standard_normal((6, 2, 2, 5, 4)), np.float32)
    ranges = [((1, 1), (2, 4), 3), ((0, 0), (0, 0), 5), ((1, 4), (1, 8), 1)]
    together, alone = (side.tensor(np.full((6, 3, 2, 9, 4), 7), np.float32) for _ in range(2))
    for source_at, target_at, count in ranges:
        side.kernels.copy_cache_rows(source, source_at, alone, target_at, count)
    table = side.tensor([[*source_at, *target_at, count] for source_at, target_at, count in ranges])
    side.kernels.copy_cache_ranges(source, together, table)
    np.testing.assert_array_equal(side.read(together), side.read(alone))
    assert (side.read(together) != 7).sum() == 6 * 2 * 4 * (3 + 5 + 1)


def test_begun_rows_have_the_given_lengths_and_deltas(side):
    lengths, deltas = side.tensor(np.full(3, 9)), side.tensor(np.full(3, 9), np.float32)
    starts, offsets = side.tensor([5, 0, 2**40]), side.tensor([-7, 0, 0.25], np.float32)
    side.kernels.begin_rows(starts, offsets, lengths, deltas)
    assert side.read(lengths).tolist() == [5, 0, 2**40]
    assert side.read(deltas).tolist() == [-7, 0, 0.25]


def test_visible_rows_are_the_filled_ones_after_the_next_tokens(side):
    out = side.tensor(np.zeros(3, np.int64))
    side.kernels.visible_rows(side.tensor([0, 7, 2]), 5, out)
    assert side.read(out).tolist() == [5, 12, 7]


def counted(side, tokens, tokens_left, stop_ids=(-1,), trigger=-1, offered=None):
    """Return counts and tokens_left after count_tokens of tokens [B,N]."""
    tokens = np.array(tokens, np.int64)
    batch, width = tokens.shape
    triggers = np.broadcast_to(np.int64(trigger), (batch,)).copy()
    state = StopState(*(side.tensor(values, np.int64) for values in (tokens_left, triggers, stop_ids)))
    counts = side.tensor(np.full(batch, 77))
    offers = np.full(batch, width) if offered is None else offered
    side.kernels.count_tokens(side.tensor(tokens), side.tensor(offers, np.int64), state, counts)
    return side.read(counts).tolist(), side.read(state.tokens_left).tolist()


def test_a_sequence_takes_no_more_tokens_than_it_has_left(side):
    assert counted(side, [[4], [4], [4]], [2, 0, 1]) == ([1, 0, 1], [1, 0, 0])
    assert counted(side, [[4, 5, 6]] * 3, [2, 0, 7]) == ([2, 0, 3], [0, 0, 4])


def test_a_sequence_takes_no_more_tokens_than_are_offered(side):
    assert counted(side, [[4, 5, 6]] * 3, [9, 9, 9], offered=[1, 2, 0]) == ([1, 2, 0], [8, 7, 9])


def test_nothing_is_taken_after_a_stop_token(side):
    assert counted(side, [[7], [6], [5], [7]], [9, 9, 9, 0], [5, 7]) == ([1, 1, 1, 0], [0, 8, 0, 0])
    assert counted(side, [[4, 7, 4], [4, 4, 5]], [9, 9], [5, 7]) == ([2, 3], [0, 0])


def test_one_more_step_counts_after_the_trigger_token_of_a_sequence(side):
    found = counted(side, [[7]] * 4, [9, 9, 1, 0], [5, 7], trigger=[7, 5, 7, 7])
    assert found == ([1, 1, 1, 0], [1, 0, 1, 0])
    assert counted(side, [[4, 7, 7]], [9], [7], trigger=7) == ([2], [1])


def test_no_token_is_not_a_stop_token(side):
    assert counted(side, [[-1]], [9], [5, -1]) == ([1], [8])


def test_committed_tokens_are_seen_and_move_the_position(side):
    state = side.sampling_state(3, 9, position=[0, 5, 7])
    tokens = side.tensor([[1, 2, 3], [4, -1, 5], [6, 7, 8]])
    ids, last = side.tensor([[11, 12, 13], [14, -1, 15], [16, 17, 18]]), side.tensor([1, 2, 3])
    side.kernels.commit_tokens(tokens, ids, side.tensor([2, 3, 0]), state, last)
    assert side.read(last).tolist() == [12, 15, 3]
    assert side.read(state.position).tolist() == [2, 8, 7]
    assert [np.flatnonzero(row).tolist() for row in side.read(state.seen)] == [[1, 2], [4, 5], []]


def test_embed_of_a_negative_token_id_does_not_fail(side):
    table = RNG.standard_normal((10, 4)).astype(np.float32)
    out = side.tensor(np.zeros((3, 1, 4), np.float32))
    rows = side.tensor(RNG.standard_normal((2, 4)), np.float32)
    for others in ([3, 9], [3, 11]):
        side.kernels.embed(side.tensor([[-1], *([token] for token in others)]), side.tensor(table), rows, out)
        np.testing.assert_array_equal(side.read(out)[0, 0], table[0])


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100])
def test_a_mask_excludes_the_tokens_without_a_bit(side, vocabulary):
    logits = RNG.standard_normal((3, 2, vocabulary)).astype(np.float32)
    logits[:, 0, 0] = np.nan, np.inf, -np.inf
    allowed = RNG.random((3, 2, vocabulary)) < 0.5
    allowed[1, 1] = True
    masks = np.full((3, 2, -(-vocabulary // 32)), 2**32 - 1, np.uint32)
    for row, node, token in np.argwhere(~allowed):
        masks[row, node, token // 32] -= np.uint32(1 << token % 32)
    masked = side.tensor(logits)
    side.kernels.mask_logits(masked, side.tensor(masks))
    expected = np.where(allowed | ~np.isfinite(logits), logits, np.float32(EXCLUDED))
    np.testing.assert_array_equal(side.read(masked), expected)


def test_excluded_tokens_are_never_sampled(side):
    """With the penalties and temperatures of the largest effect."""
    logits = np.zeros((1, 40), np.float32)
    masks = side.tensor(np.array([[[0b100100, 0]]], np.uint32))
    seen = np.ones((1, 40), bool)
    for penalty, temperature in itertools.product((1e-6, 1.0, 1e6), (0.0, 1e-6, 1.0, 1e6)):
        for seed in range(5):
            masked = side.tensor(logits[:, None])
            side.kernels.mask_logits(masked, masks)
            rules = {"repetition_penalty": penalty, "temperature": temperature, "seed": seed}
            state = side.sampling_state(1, 40, seen, **rules)
            assert side.sample(side.read(masked)[:, 0], state)[0] in (2, 5)


def test_sampled_tokens_are_mapped_to_the_whole_vocabulary(side):
    out = side.tensor(np.zeros((2, 2), np.int64))
    side.kernels.map_tokens(side.tensor([[2, 0], [-1, 1]]), side.tensor([5, 7, 300]), out)
    assert side.read(out).tolist() == [[300, 5], [-1, 7]]
