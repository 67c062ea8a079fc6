# SPDX-License-Identifier: Apache-2.0
"""FusedDecoder: a decode step of all layers, queued as launches of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.fused.blocks import feed_forward, numbers_of_states, recurrent_block
from edgellm_ros.fused.fusion import FusedFusion, StateFusion
from edgellm_ros.fused.params import (
    AttentionParams,
    BatchAttentionParams,
    CombineSplitsParams,
    KernelParams,
    LastStateParams,
    LmHeadParams,
    OParams,
    PrepLmHeadParams,
    PrepQkvParams,
    QkvParams,
    RopeAppendKvParams,
    TreeAttentionParams,
)
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.launch import OLDEST
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.plan.tuning import Tuning, load_tuning
from edgellm_ros.fused.variants import (
    Compile,
    Step,
    Variant,
    compile_variants,
    compiler_for,
    make_plans,
    make_scratch,
    variant_for,
)
from edgellm_ros.fused.weights import FusedWeights
from edgellm_ros.kernels.capability import EARLY_START, compute_capability

LORA_TABLE = "lora_table"  # the tensor that has the adapters of the sequences
ROPE = {
    "cos_table": "rope_cos",
    "sin_table": "rope_sin",
    "position_ids": "position_ids",
}  # of models with RoPE


class FusedDecoder:
    """Decode steps of one model on one device.

    A step has one token or several tokens per sequence.

    - device: a `CudaDevice`
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels
    - fusion: for a draft head; its output is `fused_hidden_states`

    `max_rows`: most tokens of a step, over all sequences; fewer than the shape's if the device has too little
    smem. `max_adapted_rows`: the same for sequences with LoRA adapters; 0 if the shape has none.
    `starts_early`: whether a kernel may start before the previous one has ended (PDL).

    EngineError if the device's architecture is older than sm_80 or the shape is not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedShape,
        weights: FusedWeights,
        compile: Compile | None = None,
        tuning: Tuning | None = None,
        fusion: StateFusion | None = None,
    ) -> None:
        reason = shape.unsupported()
        if reason is not None:
            raise EngineError(f"the fused kernels do not support this model: {reason}")
        if len(weights.layers) != shape.layers:
            raise ValueError(f"weights of {len(weights.layers)} layers for a shape of {shape.layers}")
        capability = compute_capability(device.arch)
        if capability < OLDEST:
            raise EngineError(f"the fused kernels need compute capability 8.0, the GPU is {device.arch}")
        self._shape, self._weights = shape, weights
        self._numbers = numbers_of_states(weights)
        self._tuning = tuning or load_tuning(device.arch)
        self.starts_early = self._tuning.early_start and capability >= EARLY_START
        self._device, self._compile = device, compile or compiler_for(device)
        plans = make_plans(device, shape, self._tuning)
        self._adapted_plans = make_plans(device, shape, self._tuning, adapted=True) if shape.lora_rank else []
        self._variants = compile_variants(self._compile, plans)  # by kind of layers
        self._adapted: list[dict[int, Variant]] = []  # compiled when the first adapter is used
        adapted = min((max(each, default=0) for each in self._adapted_plans), default=0)
        self.max_rows = min(shape.max_rows, *map(max, plans))
        self.max_adapted_rows = min(shape.max_rows, adapted)
        every = (plan for each in (*plans, *self._adapted_plans) for plan in each.values())
        self._scratch = make_scratch(device, every)
        self._fusion = fusion
        self._states: dict[int, Tensor] = {}  # by layer from 0
        if fusion is not None:
            threads = self._tuning.fusion_threads
            self._fuse = FusedFusion(device, fusion.shape, fusion.weights, self._compile, threads)
            rows = (self.max_rows, shape.hidden)
            self._states = {layer: device.empty(rows, np.uint16) for layer in fusion.layers if layer}

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one step on the device's stream.

        Only launches kernels, so the step can be recorded. tensors: those of `llm/model.cuda.onnx` or
        `llm/verify.cuda.onnx`, by binding name: inputs_embeds [B,S,H], rope_cos and rope_sin [P,R/2] fp32,
        position_ids [B,S], kv_length [B] (with the new tokens, which are in the last S of these rows),
        key_cache_i and value_cache_i [B,Hkv,C,D], logits [B,S,V] fp32 of all tokens, hidden_states_i [B,S,H];
        states before and after the step of recurrent layers, and of a verification the values of its chain;
        attention_mask [B,1,S,C] bool if the tokens of a sequence are a tree, without which they are a chain;
        embedding or lm_head.weight if the weights have no LM head; fused_hidden_states [B,S,Hd] for a draft
        head; lora_table [L,4,B,3] if sequences have adapters. Others are ignored. B * S is at most
        `max_rows`, with adapters `max_adapted_rows`. With a mask and a sliding window, a token's position is
        the number of rows before the new ones and of the new rows that it sees.
        """
        for program, launch, params in self.launches(tensors):
            program.launch(launch, params)

    def launches(self, tensors: Mapping[str, Tensor]) -> Iterator[Step]:
        """Yield program, kernel and parameters of each launch of a step.

        The first kernel waits for all work before it, on behalf of all kernels.
        """
        shape, (batch, tokens, _) = self._shape, tensors["inputs_embeds"].shape
        rows, most = batch * tokens, self.max_adapted_rows if LORA_TABLE in tensors else self.max_rows
        if not 1 <= rows <= most:
            raise EngineError(f"{batch} sequences of {tokens} tokens, expected 1 to {most} rows")
        if shape.recurrent is not None and tokens > CHAIN_TOKENS:
            raise EngineError(f"recurrent layers: a chain of {tokens} tokens, more than {CHAIN_TOKENS}")
        variants, early = self._kinds(tensors, rows), False
        for layer in range(len(self._weights.layers)):
            variant = variants[shape.kind(layer)]
            for name, params in self._layer(variant.plan, tensors, layer, rows, tokens).items():
                if variant.plan.has(name):
                    yield variant.program, variant.plan.launch(name, rows, early, tokens), params
                    early = self.starts_early
        hidden = self._hidden_states(tensors, shape.layers)
        yield from self._head_launches(tensors, variants[0], rows, hidden)
        if self._fusion is not None:
            yield from self._fusion_launches(self._fusion.layers, tensors, variants[0], rows)

    def run_head(self, logits: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Queue the LM head for the rows at `residual`, which another part has written.

        logits [rows,V] fp32, of at most `max_rows` rows; tensors: those of `run`, of which the head is used.
        """
        rows = logits.shape[0]
        variant = variant_for(self._variants[0], rows)
        for program, launch, params in self._head_launches({**tensors, "logits": logits}, variant, rows, 0):
            program.launch(launch, params)

    def _head_launches(
        self, tensors: Mapping[str, Tensor], variant: Variant, rows: int, hidden: int
    ) -> Iterator[Step]:
        """Yield the launches of the last norm and the LM head.

        hidden: address of the normed states, 0 = they are no output.
        """
        head = self._weights.lm_head
        head = head or tensors["embedding" if self._shape.tied else "lm_head.weight"].pointer
        logits, norm, x = tensors["logits"].pointer, self._weights.norm, self._scratch["x"].pointer
        if variant.plan.prepared["lm_head"]:
            launch = variant.plan.launch("prep_lm_head", rows, self.starts_early)
            prep = PrepLmHeadParams(norm=norm, residual=self.residual, hidden=hidden, x=x, rows=rows)
            yield variant.program, launch, prep
        launch = variant.plan.launch("lm_head", rows, self.starts_early)
        last = LmHeadParams(
            weights=head, norm=norm, residual=self.residual, logits=logits, hidden=hidden, x=x, rows=rows
        )
        yield variant.program, launch, last

    @property
    def residual(self) -> int:
        """Address of the residual stream of a step, int64 [max_rows,H] in units of 2^-30."""
        return self._scratch["residual"].pointer

    def _kinds(self, tensors: Mapping[str, Tensor], rows: int) -> list[Variant]:
        """Return the kernels for a number of rows, by kind of layers.

        Kernels with adapters are compiled when they are first used.
        """
        adapted = LORA_TABLE in tensors
        if adapted and not self._adapted:
            self._adapted = compile_variants(self._compile, self._adapted_plans)
        return [variant_for(each, rows) for each in (self._adapted if adapted else self._variants)]

    def _fusion_launches(
        self, layers: Sequence[int], tensors: Mapping[str, Tensor], variant: Variant, rows: int
    ) -> Iterator[Step]:
        """Yield the launches of the fusion, which follow a step."""
        last = self._shape.layers
        if last in layers:
            launch = variant.plan.launch("last_state", rows, self.starts_early)
            residual, out = self._scratch["residual"].pointer, self._states[last].pointer
            yield variant.program, launch, LastStateParams(residual=residual, out=out, rows=rows)
        states = [self._state(tensors, layer) for layer in layers]
        out = tensors["fused_hidden_states"].pointer
        yield from self._fuse.launches(states, out, rows, self.starts_early)

    def _state(self, tensors: Mapping[str, Tensor], layer: int) -> int:
        """Return the address of the residual stream at the input of a layer.

        A draft head takes this state.
        """
        if not layer:
            return tensors["inputs_embeds"].pointer
        output = self._hidden_states(tensors, layer) if layer < self._shape.layers else 0
        return output or self._states[layer].pointer

    def _layer(
        self, plan: FusedPlan, tensors: Mapping[str, Tensor], layer: int, rows: int, tokens: int
    ) -> dict[str, KernelParams]:
        """Return the parameters of a layer's kernels, in the order of their launches.

        Prep kernels are launched only if the plan has them, which is that of the layer's kind.
        """
        weights, launches = self._weights.layers[layer], dict[str, KernelParams]()
        scratch = {name: tensor.pointer for name, tensor in self._scratch.items()}
        if weights.qkv:
            launches |= self._attention_block(plan, tensors, layer, rows, tokens)
        if weights.in_proj:
            norm, number = self._input_norm(tensors, layer), self._numbers[layer]
            launches |= recurrent_block(
                tensors, scratch, weights, norm, number=number, tokens=tokens, rows=rows
            )
        if weights.gate_up:
            _, _, *lora = _adapters(tensors, layer)
            launches |= feed_forward(scratch, weights, lora, rows, tokens)
        return launches

    def _input_norm(self, tensors: Mapping[str, Tensor], layer: int) -> dict[str, int]:
        """Return parameters of the kernels that begin a layer."""
        hidden = self._state(tensors, layer) if layer in self._states else self._hidden_states(tensors, layer)
        return {
            "norm": self._weights.layers[layer].input_norm,
            "embeds": 0 if layer else tensors["inputs_embeds"].pointer,
            "residual": self._scratch["residual"].pointer,
            "hidden": hidden,
        }

    def _attention_block(
        self, plan: FusedPlan, tensors: Mapping[str, Tensor], layer: int, rows: int, tokens: int
    ) -> dict[str, KernelParams]:
        """Return the parameters of the kernels of attention."""
        weights = self._weights.layers[layer]
        scratch = {name: tensor.pointer for name, tensor in self._scratch.items()}
        residual, x = scratch["residual"], scratch["x"]
        splits: dict[str, int] = {
            "partial_out": scratch["split_sums"],
            "max_and_sum": scratch["split_scales"],
            "window": self._shape.window(layer) or 0,
        }
        length = tensors["kv_length"].pointer
        attention, most_splits = self._attention(plan, tensors, layer, rows, tokens, splits)
        combined = {**splits, "kv_length": length, "tokens": tokens, "splits": most_splits}
        qkv_lora, o_lora, _, _ = _adapters(tensors, layer)
        norm = self._input_norm(tensors, layer)
        return {
            "prep_qkv": PrepQkvParams(**norm, x=x, rows=rows, weights=weights.qkv),
            "qkv": QkvParams(
                **norm,
                weights=weights.qkv,
                partials=scratch["qkv"],
                x=x,
                rows=rows,
                adapters=qkv_lora,
                tokens=tokens,
            ),
            **attention,
            "combine_splits": CombineSplitsParams(
                **combined, x=x, weights=weights.o, partials=scratch["qkv"], bias=weights.qkv_bias
            ),
            "o": OParams(
                **combined,
                weights=weights.o,
                bias=weights.o_bias,
                residual=residual,
                ready=x,
                rows=rows,
                adapters=o_lora,
            ),
        }

    def _attention(
        self,
        plan: FusedPlan,
        tensors: Mapping[str, Tensor],
        layer: int,
        rows: int,
        tokens: int,
        splits: dict[str, int],
    ) -> tuple[dict[str, KernelParams], int]:
        """Return the parameters of the attention's kernels, and the number of KV splits.

        0: the kernel `attention`, which has the plan's number.
        """
        weights = self._weights.layers[layer]
        cache = {
            "kv_length": tensors["kv_length"].pointer,
            "key_cache": tensors[f"key_cache_{self._numbers[layer]}"].pointer,
            "value_cache": tensors[f"value_cache_{self._numbers[layer]}"].pointer,
        }
        made = {
            "partials": self._scratch["qkv"].pointer,
            "bias": weights.qkv_bias,
            "q_norm": weights.q_norm,
            "k_norm": weights.k_norm,
            **{param: tensors[name].pointer if name in tensors else 0 for param, name in ROPE.items()},
            **cache,
        }
        if not plan.makes_new_rows(tokens):
            return {"attention": AttentionParams(**made, **splits)}, 0
        most = plan.tree_splits(rows, tokens)
        if plan.attends_in_batch(tokens):
            return {"batch_attention": BatchAttentionParams(**made, **splits, splits=most)}, most
        queries = self._scratch["queries"].pointer
        mask = tensors["attention_mask"].pointer if tokens > 1 and "attention_mask" in tensors else 0
        return {
            "rope_append_kv": RopeAppendKvParams(**made, queries=queries, tokens=tokens),
            "tree_attention": TreeAttentionParams(
                queries=queries, **cache, **splits, mask=mask, tokens=tokens, splits=most
            ),
        }, most

    def _hidden_states(self, tensors: Mapping[str, Tensor], layer: int) -> int:
        """Return the address of a layer's output of hidden states; 0 if it has none."""
        if self._shape.last_states and layer == self._shape.layers:
            return tensors["fused_hidden_states"].pointer
        if layer not in self._shape.hidden_state_layers:
            return 0
        return tensors[f"hidden_states_{layer}"].pointer


def _adapters(tensors: Mapping[str, Tensor], layer: int) -> Iterator[int]:
    """Yield addresses in `lora_table` for a layer's four GEMVs; 0 without adapters."""
    table = tensors.get(LORA_TABLE)
    for product in range(4):
        nbytes = 0 if table is None else 8 * table.shape[2] * table.shape[3]
        yield 0 if table is None else table.pointer + (4 * layer + product) * nbytes
