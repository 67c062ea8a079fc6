# SPDX-License-Identifier: Apache-2.0
"""Time of each kernel between the engines, at the sizes of a 2B model.

Measures
--------
`us`: time on the device, from a replayed graph of 200 launches, or from 3 calls without graphs. `queue_us`:
host time to queue one launch outside of a graph. Both are medians of 7 runs after 1 warm-up run.

Conditions
----------
Vocabulary 151,936, hidden size 2,048 in fp16, 28 layers with 8 heads of 128 for keys and values. Logits are
normal random numbers times 3. Speculative decoding: a draft of 6 levels with 10 candidates for each node and
a vocabulary of 32,000, a tree of 60 nodes, paths of 4 tokens.

Examples
--------
    python -m benchmarks.kernels
    python -m benchmarks.kernels --device cuda --batch 1 8

Last JSON line: `us` and `queue_us` by kernel and batch size.

"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import finish
from edgellm_ros.cli.arguments import DEVICES
from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import GenerationDefaults
from edgellm_ros.kernels import (
    RULES,
    DraftInputs,
    DraftTable,
    DraftTree,
    Kernels,
    PatchLayout,
    RopeTable,
    RowLimits,
    SamplingState,
    StopState,
    TreeKernels,
    load_kernels,
    load_tree_kernels,
)
from edgellm_ros.runtime.request import SamplingParams

VOCABULARY, HIDDEN, FREQUENCIES, POSITIONS = 151_936, 2048, 64, 4096
LAYERS, HEADS, CAPACITY, HEAD_SIZE = 28, 8, 1024, 128
PROMPT, PREFIX = 1024, 256  # tokens
RESIZED = 1280, 960  # height and width
DRAFT_VOCABULARY, TOP_K, LEVELS, NODES, PATH = 32_000, 10, 6, 60, 4
GRAPH_LAUNCHES, CALLS, RUNS = 200, 3, 7
HALF = np.float16

Call = Callable[[], None]
RULE_SETS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "all rules": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="device to run on (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 and 8)")
    args = parser.parse_args(arguments)
    device = open_device(args.device)
    kernels, trees = load_kernels(device), load_tree_kernels(device)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for batch in args.batch:
        rows = results[f"batch {batch}"] = {}
        for name, call in (calls(device, kernels, batch) | tree_calls(device, kernels, trees, batch)).items():
            rows[name] = measure(device, call)
            print(f"batch {batch}  {name:34}" + "".join(f"{k:>10} {v:9.1f}" for k, v in rows[name].items()))
    return finish("kernels", device=args.device, **results)


def measure(device: Device, call: Call) -> dict[str, float]:
    """Measure the microseconds of one call."""

    def record() -> None:
        for _ in range(GRAPH_LAUNCHES):
            call()

    call()
    device.synchronize()
    graph = device.capture(record)
    if graph is None:
        return {"us": median_us(device, call, CALLS)["us"]}
    replay = median_us(device, lambda: graph.launch(device.stream), 1)["us"] / GRAPH_LAUNCHES
    return {"us": replay, "queue_us": median_us(device, call, GRAPH_LAUNCHES)["queue_us"]}


def median_us(device: Device, call: Call, times: int) -> dict[str, float]:
    """Measure the time to queue and to complete `times` calls, divided by `times`."""
    queued, done = [], []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        for _ in range(times):
            call()
        queued.append(time.perf_counter() - start)
        device.synchronize()
        done.append(time.perf_counter() - start)
    return {
        name: statistics.median(seconds[1:]) / times * 1e6
        for name, seconds in (("queue_us", queued), ("us", done))
    }


def calls(device: Device, kernels: Kernels, batch: int) -> dict[str, Call]:
    """Make a call of each kernel with its own tensors."""
    rng = np.random.default_rng(0)

    def put(array: np.ndarray) -> Tensor:
        tensor = device.empty(array.shape, array.dtype)
        device.upload(tensor, array)
        return tensor

    def integers(high: int, *shape: int) -> Tensor:
        return put(rng.integers(0, high, shape))

    table = device.zeros((VOCABULARY, HIDDEN), HALF)
    image_rows = device.zeros((PROMPT, HIDDEN), HALF)
    tables = (device.zeros((POSITIONS, FREQUENCIES), np.float32) for _ in range(2))
    rope = RopeTable(*tables, device.zeros((FREQUENCIES,), np.float32))
    shape = (2 * LAYERS, batch, HEADS, CAPACITY, HEAD_SIZE)
    cache, page = device.zeros(shape, HALF), device.zeros((2 * LAYERS, 1, HEADS, PREFIX, HEAD_SIZE), HALF)
    lengths, tokens = integers(PROMPT, batch), integers(VOCABULARY, batch, 1)
    deltas = device.zeros((batch,), np.float32)
    mapped, visible, last_tokens = integers(9, batch, 1), integers(9, batch), integers(9, batch)
    counts, offered = put(np.zeros(batch, np.int64)), put(np.ones(batch, np.int64))
    stops = StopState(put(np.full(batch, 2**60)), integers(9, batch), integers(VOCABULARY, 4))
    committing = sampling_state(put, batch, {})
    rules_of_row = {**RULE_SETS["all rules"], "seed": 1}
    logits = put((rng.standard_normal((batch, 1, VOCABULARY)) * 3).astype(np.float32))
    top_ids, top_values = device.zeros((batch, 1, 6), np.int64), device.zeros((batch, 1, 6), np.float32)
    noise, velocity = (device.zeros((batch, 16, 8), np.float32) for _ in range(2))
    flow_time = device.zeros((1,), np.float32)
    vocab_map = put(np.arange(VOCABULARY))
    image = put(rng.integers(0, 256, (480, 640, 3), np.uint8))
    resized = device.zeros((1, 3, *RESIZED), np.uint8)
    layout = PatchLayout(*RESIZED, patch_size=16, block_size=32)
    levels = put(rng.standard_normal((3, 256)).astype(np.float32))
    pixel_values = device.zeros((RESIZED[0] * RESIZED[1] // 16**2, 3 * 2 * 16**2), np.float32)
    pages = np.array([[0, row, 0, row, 32] for row in range(0, PREFIX, 32)])
    found: dict[str, Call] = {}
    for kind, steps in (("step", 1), ("prompt", PROMPT)):
        ids, embeds = integers(VOCABULARY + 9, batch, steps), device.zeros((batch, steps, HIDDEN), HALF)
        cos, sin = (device.zeros((batch, steps, FREQUENCIES), np.float32) for _ in range(2))
        mask = device.zeros((batch, 1, steps, CAPACITY), np.bool_)
        positions = put(rng.integers(0, POSITIONS, (batch, 3, steps)).astype(np.float32))
        found |= {
            f"embed, {kind}": bind(kernels.embed, ids, table, image_rows, embeds),
            f"deepstack, {kind}": bind(kernels.deepstack, ids, VOCABULARY, image_rows, embeds),
            f"rope_rows, {kind}": bind(kernels.rope_rows, rope, lengths, deltas, cos, sin),
            f"mrope_rows, {kind}": bind(kernels.mrope_rows, rope, positions, (24, 20, 20), True, cos, sin),
            f"causal_mask, {kind}": bind(kernels.causal_mask, lengths, mask),
        }
    found |= {
        "resize, 640x480 to 960x1280": bind(kernels.resize, image, resized.view(3, *RESIZED)),
        "cut_patches, 960x1280": bind(kernels.cut_patches, levels, resized, layout, pixel_values),
        "visible_rows": bind(kernels.visible_rows, lengths, 1, visible),
        "map_tokens": bind(kernels.map_tokens, tokens, vocab_map, mapped),
        "count_tokens": bind(kernels.count_tokens, tokens, offered, stops, counts),
        "commit_tokens": bind(kernels.commit_tokens, tokens, tokens, counts, committing, last_tokens),
        "open_row": bind(kernels.open_row, 0, rules_of_row, RowLimits(1, 2**60, -1), committing, stops),
        "move_row": bind(kernels.move_row, 0, batch - 1, committing, stops, last_tokens),
        "commit_rows": bind(kernels.commit_rows, lengths, put(np.zeros(batch, np.int64))),
        "euler_step": bind(kernels.euler_step, noise, velocity, 0.1, flow_time, 0.2),
        "begin_rows": bind(kernels.begin_rows, lengths, deltas, visible, deltas),
        "copy_cache_ranges, 256 tokens": bind(kernels.copy_cache_ranges, page, cache, put(pages)),
        "copy_cache_rows, 256 tokens": bind(kernels.copy_cache_rows, page, (0, 0), cache, (0, 0), PREFIX),
    }
    for name, rules in RULE_SETS.items():
        state = sampling_state(put, batch, rules)
        found[f"sample, {name}"] = bind(kernels.sample, logits, state, tokens)
    masked = device.zeros(logits.shape, np.float32)
    masks = put(np.zeros((batch, 1, -(-VOCABULARY // 32)), np.uint32))
    found["mask_logits"] = bind(kernels.mask_logits, masked, masks)
    found["log_probabilities, 5"] = bind(kernels.log_probabilities, logits, tokens, top_ids, top_values)
    return found


def tree_calls(device: Device, kernels: Kernels, trees: TreeKernels, batch: int) -> dict[str, Call]:
    """Make a call of each kernel of speculative decoding with its own tensors."""
    rng = np.random.default_rng(0)

    def put(array: np.ndarray) -> Tensor:
        tensor = device.empty(array.shape, array.dtype)
        device.upload(tensor, np.ascontiguousarray(array))
        return tensor

    def whole(*shape: int) -> Tensor:
        return device.zeros(shape, np.int64)

    def draft_logits(rows: int) -> Tensor:
        return put((rng.standard_normal((batch, rows, DRAFT_VOCABULARY)) * 3).astype(np.float32))

    table, tree = DraftTable.zeros(device, batch, TOP_K, LEVELS), DraftTree.zeros(device, batch, NODES)
    first, further = draft_logits(1), draft_logits(TOP_K)
    token_of_logit = put(rng.permutation(VOCABULARY)[:DRAFT_VOCABULARY])
    last_tokens, newest = whole(batch), whole(batch, 1)
    lengths, counts = put(rng.integers(0, CAPACITY - NODES, batch)), whole(batch)
    deltas, frequencies = device.zeros((batch,), np.float32), device.zeros((FREQUENCIES,), np.float32)
    rope = RopeTable(*(device.zeros((POSITIONS, FREQUENCIES), np.float32) for _ in range(2)), frequencies)
    embedding = device.zeros((VOCABULARY, HIDDEN), HALF)
    level_embeds, level_states, parents = (device.zeros((batch, TOP_K, HIDDEN), HALF) for _ in range(3))
    level_cos, level_sin = (device.zeros((batch, TOP_K, FREQUENCIES), np.float32) for _ in range(2))
    level_mask = device.zeros((batch, 1, TOP_K, CAPACITY), np.bool_)
    level_inputs = DraftInputs(level_embeds, level_cos, level_sin, level_mask, None, whole(batch))
    trees.add_candidates(first, token_of_logit, table, 1)
    for level in range(1, LEVELS):
        trees.begin_level(
            *(table, level, level_states, newest, embedding, rope, lengths, deltas, parents, level_inputs)
        )
        trees.add_candidates(further, token_of_logit, table, level + 1)
    cos, sin = (device.zeros((batch, NODES, FREQUENCIES), np.float32) for _ in range(2))
    tree_mask = device.zeros((batch, 1, NODES, CAPACITY), np.bool_)
    cache = device.zeros((2 * LAYERS, batch, HEADS, CAPACITY, HEAD_SIZE), HALF)
    path = put(np.broadcast_to(3 * np.arange(LEVELS + 1), (batch, LEVELS + 1)))
    states, taken = (device.zeros((batch, rows, HIDDEN), HALF) for rows in (NODES, LEVELS + 1))
    history = put(rng.integers(0, 500, (batch, CAPACITY)))
    chain, appended = DraftTree.zeros(device, batch, NODES), whole(batch, LEVELS + 1)
    found = {
        "add_candidates, 1 row": bind(trees.add_candidates, first, token_of_logit, table, 1),
        "add_candidates, 10 rows": bind(trees.add_candidates, further, token_of_logit, table, LEVELS),
        "begin_level": bind(
            *(trees.begin_level, table, LEVELS - 1, level_states, newest, embedding),
            *(rope, lengths, deltas, parents, level_inputs),
        ),
        "select_tree": bind(trees.select_tree, table, last_tokens, tree),
        "tree_mask": bind(trees.tree_mask, tree, lengths, tree_mask),
        "tree_rope_rows": bind(trees.tree_rope_rows, rope, lengths, deltas, tree.depths, cos, sin),
        "move_cache_rows, 4 tokens": bind(
            trees.move_cache_rows, cache, 0, lengths, path, put(np.full(batch, PATH))
        ),
        "take_rows, 7 tokens": bind(trees.take_rows, states, path, taken),
        "put_rows, 7 tokens": bind(trees.put_rows, taken, path, states),
        "find_continuation": bind(trees.find_continuation, history, lengths, 4, 2, chain),
        "append_history": bind(trees.append_history, appended, counts, lengths, history),
    }
    row = (rng.standard_normal(VOCABULARY) * 3).astype(np.float32)
    logits = put(np.broadcast_to(row, (batch, NODES, VOCABULARY)))
    outs = [*(whole(batch, LEVELS + 1) for _ in range(3)), whole(batch)]
    for name, rules in RULE_SETS.items():
        if rules.get("repetition_penalty", 1.0) == 1.0:
            state = sampling_state(put, batch, rules)
            sampled = whole(batch, PATH)
            kernels.sample(logits.view(batch, PATH, VOCABULARY), state, sampled)
            expected = device.download(sampled)
            nodes = np.broadcast_to(np.arange(NODES), (batch, NODES))
            ids = np.full((batch, NODES), -1)
            ids[:, 1:PATH] = expected[:, :-1]
            path_tree = DraftTree(put(ids), put(nodes - 1), put(nodes))
            found[f"sample_path, {PATH} tokens, {name}"] = bind(
                trees.sample_path, logits, state, path_tree, None, *outs
            )
    return found


def sampling_state(put: Callable[[np.ndarray], Tensor], batch: int, rules: dict[str, Any]) -> SamplingState:
    """Make a sampling state with the same rules in each row and 1% of tokens seen."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, **rules}).resolved(GenerationDefaults())
    return SamplingState(
        **{name: put(np.full(batch, getattr(params, name), dtype)) for name, dtype in RULES.items()},
        position=put(np.zeros(batch, np.int64)),
        path_limit=put(np.full(batch, 2**31, np.int64)),
        seen=put(np.random.default_rng(1).random((batch, VOCABULARY)) < 0.01),
    )


def bind(kernel: Callable[..., None], *arguments: Any) -> Call:
    return lambda: kernel(*arguments)


if __name__ == "__main__":
    main()
