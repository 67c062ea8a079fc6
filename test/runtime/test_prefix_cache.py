# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: insertion, matching, eviction and files.

The KV row of a token is a number that follows from the tokens up to it.
"""

import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, PrefixCache
from edgellm_ros.runtime.prefix.prefix_file import engine_fingerprint, load_prefix_cache, save_prefix_cache

LAYERS, KV_HEADS, HEAD_DIM, CAPACITY = 2, 2, 4, 200
SHAPE = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": np.dtype(np.float32)}
PAGE_BYTES = 2 * LAYERS * KV_HEADS * PAGE * HEAD_DIM * 4


@pytest.fixture
def make_cache(device, kernels):
    """Function that makes a prefix cache of so many pages."""

    def make(pages: int = 12) -> PrefixCache:
        return PrefixCache(device, kernels, **SHAPE, capacity_bytes=pages * PAGE_BYTES)

    return make


@pytest.fixture
def cache(make_cache) -> PrefixCache:
    return make_cache()


@pytest.fixture
def slots(device, kernels) -> LinearKVCache:
    """The KV cache: prompts are computed in row 0, prefixes are loaded into row 1."""
    return LinearKVCache(device, kernels, **SHAPE, max_batch_size=2, capacity=CAPACITY)


def row(keys, token) -> float:
    """Return a token's KV value, which depends on all tokens up to it, as in a model."""
    return float(hash(tuple(keys[: token + 1])) % 1_000_003)


@pytest.fixture
def compute(device, slots):
    """Function that fills row 0 as the prefill of a prompt does."""

    def run(keys):
        sequence = slots.sequence(0)
        numbers = np.array([row(keys, token) for token in range(len(keys))])[:, None]
        for layer, tensors in enumerate(zip(sequence.keys, sequence.values, strict=True)):
            for kind, tensor in enumerate(tensors):
                rows = np.full(tensor.shape, np.nan, np.float32)
                rows[0, :, : len(keys)] = numbers + layer + 0.5 * kind
                device.upload(tensor, rows)
        return sequence

    return run


@pytest.fixture
def assert_loads(device, slots):
    """Function that checks that a prompt matches up to `length` and loads its KV rows."""

    def check(cache, keys, length, adapter="") -> None:
        prefix = cache.match(adapter, keys)
        assert prefix.length == length
        sequence = slots.sequence(1)
        for tensor in (*sequence.keys, *sequence.values):
            device.upload(tensor, np.full(tensor.shape, -1, np.float32))
        cache.load(prefix, sequence, length)
        for layer, tensors in enumerate(zip(sequence.keys, sequence.values, strict=True)):
            for kind, tensor in enumerate(tensors):
                expected = [row(keys, token) + layer + 0.5 * kind for token in range(length)]
                rows = device.download(tensor)[0]
                for head in range(KV_HEADS):
                    np.testing.assert_array_equal(rows[head, :length, 0], np.float32(expected))
                assert (rows[:, length:] == -1).all()

    return check


def prompt(*parts) -> list:
    """Return a prompt's tokens: ("s", 40) means 40 tokens, the same for every "s"."""
    return [f"{name}{i}" for name, count in parts for i in range(count)]


SYSTEM = ("s", 75)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 150])
def test_a_stored_prompt_matches_up_to_its_last_token(cache, length, compute, assert_loads):
    keys = prompt(("a", length))
    cache.insert("", keys, compute(keys))
    assert_loads(cache, keys, length - 1)
    assert_loads(cache, [*keys, "more"], length)


@pytest.mark.parametrize("common", [0, 1, PAGE - 1, PAGE, PAGE + 1, 75, 100])
def test_the_longest_common_prefix_is_found(cache, common, compute, assert_loads):
    first = prompt(("common", common), ("a", 40))
    cache.insert("", first, compute(first))
    assert_loads(cache, prompt(("common", common), ("b", 50)), common)


def test_the_prompt_with_the_longest_common_prefix_is_found(cache, compute, assert_loads):
    for tail in (3, 20, 9):
        keys = prompt(SYSTEM, ("t", tail), (f"end{tail}", 10))
        cache.insert("", keys, compute(keys))
    assert_loads(cache, prompt(SYSTEM, ("t", 17), ("other", 5)), 75 + 17)


def test_a_common_prefix_is_stored_once(cache, compute):
    for frame in range(4):
        keys = prompt(("s", 2 * PAGE), (f"frame{frame}", 20))
        cache.insert("", keys, compute(keys))
    assert cache.used_bytes == (2 + 4) * PAGE_BYTES
    cache.insert("", keys, compute(keys))
    assert cache.used_bytes == (2 + 4) * PAGE_BYTES


def test_a_longer_prompt_fills_up_the_page_of_a_shorter_one(cache, compute, assert_loads):
    short, long = prompt(("a", 10)), prompt(("a", 10), ("b", 60))
    cache.insert("", short, compute(short))
    cache.insert("", long, compute(long))
    assert cache.used_bytes == 3 * PAGE_BYTES
    assert_loads(cache, long, 69)
    assert_loads(cache, [*short, "other"], 10)


def test_adapters_share_no_pages(cache, compute, assert_loads):
    keys = prompt(SYSTEM)
    cache.insert("one", keys, compute(keys))
    assert cache.match("", keys).length == cache.match("two", keys).length == 0
    assert_loads(cache, keys, 74, adapter="one")


def test_the_least_recently_used_page_is_evicted(make_cache, compute, assert_loads):
    cache = make_cache(pages=4)
    prompts = [prompt(("s", PAGE), (f"frame{i}", PAGE)) for i in range(5)]
    for keys in prompts[:3]:
        cache.insert("", keys, compute(keys))
    assert cache.used_bytes == cache.capacity_bytes
    cache.match("", prompts[0])
    cache.insert("", prompts[3], compute(prompts[3]))
    found = [cache.match("", keys).length for keys in prompts]
    assert found == [2 * PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE - 1, PAGE]
    for keys, length in zip(prompts, found, strict=True):
        assert_loads(cache, keys, length)


def test_a_pinned_prompt_outlives_others_until_it_is_unpinned(make_cache, compute, assert_loads):
    cache = make_cache(pages=4)
    saved = list(range(PAGE + 9))
    cache.insert("", saved, compute(saved))
    assert cache.pin("", saved)
    assert not cache.pin("", saved)
    assert cache.pinned_bytes == 2 * PAGE_BYTES
    for first in range(100, 104):
        other = [first] * 2 * PAGE
        cache.insert("", other, compute(other))
        assert_loads(cache, [*saved, -1], PAGE + 9)
        assert_loads(cache, other, 2 * PAGE - 1)
    assert cache.unpin("", saved)
    assert not cache.unpin("", saved)
    assert cache.pinned_bytes == 0
    for first in range(104, 106):
        other = [first] * 2 * PAGE
        cache.insert("", other, compute(other))
    assert cache.match("", saved).length == 0


def test_prompts_that_share_pages_are_pinned_each(make_cache, compute, assert_loads):
    cache = make_cache(pages=2)
    short, long = list(range(PAGE)), list(range(2 * PAGE))
    for prompt in (short, long):
        cache.insert("", prompt, compute(prompt))
        cache.pin("", prompt)
    cache.unpin("", long)
    other = [-2] * 2 * PAGE
    cache.insert("", other, compute(other))  # takes the page that is not pinned any more
    assert_loads(cache, [*short, -1], PAGE)
    assert_loads(cache, other, PAGE)


def test_a_prompt_that_goes_on_from_a_pinned_one_finds_its_rows(make_cache, compute, assert_loads):
    cache = make_cache(pages=3)
    saved = list(range(PAGE - 5))
    cache.insert("", saved, compute(saved))
    cache.pin("", saved)
    for last in range(-9, -1):
        prompt = [*saved, *[last] * 2 * PAGE]
        cache.insert("", prompt, compute(prompt))
        assert_loads(cache, [*saved, 7], PAGE - 5)


def test_a_cache_that_is_pinned_as_a_whole_stores_nothing_more(make_cache, compute, assert_loads):
    cache = make_cache(pages=2)
    saved = list(range(2 * PAGE))
    cache.insert("", saved, compute(saved))
    cache.pin("", saved)
    cache.insert("", [5, 6, 7], compute([5, 6, 7]))
    assert cache.match("", [5, 6, 7]).length == 0
    assert_loads(cache, saved, 2 * PAGE - 1)


def test_clearing_and_removing_an_adapter_unpin(cache, compute):
    keys = list(range(PAGE))
    for adapter in ("", "one"):
        cache.insert(adapter, keys, compute(keys))
        cache.pin(adapter, keys)
    cache.remove("one")
    assert cache.pinned_bytes == PAGE_BYTES
    assert not cache.unpin("one", keys)
    cache.clear()
    assert cache.pinned_bytes == 0
    assert not cache.unpin("", keys)


def test_a_prompt_that_is_too_long_is_stored_up_to_the_capacity(make_cache, compute, assert_loads):
    cache = make_cache(pages=2)
    old, long = prompt(("old", 20)), prompt(("long", 120))
    cache.insert("", old, compute(old))
    cache.insert("", long, compute(long))
    assert_loads(cache, long, 2 * PAGE)
    assert cache.match("", old).length == 0
    assert cache.used_bytes == cache.capacity_bytes == 2 * PAGE_BYTES


def test_thousands_of_prompts_stay_correct_and_within_the_budget(make_cache, compute, assert_loads):
    cache = make_cache(pages=7)
    rng = np.random.default_rng(0)
    for _ in range(400):
        keys = prompt(("s", int(rng.integers(0, 60))), (f"f{rng.integers(5)}-", int(rng.integers(1, 90))))
        cache.insert("", keys, compute(keys))
        wanted = prompt(("s", int(rng.integers(0, 60))), (f"f{rng.integers(5)}-", int(rng.integers(1, 90))))
        assert_loads(cache, wanted, cache.match("", wanted).length)
        assert cache.used_bytes <= 7 * PAGE_BYTES
        assert len(list(cache.pages())) * PAGE_BYTES == cache.used_bytes


def test_nothing_is_stored_without_memory(make_cache, compute):
    cache = make_cache(pages=0)
    keys = prompt(SYSTEM)
    cache.insert("", keys, compute(keys))
    assert cache.match("", keys).length == 0
    assert cache.capacity_bytes == 0


@pytest.mark.parametrize("size", [-1, PAGE_BYTES - 1])
def test_a_budget_without_room_for_a_page_is_an_error_that_names_both(size, device, kernels):
    with pytest.raises(ValueError, match=f"0 or at least {PAGE_BYTES} bytes, got {size}"):
        PrefixCache(device, kernels, **SHAPE, capacity_bytes=size)


def test_clearing_drops_everything(cache, compute):
    keys = prompt(SYSTEM)
    cache.insert("", keys, compute(keys))
    cache.clear()
    assert cache.used_bytes == 0
    assert cache.match("", keys).length == 0


def test_removing_an_adapter_frees_its_pages_only(cache, compute, assert_loads):
    for adapter, parts in [("", [SYSTEM]), ("lora", [SYSTEM, ("a", 30)])]:
        keys = prompt(*parts)
        cache.insert(adapter, keys, compute(keys))
        if not adapter:
            used = cache.used_bytes
    cache.remove("lora")
    cache.remove("unknown")
    assert cache.used_bytes == used
    assert cache.match("lora", prompt(SYSTEM)).length == 0
    assert_loads(cache, [*prompt(SYSTEM), "x"], len(prompt(SYSTEM)))


def test_an_adapter_whose_last_page_was_evicted_is_dropped(make_cache, compute, assert_loads):
    cache = make_cache(pages=1)
    keys = prompt(("a", 20))
    sequence = compute(keys)
    for number in range(5):
        cache.insert(f"lora {number}", keys, sequence)
    assert list(cache._roots) == ["lora 4"]
    make_cache(pages=0).insert("lora", keys, sequence)
    assert_loads(cache, keys, 19, adapter="lora 4")


def rewrite(path, damage) -> None:
    """Save a file again after `damage(metadata, tensors)` changed its contents."""
    with safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()["prefix_cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(metadata, tensors)
    save_file(tensors, path, {"prefix_cache": json.dumps(metadata)})


class TestOnDisk:
    @pytest.fixture
    def filled(self, cache, compute):
        for adapter, parts in [("", [SYSTEM, ("a", 30)]), ("", [SYSTEM, ("b", 40)]), ("lora", [("c", 50)])]:
            keys = prompt(*parts)
            cache.insert(adapter, keys, compute(keys))
        return cache

    def test_saved_prompts_match_after_loading(self, filled, tmp_path, device, make_cache, assert_loads):
        save_prefix_cache(tmp_path / "cache", filled, device, "engine")
        other = make_cache()
        assert load_prefix_cache(tmp_path / "cache", other, device, "engine") == 8
        assert_loads(other, prompt(SYSTEM, ("a", 30)), 104)
        assert_loads(other, prompt(SYSTEM, ("b", 40)), 114)
        assert_loads(other, prompt(("c", 50)), 49, adapter="lora")
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]

    def test_an_empty_cache_is_an_empty_file(self, filled, tmp_path, device, make_cache):
        for pages in (0, 5):
            save_prefix_cache(tmp_path / "cache", make_cache(pages), device, "engine")
            assert load_prefix_cache(tmp_path / "cache", make_cache(5), device, "engine") == 0

    def test_a_smaller_cache_loads_the_most_recently_used_pages(
        self, filled, tmp_path, device, make_cache, assert_loads
    ):
        filled.match("", prompt(SYSTEM, ("a", 30)))
        save_prefix_cache(tmp_path / "cache", filled, device, "engine")
        small = make_cache(pages=4)
        assert load_prefix_cache(tmp_path / "cache", small, device, "engine") == 4
        assert_loads(small, prompt(SYSTEM, ("a", 30)), 104)
        assert small.match("lora", prompt(("c", 50))).length == 0

    def test_loaded_pages_are_evicted_in_the_same_order(
        self, filled, tmp_path, device, make_cache, compute, assert_loads
    ):
        save_prefix_cache(tmp_path / "cache", filled, device, "engine")
        small = make_cache(pages=8)
        load_prefix_cache(tmp_path / "cache", small, device, "engine")
        keys = prompt(("new", 40))
        small.insert("", keys, compute(keys))
        assert_loads(small, prompt(("c", 50)), 49, adapter="lora")
        assert small.match("", prompt(SYSTEM, ("a", 30))).length == 75

    def test_a_file_of_another_engine_is_refused_and_nothing_changes(
        self, filled, tmp_path, device, assert_loads
    ):
        save_prefix_cache(tmp_path / "cache", filled, device, "engine")
        with pytest.raises(
            ValueError, match=r"saved by another engine.*engine engine, .*this is engine other"
        ):
            load_prefix_cache(tmp_path / "cache", filled, device, "other")
        assert_loads(filled, prompt(SYSTEM, ("a", 30)), 104)

    def test_a_damaged_file_is_refused(self, filled, tmp_path, device):
        path = tmp_path / "cache"
        save_prefix_cache(path, filled, device, "engine")
        whole = path.read_bytes()
        for damaged in (whole[:-100], whole[:50], b"", whole.replace(b"last_used", b"last_seen")):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="cache: not a readable prefix cache"):
                load_prefix_cache(path, filled, device, "engine")
        text = rb"\"parent\": 0"
        assert text in whole
        path.write_bytes(whole.replace(text, rb"\"parent\": 7"))
        with pytest.raises(ValueError, match=r"damaged: page \d+ does not fit the others"):
            load_prefix_cache(path, filled, device, "engine")
        with pytest.raises(FileNotFoundError, match="nowhere not found"):
            load_prefix_cache(tmp_path / "nowhere", filled, device, "engine")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("parent", "0"),
            ("keys", 5),
            ("keys", [None]),
            ("last_used", None),
            ("adapter", 1),
            ("parent", True),
        ],
    )
    def test_a_page_of_the_wrong_types_is_refused(self, filled, tmp_path, name, value, device):
        def damage(metadata, tensors):
            metadata["pages"][1][name] = value

        save_prefix_cache(tmp_path / "cache", filled, device, "engine")
        rewrite(tmp_path / "cache", damage)
        with pytest.raises(ValueError, match="damaged: page 1 does not fit the others"):
            load_prefix_cache(tmp_path / "cache", filled, device, "engine")

    def test_a_row_or_a_token_that_changed_on_disk_is_refused_and_nothing_changes(
        self, filled, tmp_path, device, assert_loads
    ):
        def damage_row(metadata, tensors):
            tensors["pool_1"][3, 1, 5, 2] = np.nan

        def damage_token(metadata, tensors):
            metadata["pages"][0]["keys"][0] = "another"

        for damage in (damage_row, damage_token):
            save_prefix_cache(tmp_path / "cache", filled, device, "engine")
            rewrite(tmp_path / "cache", damage)
            with pytest.raises(ValueError, match="damaged: the SHA-256 of the contents is not"):
                load_prefix_cache(tmp_path / "cache", filled, device, "engine")
            assert_loads(filled, prompt(SYSTEM, ("a", 30)), 104)

    def test_a_missing_folder_is_an_os_error(self, filled, tmp_path, device):
        with pytest.raises(OSError, match="cache"):
            save_prefix_cache(tmp_path / "missing" / "cache", filled, device, "engine")

    def test_the_fingerprint_depends_on_the_files(self, tiny_engine):
        config = EngineConfig.load(tiny_engine)
        other = dataclasses.replace(config.files[0], sha256="0" * 64)
        changed = dataclasses.replace(config, files=(other, *config.files[1:]))
        assert engine_fingerprint(config) == engine_fingerprint(EngineConfig.load(tiny_engine))
        assert engine_fingerprint(config) != engine_fingerprint(changed)
