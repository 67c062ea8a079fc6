# SPDX-License-Identifier: Apache-2.0
"""FusedPrefill and FusedVerification: many tokens through all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.blocks import numbers_of_states
from edgellm_ros.fused.decoder import ROPE, FusedDecoder
from edgellm_ros.fused.fusion import StateFusion
from edgellm_ros.fused.params import (
    ActivateParams,
    CombinePromptParams,
    JoinStatesParams,
    KeepLastParams,
    KernelParams,
    LastTokensParams,
    NormTokensParams,
    PromptAttentionParams,
    RopeTokensParams,
    RoundStatesParams,
)
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.plan.prefill import PrefillPlan
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.products import Matrix, Products
from edgellm_ros.fused.prompt_mixer import PromptMixer
from edgellm_ros.fused.prompt_part import PromptPart, cut_prompts
from edgellm_ros.fused.variants import Compile, compiler_for
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

MOST_TOKENS = 4096  # at once, over all sequences: then the GPU is busy, and scratch takes memory for each


class FusedPrefill:
    """Prefills of one model on one device.

    - decoder: has the kernels of the LM head
    - most_tokens: of the longest run, over all sequences; scratch is made for MOST_TOKENS of them
    - compile: makes a program of a plan; None = for the device, from the cache of compiled kernels
    - fusion: for a draft head; its output is `fused_hidden_states`
    - trees: whether the tokens of a sequence are a tree, whose mask is one of the tensors

    EngineError, with the reason, if the kernels do not take the shape.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedShape,
        weights: FusedWeights,
        decoder: FusedDecoder,
        products: Products,
        most_tokens: int,
        compile: Compile | None = None,
        fusion: StateFusion | None = None,
        trees: bool = False,
    ) -> None:
        sizes = device.multiprocessors, device.most_shared_memory
        self._fusion = fusion
        self._plan = PrefillPlan(shape, *sizes, None if fusion is None else fusion.shape, trees)
        self._shape, self._weights, self._decoder, self._products = shape, weights, decoder, products
        compile = compile or compiler_for(device)
        self._program = compile(self._plan)
        self._numbers = numbers_of_states(weights)
        self._last_states = "fused_hidden_states" if shape.last_states else f"hidden_states_{shape.layers}"
        self._rows = rows = min(most_tokens, MOST_TOKENS)
        mixer = shape.recurrent
        widest = max(shape.hidden, shape.q_size, shape.inner, 0 if mixer is None else mixer.values)
        scratch = {
            "residual": 4 * rows * shape.hidden,
            "x": 2 * rows * widest,
            "qkv": 2 * rows * shape.qkv_size,
            "gate_up": 2 * rows * shape.gate_up_size,
            "last_residual": 4 * shape.max_rows * shape.hidden,
            "last_x": 2 * shape.max_rows * widest,
            **self._plan.scratch_bytes,
        }
        if fusion is not None:
            scratch |= {"joined": 6 * rows * shape.hidden, "fused": 4 * rows * fusion.shape.fused_size}
            states = [layer for layer in fusion.layers if layer]
            scratch |= {_state(layer): 2 * rows * shape.hidden for layer in states}
        self._scratch = {name: device.zeros((nbytes,), np.uint8) for name, nbytes in scratch.items()}
        self._addresses = {name: tensor.pointer for name, tensor in self._scratch.items()}
        self._mixer: PromptMixer | None = None
        if mixer is not None:
            layers = sum(bool(layer.in_proj) for layer in weights.layers)
            self._mixer = PromptMixer(device, shape, products, rows, layers, compile)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one prefill on the device's stream.

        Only launches kernels, so it can be recorded. tensors: those of `llm/model.cuda.onnx`, by binding
        name: inputs_embeds [B,S,H]; rope_cos and rope_sin [P,R/2] fp32; position_ids [B,S]; kv_length [B]
        (with the new tokens, which are in the last S of these rows); last_token_ids [B,1], of the tokens
        whose logits are an output; deepstack_embeds_i [B,S,H], added after layer i from 0; key_cache_i and
        value_cache_i [B,Hkv,C,D]; logits [B,1,V] fp32; hidden_states_i [B,S,H]; embedding or lm_head.weight
        if the weights have no LM head; fused_hidden_states [B,S,Hd] for a draft head; of recurrent layers
        valid_tokens [B], the states and those after the valid tokens. Others are ignored.
        Of several sequences B * S is at most MOST_TOKENS; one of more tokens runs in parts.
        """
        batch, tokens, _ = tensors["inputs_embeds"].shape
        if batch > 1 and batch * tokens > self._rows:
            raise EngineError(f"{batch} prompts of {tokens} tokens, expected at most {self._rows} in all")
        for part in cut_prompts(tensors, self._rows):
            self._run_part(part)
        self._decoder.run_head(tensors["logits"].view(batch, self._shape.vocab), tensors)

    def _layers(self, part: PromptPart, keeps_all: bool) -> _Stream:
        """Run a part of the tokens through all layers, and return the residual stream.

        keeps_all: whether all tokens are wanted after the last layer; False: the products after its mixer are
        those of each prompt's last token.
        """
        shape, scratch, multiply = self._shape, self._addresses, self._products.multiply
        rows, residual, x = part.rows, scratch["residual"], scratch["x"]
        hidden, inner, bias, last = shape.hidden, shape.inner, 0, shape.layers - 1
        for number, layer in enumerate(self._weights.layers):
            # What the residual stream lacks, and what is stored of it, is a matter of the layer's first norm.
            before: dict[str, int] = {
                "bias": bias,
                "deepstack": part.of(f"deepstack_embeds_{number - 1}"),
                "hidden": part.of(f"hidden_states_{number}"),
                "state": scratch.get(_state(number), 0),
            }
            if layer.input_norm:
                embeds = 0 if number else part.of("inputs_embeds")
                begin = NormTokensParams(
                    norm=layer.input_norm, embeds=embeds, **before, residual=residual, x=x
                )
                self._launch(self._plan.by_row("norm_tokens", rows), begin)
                out = self._mix(part, number, layer)
                if number == last and not keeps_all:
                    self._keep_last(part, out.k)
                    rows, residual, x = part.batch, scratch["last_residual"], scratch["last_x"]
                multiply(x, out, residual, rows, adds=True)
                before, bias = {"bias": layer.o_bias}, layer.o_bias
            if layer.gate_up:
                post_norm = NormTokensParams(norm=layer.post_norm, **before, residual=residual, x=x)
                self._launch(self._plan.by_row("norm_tokens", rows), post_norm)
                multiply(x, Matrix(layer.gate_up, hidden, shape.gate_up_size), scratch["gate_up"], rows)
                activate = ActivateParams(gate_up=scratch["gate_up"], bias=layer.gate_up_bias, x=x, rows=rows)
                self._launch(self._plan.activate(rows), activate)
                multiply(x, Matrix(layer.down, inner, hidden), residual, rows, adds=True)
                bias = layer.down_bias
        return _Stream(residual, rows // part.batch, bias)

    def _mix(self, part: PromptPart, number: int, layer: FusedLayerWeights) -> Matrix:
        """Run a layer's mixer within x, and return the matrix of the product after it."""
        shape, scratch = self._shape, self._addresses
        if layer.in_proj:
            assert self._mixer is not None
            return self._mixer.run(part, layer, self._numbers[number], scratch["x"])
        matrix = Matrix(layer.qkv, shape.hidden, shape.qkv_size)
        self._products.multiply(scratch["x"], matrix, scratch["qkv"], part.rows)
        self._attend(part, number, scratch)
        return Matrix(layer.o, shape.q_size, shape.hidden)

    def _keep_last(self, part: PromptPart, width: int) -> None:
        """Copy x [rows,width] and the residual stream of each prompt's last token."""
        scratch = self._addresses
        params = KeepLastParams(
            x=scratch["x"],
            residual=scratch["residual"],
            last_token_ids=part.tensors["last_token_ids"].pointer,
            last_x=scratch["last_x"],
            last_residual=scratch["last_residual"],
            width=width,
            tokens=part.tokens,
            first=part.first,
        )
        self._launch(self._plan.by_row("keep_last", part.batch), params)

    def _attend(self, part: PromptPart, number: int, scratch: Mapping[str, int]) -> None:
        """Run the attention of a layer: from qkv to x."""
        layer, tensors, plan = self._weights.layers[number], part.tensors, self._plan
        length, behind = tensors["kv_length"].pointer, part.behind
        cache = self._numbers[number]
        caches = {name: tensors[f"{name}_{cache}"].pointer for name in ("key_cache", "value_cache")}
        rope = {param: tensors[name].pointer for param, name in ROPE.items() if name in tensors}
        rope["position_ids"] = part.of("position_ids")
        fresh = RopeTokensParams(
            qkv=scratch["qkv"],
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            **{"cos_table": 0, "sin_table": 0, **rope},
            kv_length=length,
            **caches,
            tokens=part.tokens,
            stride=part.all_tokens,
            behind=behind,
        )
        self._launch(plan.rope(part.rows), fresh)
        splits = plan.splits(part.batch, part.tokens)
        common = {
            "sums": scratch["sums"],
            "scales": scratch["scales"],
            "kv_length": length,
            "out": scratch["x"],
            "window": self._shape.window(number) or 0,
            "tokens": part.tokens,
            "behind": behind,
            "splits": splits,
        }
        mask = tensors.get("attention_mask")
        attention = PromptAttentionParams(
            qkv=scratch["qkv"], **caches, **common, mask=0 if mask is None else mask.pointer
        )
        self._launch(plan.attention(part.batch, part.tokens), attention)
        if splits > 1:
            combined = CombinePromptParams(qkv=scratch["qkv"], **common)
            self._launch(plan.combine(part.batch, part.tokens), combined)

    def _run_part(self, part: PromptPart) -> None:
        """Run a part, take the last tokens to the LM head's input, and write the states."""
        last = self._shape.layers
        normed = part.of(self._last_states)
        stream = self._layers(part, keeps_all=bool(normed) or _state(last) in self._addresses)
        tokens = LastTokensParams(
            residual=stream.address,
            bias=stream.bias,
            deepstack=part.of(f"deepstack_embeds_{last - 1}"),
            last_token_ids=part.tensors["last_token_ids"].pointer,
            stream=self._decoder.residual,
            tokens=part.tokens,
            first=part.first,
            each=stream.each,
        )
        self._launch(self._plan.by_row("last_tokens", part.batch), tokens)
        self._finish(part, stream, normed)

    def _finish(self, part: PromptPart, stream: _Stream, normed: int) -> None:
        """Write the states after the last layer.

        normed: address of those after the last norm, 0 = they are not needed.
        """
        last, scratch = self._shape.layers, self._addresses
        state = scratch.get(_state(last), 0)
        if normed or state:
            params = NormTokensParams(
                norm=self._weights.norm,
                bias=stream.bias,
                deepstack=part.of(f"deepstack_embeds_{last - 1}"),
                residual=stream.address,
                state=state,
                x=normed,
            )
            self._launch(self._plan.by_row("norm_tokens", part.rows), params)
        if self._fusion is not None:
            self._fuse(part, self._fusion)

    def _fuse(self, part: PromptPart, fusion: StateFusion) -> None:
        """Compute a draft head's states of the tokens."""
        scratch, weights, rows = self._addresses, fusion.weights, part.rows
        low, middle, high = (
            scratch[_state(layer)] if layer else part.of("inputs_embeds") for layer in fusion.layers
        )
        low_norm, middle_norm, high_norm = weights.norms
        joined, fused = scratch["joined"], scratch["fused"]
        join = JoinStatesParams(
            low=low,
            middle=middle,
            high=high,
            low_norm=low_norm,
            middle_norm=middle_norm,
            high_norm=high_norm,
            bias=weights.bias,
            x=joined,
            fused=fused,
        )
        self._launch(self._plan.by_row("join_states", rows), join)
        matrix = Matrix(weights.fc, 3 * self._shape.hidden, fusion.shape.fused_size)
        self._products.multiply(joined, matrix, fused, rows, adds=True)
        params = RoundStatesParams(fused=fused, out=part.of("fused_hidden_states"))
        self._launch(self._plan.by_row("round_states", rows), params)

    def _launch(self, launch: Launch, params: KernelParams) -> None:
        self._program.launch(launch, params)


class _Stream(NamedTuple):
    """The residual stream after the last layer."""

    address: int  # fp32 [rows,H]
    each: int  # rows of a sequence: all tokens of the part, or 1: the prompt's last token
    bias: int  # address of the bias that the stream lacks; 0 = there is none


class FusedVerification(FusedPrefill):
    """Verifications of more drafted tokens than the kernels of decode steps take."""

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one verification on the device's stream.

        tensors: those of `FusedDecoder.run`, of a model that `FusedPrefill` takes. B * S is at most
        `most_tokens`. EngineError for more.
        """
        (batch, tokens, _), shape = tensors["inputs_embeds"].shape, self._shape
        if batch * tokens > self._rows:
            raise EngineError(f"{batch} sequences of {tokens} tokens, expected at most {self._rows} in all")
        part = PromptPart(tensors, batch, tokens, 0, tokens)
        normed = part.of(self._last_states) or self._addresses["x"]
        self._finish(part, self._layers(part, keeps_all=True), normed)
        head = self._weights.lm_head
        head = head or tensors["embedding" if shape.tied else "lm_head.weight"].pointer
        sizes = shape.hidden, shape.vocab, shape.all_head_columns
        matrix = Matrix(head, *sizes, transposed=shape.tied)
        self._products.multiply(normed, matrix, tensors["logits"].pointer, part.rows, wide=True)


def _state(layer: int) -> str:
    """Return the name of the buffer of a layer's input; layers count from 0."""
    return f"state_{layer}"
