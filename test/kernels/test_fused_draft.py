# SPDX-License-Identifier: Apache-2.0
"""The fused kernels of a draft head against NumPy.

Without a GPU they are compiled for the host.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from doubles import fused_on_cpu
from doubles.fused_decoder import TYPES, LayerArrays, fuse
from doubles.fused_draft import HeadRun, ProjectionArrays, head_layer_shapes, run_head
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.cuda import compiler
from edgellm_ros.fused.draft import FusedDraft, Projection
from edgellm_ros.fused.fusion import FusedFusion
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.fusion import FusionPlan, FusionShape
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.sources import expand
from edgellm_ros.fused.variants import compiler_for
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights, FusionWeights
from fixtures.on_device import put
from fixtures.ptxas_report import ptxas_report
from fixtures.random_weights import RandomWeights
from fixtures.small_tuning import H200, small_tuning

SMALL = FusedDraftShape(
    "fp16", layers=1, hidden=128, heads=4, kv_heads=2, head_dim=64, inner=192, vocab=200, rotary_dim=64,
    capacity=150, epsilon=1e-5,
)  # fmt: skip
CPU_TUNING = dataclasses.replace(small_tuning(narrow_tile=64), fusion_threads=64)
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}  # relative to the largest value


def changed(**changes) -> FusedDraftShape:
    return dataclasses.replace(SMALL, **changes)


class Head(RandomWeights):
    """Random weights, caches and inputs of a head, as arrays and on a device.

    lengths: filled rows of each sequence, with the new tokens; chosen [B][N]: tokens whose logits are wanted;
    mask [B,S,C]: rows that the tokens see, None = a chain. state_first: of an MTP head, None = another.
    """

    def __init__(
        self,
        shape: FusedDraftShape,
        lengths: list[int],
        chosen: list[list[int]],
        tokens: int = 1,
        mask: np.ndarray | None = None,
        state_first: bool | None = None,
    ) -> None:
        super().__init__(TYPES[shape.dtype])
        self.shape, self.tokens = shape, tokens
        batch, positions = len(lengths), 2 * shape.capacity
        self.layers = [
            LayerArrays(**{
                name: self.weight(name, size) for name, size in head_layer_shapes(shape, layer).items()
            })
            for layer in range(shape.layers)
        ]  # fmt: skip
        self.norm = self.weight("norm", (shape.hidden,))
        self.lm_head = self.values((shape.hidden, shape.all_head_columns), shape.hidden**-0.5)
        self.projection = None
        if state_first is not None:
            norms = self.weight("norm", (shape.hidden,)), self.weight("norm", (shape.hidden,))
            fc = self.values((2 * shape.hidden, shape.hidden), (2 * shape.hidden) ** -0.5)
            self.projection = ProjectionArrays(*norms, fc, state_first)
        angles = self.random.uniform(-3, 3, (positions, shape.rotary_dim // 2))
        cache = batch, shape.kv_heads, shape.capacity, shape.head_dim
        self.run = HeadRun(
            embeds=self.values((batch, tokens, shape.hidden), 1.0),
            states=self.values((batch, tokens, shape.hidden), 2.0),
            cos=np.cos(angles).astype(np.float32),
            sin=np.sin(angles).astype(np.float32),
            position_ids=self.random.integers(0, positions, (batch, tokens)),
            kv_length=np.array(lengths, np.int64),
            last_token_ids=np.array(chosen, np.int64),
            caches=[(self.values(cache, 1.0), self.values(cache, 1.0)) for _ in range(shape.layers)],
            mask=mask,
        )
        for keys, values in self.run.caches:  # rows that nothing may read
            for row, length in enumerate(lengths):
                keys[row, :, length - tokens :] = values[row, :, length - tokens :] = np.nan

    def on_device(self, device) -> tuple[FusedWeights, Projection | None, dict]:
        """Return the weights, those of the projection, and the tensors of a run."""
        kept = []

        def place(array: np.ndarray) -> int:
            kept.append(put(device, array.view(np.uint16)))
            return kept[-1].pointer

        layers = tuple(
            FusedLayerWeights(
                **{name: place(array) for name, array in vars(layer).items() if isinstance(array, np.ndarray)}
            )
            for layer in self.layers
        )
        weights = FusedWeights(layers, place(self.norm), place(self.lm_head), owners=tuple(kept))
        projection = None
        if self.projection is not None:
            size, arrays = self.shape.hidden, self.projection
            pair = [place(arrays.embedding_norm), place(arrays.state_norm)]
            norms = (*pair[:: -1 if arrays.state_first else 1], 0)
            sizes = FusionShape(
                self.shape.dtype, size, size, self.shape.epsilon, state_norms=True,
                max_rows=self.shape.max_rows, states=2,
            )  # fmt: skip
            placed = FusionWeights(place(arrays.fc), 0, norms, tuple(kept))
            projection = Projection(sizes, placed, arrays.state_first)
        run, (batch, chosen) = self.run, self.run.last_token_ids.shape
        tensors = {
            "inputs_embeds": put(device, run.embeds.view(np.uint16)),
            "hidden_states": put(device, run.states.view(np.uint16)),
            "rope_cos": put(device, run.cos),
            "rope_sin": put(device, run.sin),
            "position_ids": put(device, run.position_ids),
            "kv_length": put(device, run.kv_length),
            "last_token_ids": put(device, run.last_token_ids),
            "logits": device.empty((batch, chosen, self.shape.vocab), np.float32),
            "next_hidden_states": device.empty((batch, self.tokens, self.shape.hidden), np.uint16),
        }
        for i, (keys, values) in enumerate(run.caches):
            tensors[f"key_cache_{i}"] = put(device, keys.view(np.uint16))
            tensors[f"value_cache_{i}"] = put(device, values.view(np.uint16))
        if run.mask is not None:
            tensors["attention_mask"] = put(device, run.mask[:, None])
        return weights, projection, tensors

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute logits and next states in float64; write the new rows to the caches."""
        head = self.lm_head[:, : self.shape.vocab]
        return run_head(self.shape, self.layers, self.norm, head, self.run, self.projection)


@pytest.fixture(scope="session")
def host(device):
    """The device that kernels run on, what compiles them, and their tuning.

    Without a GPU the device is the host; on a GPU the tuning is None.
    """
    if device.memory == "cuda":
        return device, compiler_for(device), None
    return fused_on_cpu.FusedDoubleDevice(5), fused_on_cpu.FusedDoubleProgram, CPU_TUNING


def check(host, head: Head) -> None:
    """Compare a run with float64."""
    device, compile, tuning = host
    weights, projection, tensors = head.on_device(device)
    FusedDraft(device, head.shape, weights, compile, tuning, projection).run(tensors)
    logits, states = head.expected()
    outputs = {name: device.download(tensor) for name, tensor in tensors.items()}
    close(outputs["logits"], logits, head.shape.dtype)
    close(outputs["next_hidden_states"].view(head.dtype), states, head.shape.dtype)
    for i, caches in enumerate(head.run.caches):
        for name, cache in zip(("key", "value"), caches, strict=True):
            found = outputs[f"{name}_cache_{i}"].view(head.dtype)
            for row, length in enumerate(head.run.kv_length):
                new = slice(length - head.tokens, length)
                close(found[row, :, new], cache[row, :, new], head.shape.dtype)
                before, after = found[row].copy(), cache[row].copy()
                before[:, new], after[:, new] = 0, 0
                np.testing.assert_array_equal(before.view(np.uint16), after.view(np.uint16))


def close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[dtype], f"relative error {error:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, length",
    [
        pytest.param(SMALL, 1, id="the first token"),
        pytest.param(
            changed(dtype="bf16", norm_before_residual=True, feeds_back_normed_state=True), 77,
            id="bf16, normed states",
        ),
        pytest.param(
            changed(layers=2, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True), 150,
            id="two layers with biases and norms of heads",
        ),
    ],
)  # fmt: skip
def test_a_level_of_one_node_is_that_of_numpy(host, shape, length):
    check(host, Head(shape, [length], [[0]]))


MTP = changed(joined=False, feeds_back_normed_state=True, qk_norm=True, vocab=194, head_columns=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, state_first",
    [
        pytest.param(dataclasses.replace(MTP, attention_gate=True, rotary_dim=16), False, id="Qwen3.5"),
        pytest.param(dataclasses.replace(MTP, qkv_bias=True, qk_norm=False, dtype="bf16"), True, id="MiMo"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 4])
def test_an_mtp_head_projects_embedding_and_state(host, shape, state_first, tokens):
    shape = dataclasses.replace(shape, max_rows=tokens)
    check(host, Head(shape, [77], [[tokens - 1]], tokens=tokens, state_first=state_first))


@pytest.mark.slow
def test_accepted_tokens_have_logits_of_the_newest_alone(host):
    check(host, Head(changed(max_rows=4), [150], [[2]], tokens=4))


@pytest.mark.slow
def test_nodes_of_a_level_see_committed_rows_and_their_ancestors(host):
    """Two sequences with two nodes on the second level."""
    shape, committed, top_k = changed(max_rows=4, feeds_back_normed_state=True), np.array([40, 3]), 2
    lengths = committed + 2 * top_k
    mask = np.zeros((2, top_k, shape.capacity), bool)
    for row, first in enumerate(committed):
        mask[row, :, :first] = True
        for node in range(top_k):  # children of node `row` of the first level
            mask[row, node, [first + row, first + top_k + node]] = True
    head = Head(shape, list(lengths), [[0, 1], [1, 0]], tokens=top_k, mask=mask)
    for keys, values in head.run.caches:
        for row, first in enumerate(committed):  # a node that is no ancestor
            keys[row, :, first + 1 - row], values[row, :, first + 1 - row] = 100, 100
    check(host, head)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, rows, bias",
    [
        pytest.param(FusionShape("fp16", 128, 128), 1, False, id="one row"),
        pytest.param(FusionShape("bf16", 64, 192, state_norms=True, max_rows=4), 3, True, id="three norms"),
        pytest.param(FusionShape("fp16", 192, 64, joined_norm=True, max_rows=2), 2, True, id="one norm"),
    ],
)
def test_fused_states_are_those_of_numpy(host, shape, rows, bias):
    random, dtype = np.random.default_rng(0), TYPES[shape.dtype]
    inputs = 3 * shape.state_size
    states = random.standard_normal((3, rows, shape.state_size)).astype(dtype) * dtype.type(3)
    fc = (random.standard_normal((inputs, shape.fused_size)) * inputs**-0.5).astype(dtype)
    offset = random.standard_normal(shape.fused_size).astype(dtype) if bias else None
    scales = (1 + 0.2 * random.standard_normal(inputs)).astype(dtype)
    norms = np.split(scales, 3) if shape.state_norms else [scales]
    expected = fuse(shape, states, fc, offset, norms)
    assert expected.std() > 0.3
    found = run_fusion(host, shape, states, fc, offset, scales)
    close(found, expected, shape.dtype)


@pytest.mark.slow
def test_fused_states_that_fp16_cannot_hold_are_its_limits(host):
    shape = FusionShape("fp16", 128, 128)
    states = np.full((3, 1, 128), 4000, np.float16)
    fc = np.ones((384, 128), np.float16)
    fc[:, 1::2] = -1
    found = run_fusion(host, shape, states, fc, None, None)
    np.testing.assert_array_equal(found[0], np.tile([65504, -65504], 64))


def run_fusion(host, shape, states, fc, bias, scales) -> np.ndarray:
    """Fuse states [3,rows,Hb]; return [rows,Hd]."""
    device, compile, tuning = host
    kept = [put(device, array.view(np.uint16)) for array in (fc, *states)]
    first = put(device, scales.view(np.uint16)) if shape.state_norms or shape.joined_norm else None
    norms = tuple(first.pointer + 2 * i * shape.state_size for i in range(3)) if first else (0, 0, 0)
    offset = put(device, bias.view(np.uint16)) if bias is not None else None
    weights = FusionWeights(kept[0].pointer, offset.pointer if offset else 0, norms)
    rows = states.shape[1]
    out = device.empty((rows, shape.fused_size), np.uint16)
    threads = tuning.fusion_threads if tuning else 256
    fusion = FusedFusion(device, shape, weights, compile, threads)
    pointers = [tensor.pointer for tensor in kept[1:]]
    for program, launch, params in fusion.launches(pointers, out.pointer, rows, early=False):
        program.launch(launch, params)
    return device.download(out).view(TYPES[shape.dtype])


@pytest.mark.slow
def test_the_kernels_keep_their_variables_in_registers():
    fusion = FusionPlan(FusionShape("fp16", 128, 128, state_norms=True, max_rows=8), 8, 20, 227 << 10)
    for plan, names in (
        (FusedPlan(changed(max_rows=8), 8, 20, 227 << 10, H200), ("draft_head", "joined_qkv")),
        (fusion, ("fuse", "fused_states")),
    ):
        report = ptxas_report(expand(plan.source), compiler.options("sm_87", plan))
        found = re.findall(r"Function properties for (\w+)\n\D*(\d+) bytes stack frame", report)
        frames = dict(found)
        assert {name: frames[name] for name in names} == dict.fromkeys(names, "0")


def test_the_first_kernel_starts_after_everything_before_it():
    device = fused_on_cpu.FusedDoubleDevice(5)
    eagle, mtp = Head(changed(layers=2), [5], [[0]]), Head(MTP, [5], [[0]], state_first=False)
    for head, name in ((eagle, "joined_qkv"), (mtp, "fuse")):
        weights, projection, tensors = head.on_device(device)
        draft = FusedDraft(device, head.shape, weights, lambda plan: None, CPU_TUNING, projection)
        early = {(i, launch.name): launch.early for i, (_, launch, _) in enumerate(draft.launches(tensors))}
        assert [name for name, early in early.items() if not early] == [(0, name)]


@pytest.mark.parametrize("most_shared, rows", [(227 << 10, 16), (99 << 10, 8)])
def test_a_head_takes_as_many_tokens_as_shared_memory_has_room_for(most_shared, rows):
    device, shape = fused_on_cpu.FusedDoubleDevice(16), changed(hidden=2048, inner=6144, max_rows=16)
    device.most_shared_memory = most_shared
    layer = FusedLayerWeights(0, 0, 0, 0, 0, 0)
    assert FusedDraft(device, shape, FusedWeights((layer,), 0), lambda plan: None).max_rows == rows


def test_a_head_whose_lm_head_is_an_embedding_table_is_refused(host):
    device, compile, tuning = host
    with pytest.raises(EngineError, match="the LM head is the embedding table"):
        FusedDraft(device, changed(tied=True), FusedWeights((), 0), compile, tuning)
