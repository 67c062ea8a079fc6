# SPDX-License-Identifier: Apache-2.0
"""The kernels of whole chains and of prompts against NumPy.

Without a GPU they are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import TYPES, LayerArrays
from doubles.fused_draft import HeadRun, head_layer_shapes, run_head
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.chain import FusedChain
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.plan.chain import CLUSTERS, ChainPlan
from edgellm_ros.fused.plan.prompt import PromptPlan
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.prompt import FusedPrompt
from edgellm_ros.fused.sources import expand
from edgellm_ros.fused.variants import compiler_for
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights
from edgellm_ros.kernels.chain_protocol import ChainDraft
from edgellm_ros.kernels.protocol import RopeTable
from edgellm_ros.kernels.tree_protocol import DraftTable, DraftTree
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report
from fixtures.random_weights import RandomWeights

SMALL = FusedDraftShape(
    "fp16", layers=1, hidden=128, heads=4, kv_heads=2, head_dim=64, inner=192, vocab=40, rotary_dim=64,
    capacity=150, epsilon=1e-5,
)  # fmt: skip
ARENA = dataclasses.replace(SMALL, hidden=256, inner=512, vocab=128, capacity=1024)
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}  # relative to the largest value
ROWS, LEVELS, CLUSTER, TOKENS = 4, 3, 4, 50


def changed(**changes) -> FusedDraftShape:
    return dataclasses.replace(SMALL, **changes)


class Draft(RandomWeights):
    """Random weights and inputs of a draft.

    Of each sequence, `lengths` has the rows in the cache and `counts` the accepted tokens.
    """

    def __init__(self, shape: FusedDraftShape, lengths: list[int], counts: list[int]) -> None:
        super().__init__(TYPES[shape.dtype])
        self.shape, batch = shape, len(lengths)
        self.layer = {name: self.weight(name, size) for name, size in head_layer_shapes(shape, 0).items()}
        self.norm = self.weight("norm", (shape.hidden,))
        self.lm_head = self.values((shape.hidden, shape.vocab), 2 * shape.hidden**-0.5)
        self.embedding = self.values((TOKENS, shape.hidden), 1.0)
        self.token_of_logit = self.random.permutation(TOKENS)[: shape.vocab]
        self.lengths, self.counts = np.array(lengths), np.array(counts)
        self.deltas = np.array([2.0, -0.25], np.float32)[:batch]
        self.tokens = self.random.integers(0, TOKENS, (batch, ROWS))
        self.states = self.values((batch, ROWS, shape.hidden), 2.0)
        self.last_tokens = self.random.integers(0, TOKENS, batch)
        cache = batch, shape.kv_heads, shape.capacity, shape.head_dim
        self.caches = [self.values(cache, 1.0) for _ in range(2)]
        for values in self.caches:  # rows that nothing may read
            for row, length in enumerate(lengths):
                values[row, :, length:] = np.nan
        self.frequencies = (10000.0 ** -np.linspace(0, 1, shape.rotary_dim // 2)).astype(np.float32)

    def run(self, host, size: int = LEVELS + 1) -> dict[str, np.ndarray]:
        """Draft a tree of so many nodes; return all outputs."""
        device, compile, cluster = host

        def place(array: np.ndarray):
            return put(device, array.view(np.uint16) if array.dtype == self.dtype else array)

        weights = {name: place(array) for name, array in self.layer.items()}
        last = place(self.norm), place(self.lm_head)
        pointers = {name: tensor.pointer for name, tensor in weights.items()}
        layers = FusedWeights((FusedLayerWeights(**pointers),), last[0].pointer, last[1].pointer)
        positions = np.arange(2 * self.shape.capacity)[:, None] * self.frequencies.astype(np.float64)
        rope = [np.cos(positions).astype(np.float32), np.sin(positions).astype(np.float32), self.frequencies]
        batch = len(self.lengths)
        caches = [place(values) for values in self.caches]
        table, tree = DraftTable.zeros(device, batch, 1, LEVELS), DraftTree.zeros(device, batch, size)
        lengths, newest = place(self.lengths), device.zeros((batch, 1), np.int64)
        kept = [place(each) for each in (self.embedding, self.token_of_logit, self.states)]
        chain = FusedChain(device, self.shape, layers, ROWS, LEVELS, compile, cluster)
        chain.run(
            ChainDraft(
                tokens=place(self.tokens),
                counts=place(self.counts),
                states=kept[2],
                newest=newest,
                lengths=lengths,
                deltas=place(self.deltas),
                rope=RopeTable(*map(place, rope)),
                caches=dict(zip(("key_cache_0", "value_cache_0"), caches, strict=True)),
                embedding=kept[0],
                token_of_logit=kept[1],
                table=table,
                last_tokens=place(self.last_tokens),
                tree=tree,
            )
        )
        device.synchronize()
        found = {name: device.download(tensor) for name, tensor in (vars(table) | {"newest": newest}).items()}
        found |= {f"tree_{name}": device.download(tensor) for name, tensor in vars(tree).items()}
        found["caches"] = [device.download(values).view(self.dtype) for values in caches]
        return found | {"lengths": device.download(lengths)}

    def check(self, found: dict[str, np.ndarray]) -> None:
        """Compare with float64, each level after the kernel's own tokens."""
        logit_of_token = {token: logit for logit, token in enumerate(self.token_of_logit.tolist())}
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            caches = [values[row : row + 1].copy() for values in self.caches]
            tokens, states, score, first = self.tokens[row, :count], self.states[row, :count], 0.0, 0
            for level in range(1, LEVELS + 1):
                logits, following = self._reference(row, length, first, tokens, states, caches)
                token = found["tokens"][row, level]
                chosen = logits[logit_of_token[token]]
                score += chosen - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                assert chosen > logits.max() - 2 * TOLERANCE[self.shape.dtype] * np.abs(logits).max()
                tolerance = 20 * TOLERANCE[self.shape.dtype]
                assert found["scores"][row, level] == pytest.approx(score, abs=tolerance)
                first += len(tokens)
                tokens, states = np.array([token]), following[-1:].astype(self.dtype)
            new = slice(length, length + first)
            for mine, expected in zip(found["caches"], caches, strict=True):
                close(mine[row, :, new], expected[0, :, new], self.shape.dtype)
                before, after = mine[row].copy(), expected[0].copy()
                before[:, new], after[:, new] = 0, 0
                np.testing.assert_array_equal(before.view(np.uint16), after.view(np.uint16))

    def _reference(self, row, length, first, tokens, states, caches) -> tuple[np.ndarray, np.ndarray]:
        """Compute the logits after the last of some tokens, and the states after each."""
        count = len(tokens)
        positions = length + first + np.arange(count) + np.float64(self.deltas[row])
        angles = positions[:, None] * self.frequencies.astype(np.float64)
        run = HeadRun(
            embeds=self.embedding[tokens][None],
            states=states[None],
            cos=np.cos(angles),
            sin=np.sin(angles),
            position_ids=np.arange(count)[None],
            kv_length=np.array([length + first + count]),
            last_token_ids=np.array([[count - 1]]),
            caches=[tuple(caches)],
        )
        logits, following = run_head(self.shape, [LayerArrays(**self.layer)], self.norm, self.lm_head, run)
        return logits[0, 0], following[0]


def close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[dtype], f"relative error {error:.2g}"


@pytest.fixture(scope="session")
def host(device):
    """The device, the function that compiles the kernel, and the CTAs per cluster."""
    if device.memory == "cuda":
        if compiler_arch(device) < CLUSTERS:
            pytest.skip("the GPU has no clusters")
        return device, compiler_for(device), CLUSTER
    return fused_on_cpu.FusedDoubleDevice(5), fused_on_cpu.FusedDoubleProgram, CLUSTER


def compiler_arch(device) -> int:
    return int(device.arch.removeprefix("sm_"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="fp16"),
        pytest.param(
            changed(
                dtype="bf16", norm_before_residual=True, feeds_back_normed_state=True, qk_norm=True,
                qkv_bias=True, o_bias=True, mlp_bias=True, rotary_dim=32,
            ),
            id="bf16, biases, norms of heads, normed states",
        ),
    ],
)  # fmt: skip
def test_a_chain_is_that_of_numpy(host, shape):
    draft = Draft(shape, [140, 3], [3, 1])
    found = draft.run(host)
    draft.check(found)
    np.testing.assert_array_equal(found["lengths"], [143, 4])
    np.testing.assert_array_equal(found["newest"], [[2], [0]])
    np.testing.assert_array_equal(found["parents"], [[-1, 0, 1, 2]] * 2)
    np.testing.assert_array_equal(found["nodes"], [[[1], [2]]] * 2)
    np.testing.assert_array_equal(found["tree_tokens"][:, 0], draft.last_tokens)
    np.testing.assert_array_equal(found["tree_tokens"][:, 1:], found["tokens"][:, 1:])
    np.testing.assert_array_equal(found["tree_parents"], [[-1, 0, 1, 2]] * 2)
    np.testing.assert_array_equal(found["tree_depths"], [[0, 1, 2, 3]] * 2)


@pytest.mark.slow
def test_a_sequence_without_accepted_tokens_is_left_as_it_is(host):
    draft = Draft(SMALL, [6, 9], [0, 2])
    found = draft.run(host)
    np.testing.assert_array_equal(found["lengths"], [6, 11])
    assert not found["tree_tokens"][0].any()
    assert found["tree_depths"][1].any()
    for mine, before in zip(found["caches"], draft.caches, strict=True):
        np.testing.assert_array_equal(mine[0].view(np.uint16), before[0].view(np.uint16))


@pytest.mark.slow
def test_a_smaller_tree_has_the_beginning_of_the_chain(host):
    draft = Draft(SMALL, [0], [4])
    whole, part = draft.run(host), draft.run(host, size=3)
    draft.check(whole)
    np.testing.assert_array_equal(part["tree_tokens"], whole["tree_tokens"][:, :3])
    np.testing.assert_array_equal(part["lengths"], [4])


@pytest.mark.slow
def test_after_logits_that_are_not_finite_there_are_no_tokens(host):
    draft = Draft(SMALL, [5], [2])
    draft.states[0, 1, 7] = np.nan
    found = draft.run(host)
    np.testing.assert_array_equal(found["tree_tokens"][0, 1:], [-1] * LEVELS)
    np.testing.assert_array_equal(found["scores"][0, 1:], [-np.inf] * LEVELS)


@pytest.mark.slow
def test_rows_of_prompts_are_those_of_numpy(host):
    device, compile, _ = host
    shape = changed(qk_norm=True, qkv_bias=True, rotary_dim=32)
    draft, lengths, tokens = Draft(shape, [140, 3], [1, 1]), np.array([140, 3]), 11
    values = draft.values((2, 2, tokens, shape.hidden), 2.0)
    angles = draft.random.uniform(-3, 3, (2, tokens, shape.rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    kept = {name: put(device, array.view(np.uint16)) for name, array in draft.layer.items()}
    weights = FusedWeights((FusedLayerWeights(**{name: each.pointer for name, each in kept.items()}),), 0)
    caches = [put(device, each.view(np.uint16)) for each in draft.caches]
    inputs = [put(device, each) for each in (*values.view(np.uint16), cos, sin, lengths)]
    FusedPrompt(device, shape, weights, compile).run(
        *inputs, dict(zip(("key_cache_0", "value_cache_0"), caches, strict=True))
    )
    found = [device.download(each).view(draft.dtype) for each in caches]
    for row, length in enumerate(lengths):
        count = min(tokens, shape.capacity - length)
        run = HeadRun(
            embeds=values[0, row : row + 1, :count],
            states=values[1, row : row + 1, :count],
            cos=cos[row],
            sin=sin[row],
            position_ids=np.arange(count)[None],
            kv_length=np.array([length + count]),
            last_token_ids=np.array([[0]]),
            caches=[tuple(each[row : row + 1] for each in draft.caches)],
        )
        run_head(shape, [LayerArrays(**draft.layer)], draft.norm, draft.lm_head, run)
        for mine, expected in zip(found, draft.caches, strict=True):
            new = slice(length, length + count)
            close(mine[row, :, new], expected[row, :, new], shape.dtype)
            mine[row, :, new] = expected[row, :, new]
    for mine, expected in zip(found, draft.caches, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint16), expected.view(np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_87", "sm_90", "sm_110"])
def test_the_kernels_keep_their_variables_in_registers(arch):
    plans = {"draft_prompt": PromptPlan(ARENA, 227 << 10)}
    if arch != "sm_87":
        plans["draft_chain"] = ChainPlan(ARENA, 8, 7, 227 << 10)
    for name, plan in plans.items():
        report = ptxas_report(expand(plan.source), compiler.options(arch, plan))
        frames = re.findall(rf"Function properties for {name}\n\D*(\d+) bytes stack frame", report)
        assert frames == ["0"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layers": 2}, "2 layers"),
        ({"head_dim": 96}, "head_dim is 96"),
        ({"hidden": 2048, "inner": 6144, "vocab": 32000}, "bytes of shared memory"),
        ({"heads": 6, "kv_heads": 3}, "3 KV heads for 16 blocks"),
        ({"inner": 512}, "sizes of 128 and 512, less than 16 columns for each block"),
    ],
)
def test_a_head_that_the_kernel_does_not_take_is_refused(changes, reason):
    with pytest.raises(EngineError, match=reason):
        ChainPlan(changed(**changes), 8, 7, 227 << 10)


def test_a_gpu_without_clusters_is_refused():
    device = fused_on_cpu.FusedDoubleDevice(5)
    device.arch = "sm_87"
    with pytest.raises(EngineError, match="sm_87 has no clusters"):
        FusedChain(device, SMALL, FusedWeights((), 0), ROWS, LEVELS)
