# SPDX-License-Identifier: Apache-2.0
"""Host kernels and CUDA kernels give the same bits and sample the same tokens.

The cases are random. Without a GPU the CUDA sources are compiled for the host.
"""

import ml_dtypes
import numpy as np
import pytest

from edgellm_ros.kernels import DenoisingFactors, PatchLayout, RopeTable, RowLimits, StopState
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.multimodal.padded_image import placement
from fixtures.device_under_test import Side, host_side

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = pytest.mark.slow
TYPES = [np.float32, np.float16, BFLOAT16]
VOCABULARY = 151936  # of Qwen3
MIDDLE, LARGE = (pytest.param(size, marks=pytest.mark.slow) for size in (4097, VOCABULARY))


@pytest.fixture(scope="session")
def side(cuda_side) -> Side:
    return cuda_side


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    "resized", [(112, 224), (8, 12), (1, 1), (120, 160), (120, 9), (251, 160), (112, 155)], ids=str
)
def test_resize(agree, rng, resized):
    image = rng.integers(0, 256, (120, 160, 3), np.uint8)

    def run(place: Side):
        out = place.tensor(np.full((3, *resized), 9, np.uint8))
        place.kernels.resize(place.tensor(image), out)
        return (out,)

    agree(run)


@pytest.mark.parametrize("size", [(48, 64), (64, 48), (20, 9), (24, 24), (7, 40), (1, 1)], ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_place_image(agree, rng, size, centred):
    image = rng.integers(0, 256, (*size, 3), np.uint8)

    def run(place: Side):
        out = place.tensor(np.full((3, 24, 24), 9, np.float32))
        place.kernels.place_image(place.tensor(image), placement(image, 24, centred), -3.0, out)
        return (out,)

    agree(run)


@pytest.mark.parametrize("layout", [(32, 64, 8, 16), (96, 64, 8, 8), (16, 16, 16, 16)], ids=str)
@pytest.mark.parametrize("frames", [1, 2])
def test_cut_patches(agree, rng, layout, frames):
    levels = rng.standard_normal((3, 256)).astype(np.float32)
    pixels = rng.integers(0, 256, (frames, 3, 96, 128), np.uint8)

    def run(place: Side):
        out = place.tensor(np.full((96 * 128 // layout[2] ** 2, 6 * layout[2] ** 2), 9, np.float32))
        place.kernels.cut_patches(place.tensor(levels), place.tensor(pixels), PatchLayout(*layout), out)
        return (out,)

    agree(run)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 33, 1, 2560])
def test_embed_and_deepstack(agree, rng, dtype, hidden):
    table, rows = (rng.standard_normal((n, hidden)).astype(dtype) for n in (90, 7))
    ids = rng.integers(-1, 97, (3, 17))

    def run(place: Side):
        embeds, deep = (place.tensor(np.full((3, 17, hidden), 9, dtype)) for _ in range(2))
        device_ids, device_rows = place.tensor(ids), place.tensor(rows)
        place.kernels.embed(device_ids, place.tensor(table), device_rows, embeds)
        place.kernels.deepstack(device_ids, 90, device_rows, deep)
        return embeds, deep

    agree(run)


def test_embed_of_a_decode_step_without_multimodal_rows(agree, rng):
    table = rng.standard_normal((1000, 1024)).astype(np.float16)

    def run(place: Side):
        out = place.tensor(np.zeros((8, 1, 1024), np.float16))
        ids = place.tensor([[0], [999], [-1], [5], [5], [17], [400], [3]])
        place.kernels.embed(ids, place.tensor(table), place.tensor(np.zeros((0, 1024), np.float16)), out)
        return (out,)

    agree(run)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("steps", [1, 37])
def test_rotary_rows(agree, rng, batch, steps):
    tables = rng.standard_normal((2, 200, 64)).astype(np.float32)
    frequencies = rng.uniform(0, 1, 64).astype(np.float32)
    lengths, deltas = rng.integers(0, 180, batch), rng.integers(-60, 20, batch).astype(np.float32)
    positions = rng.integers(0, 200, (batch, 3, steps)).astype(np.float32)

    def run(place: Side):
        table = RopeTable(*(place.tensor(values) for values in (*tables, frequencies)))
        outs = [place.tensor(np.zeros((batch, steps, 64), np.float32)) for _ in range(8)]
        filled = place.tensor(np.zeros(batch, np.int64))
        place.kernels.rope_rows(table, place.tensor(lengths), place.tensor(deltas), *outs[:2], filled)
        place.kernels.mrope_rows(table, place.tensor(positions), (24, 20, 20), True, *outs[2:4])
        place.kernels.mrope_rows(table, place.tensor(positions), (), True, *outs[4:6])
        place.kernels.mrope_rows(table, place.tensor(positions), (16, 24, 24), False, *outs[6:])
        return [*outs, filled]

    agree(run)


def test_masks_of_logits(agree, rng):
    logits = rng.standard_normal((4, 3, VOCABULARY)).astype(np.float32)
    logits[1, 0, ::7] = np.nan
    masks = rng.integers(0, 2**32, (4, 3, VOCABULARY // 32), np.uint32)
    masks[2] = 2**32 - 1

    def run(place: Side):
        masked = place.tensor(logits)
        place.kernels.mask_logits(masked, place.tensor(masks))
        return (masked,)

    agree(run)


def test_rotary_rows_between_whole_positions(agree, rng):
    frequencies = rng.uniform(0, 1, 64).astype(np.float32)
    tables = rng.standard_normal((2, 200, 64)).astype(np.float32)
    lengths, deltas = np.array([5, 40, 150]), np.array([0.25, -7.6, 100 / 3], np.float32)
    positions = rng.uniform(0, 200, (3, 3, 37)).astype(np.float32)

    def run(place: Side):
        table = RopeTable(*(place.tensor(values) for values in (*tables, frequencies)))
        outs = [place.tensor(np.zeros((3, 37, 64), np.float32)) for _ in range(4)]
        place.kernels.rope_rows(table, place.tensor(lengths), place.tensor(deltas), *outs[:2])
        place.kernels.mrope_rows(table, place.tensor(positions), (24, 20, 20), True, *outs[2:])
        return outs

    agree(run)


@pytest.mark.parametrize("capacity", [1, 6, 24, 100, 256])
@pytest.mark.parametrize("steps", [1, 19])
def test_masks_and_visible_rows(agree, rng, capacity, steps):
    lengths = rng.integers(0, capacity + 3, 5)

    def run(place: Side):
        mask, visible = (
            place.tensor(np.ones((5, 1, steps, capacity), bool)),
            place.tensor(np.zeros(5, np.int64)),
        )
        place.kernels.causal_mask(place.tensor(lengths), mask)
        place.kernels.visible_rows(place.tensor(lengths), steps, visible)
        return mask, visible

    agree(run)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_size", [128, 20, 3])
def test_caches(agree, rng, dtype, head_size):
    first, second = (
        rng.standard_normal((6, batch, 2, capacity, head_size)).astype(dtype)
        for batch, capacity in ((4, 21), (3, 40))
    )

    def run(place: Side):
        source, target = place.tensor(first), place.tensor(second)
        place.kernels.copy_cache_rows(source, (2, 3), target, (1, 7), 17)
        place.kernels.copy_cache_rows(source, (0, 0), target, (2, 39), 1)
        place.kernels.copy_cache_rows(source, (0, 0), target, (0, 0), 0)
        return source, target

    agree(run)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_size", [128, 20, 3])
def test_ranges_of_caches(agree, rng, dtype, head_size):
    first, second = (
        rng.standard_normal((6, batch, 2, capacity, head_size)).astype(dtype)
        for batch, capacity in ((4, 21), (3, 40))
    )
    ranges = [[2, 3, 1, 7, 17], [0, 0, 2, 39, 1], [0, 0, 0, 0, 0], [3, 20, 0, 11, 1], [1, 0, 0, 12, 21]]

    def run(place: Side):
        source, target = place.tensor(first), place.tensor(second)
        place.kernels.copy_cache_ranges(source, target, place.tensor(ranges))
        return source, target

    agree(run)


def test_begun_rows(agree, rng):
    starts, offsets = rng.integers(0, 2**40, 300), rng.standard_normal(300).astype(np.float32)

    def run(place: Side):
        lengths = place.tensor(np.full(300, 7))
        deltas = place.tensor(np.full(300, 7, np.float32))
        place.kernels.begin_rows(place.tensor(starts), place.tensor(offsets), lengths, deltas)
        return lengths, deltas

    agree(run)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [4096, 36, 3])
def test_recurrent_states(agree, rng, dtype, size):
    committed, new = (rng.standard_normal((3, 5, size)).astype(dtype) for _ in range(2))
    counts = np.array([2, 0, 1])

    def run(place: Side):
        states = place.tensor(committed)
        place.kernels.commit_states(states, place.tensor(new), 1, place.tensor(counts))
        return (states,)

    agree(run)


@pytest.mark.parametrize("width", [1, 4])
def test_counts_and_commits(agree, rng, width):
    lengths, tokens_left, trigger_token = (rng.integers(low, 7, 300) for low in (0, -1, -1))
    tokens, offered = rng.integers(-1, 9, (300, width)), rng.integers(0, width + 1, 300)
    stop_ids = np.array([2, 3, -1])

    def run(place: Side):
        stops = StopState(*(place.tensor(values) for values in (tokens_left, trigger_token, stop_ids)))
        state = place.sampling_state(300, 9)
        device_lengths, counts = place.tensor(lengths), place.tensor(np.zeros(300, np.int64))
        device_tokens, mapped = place.tensor(tokens), place.tensor(np.zeros_like(tokens))
        place.kernels.count_tokens(device_tokens, place.tensor(offered), stops, counts)
        last = place.tensor(np.full(300, 5))
        place.kernels.commit_tokens(device_tokens, place.tensor(tokens + 100), counts, state, last)
        place.kernels.commit_rows(device_lengths, counts)
        place.kernels.map_tokens(device_tokens, place.tensor(np.arange(9) * 11 % 9), mapped)
        return device_lengths, counts, stops.tokens_left, state.position, state.seen, last, mapped

    agree(run)


@pytest.mark.parametrize("row", [0, 2])
def test_an_opened_row(agree, row):
    rules = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 1e-3,
        "repetition_penalty": 1.1,
        "seed": 2**64 - 3,
    }
    limits = RowLimits(path_limit=2**31, tokens_left=77, trigger_token=-1)

    def run(place: Side):
        state = place.sampling_state(3, 9, position=[4, 5, 6])
        stops = StopState(*(place.tensor([7, 8, 9]) for _ in range(3)))
        place.kernels.open_row(row, rules, limits, state, stops)
        return *vars(state).values(), *vars(stops).values()

    agree(run)


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 1)])
@pytest.mark.parametrize("vocab", [9, 1000])
def test_a_moved_row(agree, rng, source, target, vocab):
    rows = dict(temperature=[0, 0.5, 1], top_k=[1, 2, 3], top_p=[1, 0.9, 0.8], min_p=[0, 0.1, 0.2])
    rows |= dict(repetition_penalty=[1, 1.1, 1.2], seed=[4, 2**63, 2**64 - 1], position=[4, 5, 6])
    seen = rng.integers(0, 2, (3, vocab)).astype(np.bool_)

    def run(place: Side):
        state = place.sampling_state(3, vocab, **rows, path_limit=[7, 8, 9], seen=seen)
        stops = StopState(*(place.tensor(each) for each in ([7, 8, 9], [-1, 5, 6], [2, 3])))
        last = place.tensor([11, 12, 13])
        place.kernels.move_row(source, target, state, stops, last)
        return *vars(state).values(), *vars(stops).values(), last

    agree(run)


def test_euler_steps(agree, rng):
    x, velocity = rng.standard_normal((2, 8, 3, 77)).astype(np.float32)

    def run(place: Side):
        moved, time = place.tensor(x), place.tensor(np.zeros(1, np.float32))
        for step in range(3):
            place.kernels.euler_step(moved, place.tensor(velocity), 1 / 3, time, (step + 1) / 7)
        return moved, time

    agree(run)


def test_conditioned_steps(agree, rng):
    x, velocity = rng.standard_normal((2, 3, 40, 7)).astype(np.float32)
    previous, factors = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 7), (3, 40)))

    def run(place: Side):
        moved, time = place.tensor(x), place.tensor(np.zeros(40, np.float32))
        for _ in range(3):
            rest = (place.tensor(array) for array in (velocity, previous, factors))
            place.kernels.conditioned_step(moved, *rest, 1 / 3, time)
            place.kernels.euler_step(moved, place.tensor(velocity), 1 / 3, time, 0.3)
        place.kernels.conditioned_step(
            moved, *(place.tensor(array) for array in (velocity, previous, factors)), 1 / 3, time
        )
        return moved, time

    agree(run)


def test_denoising_steps(agree, rng):
    x, output, noise = rng.standard_normal((3, 3, 40, 7)).astype(np.float32)

    def run(place: Side):
        moved, time = place.tensor(x), place.tensor(np.zeros(1, np.float32))
        for step in range(3):
            factors = DenoisingFactors(1.0, -0.7, 0.6, 1.0 + step, 0.5, 0.3, 0.0, 0.2)
            added = place.tensor(noise) if step < 2 else None
            place.kernels.denoising_step(moved, place.tensor(output), added, factors, time, 9.0 - step)
        return moved, time

    agree(run)


def sample_steps(
    place: Side, logits: np.ndarray, steps: int, seen=None, **parameters
) -> tuple[list[list[int]], list, bytes]:
    """Sample `steps` times; return tokens [steps][B], then positions and seen tokens."""
    state = place.sampling_state(*logits.shape, seen, **parameters)
    tokens = [place.sample(logits, state) for _ in range(steps)]
    return tokens, place.read(state.position).tolist(), place.read(state.seen).tobytes()


def assert_same_samples(
    side: Side, logits: np.ndarray, steps: int = 4, seen=None, **parameters
) -> list[list[int]]:
    expected = sample_steps(host_side(), logits, steps, seen, **parameters)
    found = sample_steps(side, logits, steps, seen, **parameters)
    assert found == expected
    return found[0]


RULES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 1000},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**12},
    {"temperature": 2.0, "top_p": 1e-7},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1},
    {"temperature": 1.3, "top_p": 0.7, "repetition_penalty": 0.8},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 1e-30},
    {"temperature": 100.0, "top_k": 70000},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 50, MIDDLE, 80_003])
def test_the_same_tokens_are_sampled(side, rng, vocabulary, rules):
    logits = (rng.standard_normal((2, vocabulary)) * 3).astype(np.float32)
    seen = rng.random((2, vocabulary)) < 0.1
    assert_same_samples(side, logits, 2, seen, seed=[3, MAX_SEED], position=[0, 1000], **rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_same_tokens_are_sampled_where_many_are_equally_likely(side, rng, rules):
    logits = rng.integers(-4, 3, (2, 3000)).astype(np.float32) / 2  # -0.0 among them
    logits[0, rng.random(3000) < 0.1] = -0.0
    assert_same_samples(side, logits, 3, None, seed=[7, 8], **rules)


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_same_tokens_are_sampled_where_all_are_equally_likely(side, rules):
    assert_same_samples(side, np.full((1, 6000), -3.25), 1, None, seed=11, **rules)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e30])
def test_the_same_tokens_are_sampled_from_logits_of_any_size(side, rng, scale):
    logits = (rng.standard_normal((3, 5000)) * scale).astype(np.float32)
    assert_same_samples(side, logits, 4, temperature=[0.0, 0.8, 1.4], top_p=[1.0, 0.9, 1.0], top_k=[0, 40, 0])


def test_rows_of_a_batch_use_their_own_parameters(side, rng):
    logits = (rng.standard_normal((8, VOCABULARY)) * 2).astype(np.float32)
    logits[3, 77] = np.nan
    logits[6, VOCABULARY - 1] = -np.inf
    tokens = assert_same_samples(
        side, logits, 3, rng.random(logits.shape) < 0.01,
        temperature=[0.0, 1.0, 0.7, 1.0, 0.0, 1.2, 0.0, 0.9], top_k=[0, 0, 20, 0, 5, 900, 0, 0],
        top_p=[1.0, 0.9, 1.0, 1.0, 0.5, 0.95, 1.0, 1.0], min_p=[0, 0, 0, 0, 0, 0, 0, 0.1],
        repetition_penalty=[1.0, 1.2, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0], seed=list(range(8)),
        position=list(range(8)),
    )  # fmt: skip
    assert all(row[3] == row[6] == -1 for row in tokens)


def test_several_tokens_of_a_step_use_the_random_numbers_of_their_positions(side, rng):
    """Row n of a step samples what step n would have sampled without a penalty."""
    logits = (rng.standard_normal((3, 4, 500)) * 2).astype(np.float32)
    rules = {"temperature": [0.0, 1.0, 0.7], "top_p": 0.9, "seed": [1, 2, 3]}
    tokens = side.tensor(np.zeros((3, 4), np.int64))
    side.kernels.sample(side.tensor(logits), side.sampling_state(3, 500, **rules), tokens)
    state = host_side().sampling_state(3, 500, **rules)
    one_by_one = [host_side().sample(logits[:, place], state) for place in range(4)]
    np.testing.assert_array_equal(side.read(tokens).T, one_by_one)


@pytest.mark.slow
def test_a_batch_larger_than_the_last_is_sampled_correctly(side, rng):
    for batch in (1, 9, 3, 40):
        logits = rng.standard_normal((batch, 300)).astype(np.float32)
        assert_same_samples(side, logits, 2, temperature=1.0, top_p=0.9, seed=list(range(batch)))


@pytest.mark.slow
@pytest.mark.only_on("cpu", reason="the number of multiprocessors of a GPU is fixed")
@pytest.mark.parametrize("multiprocessors", [1, 2, 17, 132])
def test_the_same_tokens_are_sampled_with_any_number_of_blocks_per_row(double, rng, multiprocessors):
    from doubles.cuda_double import double_side

    logits = (rng.standard_normal((1, 40_000)) * 2).astype(np.float32)
    gpu = double_side(double, multiprocessors)
    assert_same_samples(gpu, logits, 3, temperature=0.9, top_k=700, top_p=0.95, min_p=0.001, seed=5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_give_no_token_wherever_they_are(side, rng, value, temperature):
    logits = rng.standard_normal((4, 9000)).astype(np.float32)
    logits[[0, 1, 2], [0, 4500, 8999]] = value
    tokens = assert_same_samples(side, logits, 2, temperature=temperature)
    assert [token < 0 for token in tokens[0]] == [True, True, True, False]


def test_samples_do_not_depend_on_earlier_ones(side, rng):
    """Other samples between two equal requests do not change their tokens."""
    logits = (rng.standard_normal((2, VOCABULARY)) * 2).astype(np.float32)
    first = sample_steps(side, logits, 3, temperature=1.0, top_p=0.9, top_k=100)
    sample_steps(side, np.full((5, 777), np.nan, np.float32), 1)
    assert sample_steps(side, logits, 3, temperature=1.0, top_p=0.9, top_k=100) == first


@pytest.mark.parametrize("count", [1, 5, 50])
@pytest.mark.parametrize("scale", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("vocabulary", [50, 5000, LARGE])
def test_log_probabilities(side, rng, vocabulary, scale, count):
    logits = (rng.standard_normal((3, vocabulary)) * scale).astype(np.float32)
    tokens = rng.integers(0, vocabulary, 3)
    expected_ids, expected = host_side().log_probabilities(logits, tokens, count)
    ids, values = side.log_probabilities(logits, tokens, count)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=1e-7)


def test_log_probabilities_of_non_finite_logits_terminate(side, rng):
    logits = rng.standard_normal((3, 5000)).astype(np.float32)
    logits[[0, 2], [4999, 17]] = np.nan, np.inf
    ids, values = side.log_probabilities(logits, [-1, 3, -1], 7)
    assert (ids[[0, 2]] == -1).all()
    assert np.isnan(values[[0, 2]]).all()
    np.testing.assert_array_equal(ids[1, :7], np.argsort(-logits[1], kind="stable")[:7])
