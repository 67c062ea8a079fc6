# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: runs the language model's engine for prefill and decode.

Owns the KV cache, the recurrent state, the attention inputs (attention_inputs.py), and the adapters, which
are inputs too. Prefill and decode may use two backends on one KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import BindingSnapshot, BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.lora_inputs import rank_sizes
from edgellm_ros.engine_directory.lora_scales import LoraScales
from edgellm_ros.kernels import DraftTree, Kernels, TreeKernels
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs, run_sizes
from edgellm_ros.runtime.engines.fused_decoding import FusedDecoding
from edgellm_ros.runtime.engines.lora_tables import LoraTables
from edgellm_ros.runtime.lora import LoraAdapter, LoraAdapters
from edgellm_ros.runtime.prompt.rope import make_rope_table

logger = logging.getLogger(__name__)

LLMEngineRunnerConfig = EngineConfig  # the name in TensorRT Edge-LLM

PREFILL_PROFILE = 0
DECODE_PROFILE = 1
VERIFICATION_PROFILE = 2


@dataclass(frozen=True)
class _Engine:
    """An executor, its attention inputs and its decode steps' tensors by batch size."""

    executor: EngineExecutor
    inputs: AttentionInputs
    fused: bool = False  # the fused kernels, which take no more tensors than they use
    windows: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class LLMEngineRunner:
    """The language model on a device.

    Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V
    vocabulary.

    - positions_beyond: number of positions of `rope_table` after the cache's last one, for the action head
    - decode_executor: executes decode steps; None = the same executor as for prefills
    - max_tree_size: most nodes of a tree of drafted tokens, which the executor of decode steps runs on; 0 =
      none
    - only_chains: whether each node of such a tree has one child at most
    - fused_size: size of the engine's output `fused_hidden_states`; 0 = it has none
    - fused: the fused kernels, which run decode steps of at most `most_fused_rows` rows, and verifications of
      at most `most_verified_rows` nodes in all; None = the executor of other decode steps
    - lora_scales: factors of adapters; None = all are 1

    EngineError if the executors cannot share a KV cache, or for trees that are no chains on an engine
    without a mask.
    """

    def __init__(
        self,
        executor: EngineExecutor,
        config: EngineConfig,
        device: Device,
        kernels: Kernels,
        positions_beyond: int = 0,
        decode_executor: EngineExecutor | None = None,
        max_tree_size: int = 0,
        only_chains: bool = False,
        fused_size: int = 0,
        fused: FusedDecoding | None = None,
        lora_scales: LoraScales | None = None,
    ) -> None:
        self.config = config
        decode_executor = decode_executor or executor
        self._device = device
        capacity = config.max_kv_cache_capacity
        _check_engines(executor, [decode_executor, *([fused.executor] if fused else [])], capacity)
        self.most_fused_rows = fused.most_rows if fused else 0
        self.most_verified_rows = fused.most_verified_rows if fused else 0
        self.embeds_dtype = executor.dtype(names.INPUTS_EMBEDS)
        self.kv_cache = LinearKVCache(
            device,
            kernels,
            layers=config.num_attention_layers,
            max_batch_size=config.max_supported_batch_size,
            kv_heads=config.num_kv_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            dtype=executor.dtype(names.key_cache(0)),
        )
        self.verified_nodes = 0  # of each row, in the verification that is committed
        self.recurrent: RecurrentState | None = None
        if config.llm.recurrent is not None:
            self.recurrent = RecurrentState(
                device,
                kernels,
                config.llm.recurrent,
                max_batch_size=config.max_supported_batch_size,
                conv_dtype=executor.dtype(names.conv_state(0)),
                verifies=max_tree_size > 0,
            )
        self.rope_table = make_rope_table(
            config.rope_config, capacity + positions_beyond, device
        )
        tokens = max(config.max_supported_input_length, max_tree_size)

        def engine(executor: EngineExecutor, fused: bool = False) -> _Engine:
            bindings, rope = executor.bindings, config.rope_config
            most = max(1, max_tree_size) if fused else tokens
            cache, table = self.kv_cache, self.rope_table
            inputs = AttentionInputs(bindings, rope, device, kernels, cache, table, most, not fused)
            return _Engine(executor, inputs, fused)

        self._prefill = self._decode = engine(executor)
        if decode_executor is not executor:
            self._decode = engine(decode_executor)
        self._fused_decode = self._decode if fused is None else engine(fused.executor, fused=True)
        if max_tree_size and not (only_chains or self._decode.inputs.has_mask):
            raise EngineError(
                f"{decode_executor.name}: drafting trees needs an engine with an attention mask"
            )
        batch = config.max_supported_batch_size
        self._last_token_ids = device.empty((batch, 1), np.int64)  # of a prefill: indices of the last tokens
        self._prompt_lengths = device.empty((batch,), np.int64)
        self._first_token_ids = device.zeros((batch, 1), np.int64)  # of a decode step: index 0
        self._one_token = device.empty((batch,), np.int64)
        device.upload(self._one_token, np.ones(batch, np.int64))
        shape = (batch, max(1, max_tree_size), config.hidden_size)
        self._node_indices: dict[int, Tensor] = {}  # of the nodes of trees, by size of the tree
        self._chain_lengths: dict[int, Tensor] = {}  # of the rows of a batch, which are equal
        self._fused = device.empty((batch * tokens if fused_size else 0, fused_size), self.embeds_dtype)
        self._no_deepstack = device.zeros(shape, self.embeds_dtype)
        self._decode_hidden_states = {  # an engine with these outputs also writes them in decode steps
            names.hidden_states(i): device.empty(shape, self.embeds_dtype) for i in config.hidden_state_layers
        }
        self._shared: dict[str, Tensor] = {}
        self.records_prefills = False  # as graphs, if their tensors repeat
        self._last_prefill: BindingSnapshot | None = None
        self.loras = LoraAdapters(
            device,
            executor.bindings.values(),
            config.max_supported_lora_rank,
            executor.supports_empty_tensors and decode_executor.supports_empty_tensors,
            lora_scales,
        )
        self._adapted_decode: _Engine | None = None
        if fused is not None and fused.adapted is not None:
            self._use_adapted(fused.adapted, fused.most_adapted_rows, fused.most_lora_rank)

    def _use_adapted(self, executor: EngineExecutor, most_rows: int, most_rank: int) -> None:
        """Let the fused kernels run sequences with adapters, where they can.

        They can if they have all LoRA inputs of the engine.
        """
        layers = self.config.llm.num_hidden_layers
        try:
            self._lora_tables = LoraTables(self._device, self.loras.inputs, layers, most_rank)
        except ValueError as problem:
            logger.info("the engine decodes sequences with adapters: %s", problem)
            return
        self._most_adapted_rows = most_rows
        self._adapted_decode = _Engine(executor, self._fused_decode.inputs, fused=True)

    @property
    def prefill_executor(self) -> EngineExecutor:
        """The executor of prefills; on a CPU, also of decode steps."""
        return self._prefill.executor

    def execute_prefill_step(
        self,
        inputs_embeds: Tensor,
        context_lengths: Sequence[int],
        positions: np.ndarray,
        deepstack_embeds: Sequence[Tensor],
        output_logits: Tensor,
        output_hidden_states: Sequence[Tensor] = (),
        adapters: Sequence[LoraAdapter] = (),
        rows: range | None = None,
    ) -> None:
        """Prefill: write the KV rows of prompts to rows of the batch, and commit them.

        - inputs_embeds, each of deepstack_embeds [B,S,H]: padded at the end to the longest prompt
        - context_lengths: tokens per prompt, 0 for a row that stays as it is
        - positions [B,3,S] float32
        - output_logits [B,1,V] float32: of each prompt's last token
        - output_hidden_states [B,S,H]: one for each of the engine's hidden_state_layers
        - adapters [B]: empty = the base model for all
        - rows: open rows of the KV cache; None = the first B

        New KV rows follow the committed ones. EngineError if the KV cache has no room for S more.
        """
        batch, tokens, _ = inputs_embeds.shape
        rows = rows or range(batch)
        cache = self.kv_cache
        longest = max(cache.host_length(row) for row in rows)
        if longest + tokens > cache.capacity:
            name = self._prefill.executor.name
            raise EngineError(
                f"{name}: {tokens} tokens after {longest} exceed the capacity {cache.capacity}"
            )
        lengths = np.asarray(context_lengths, np.int64)
        last_token_ids, new_tokens = self._last_token_ids.rows(0, batch), self._prompt_lengths.rows(0, batch)
        self._device.upload(last_token_ids, np.maximum(lengths[:, None], 1) - 1)
        self._device.upload(new_tokens, lengths)
        tensors = {
            names.INPUTS_EMBEDS: inputs_embeds,
            **self._prefill.inputs.for_prefill(rows, positions),
            names.LAST_TOKEN_IDS: last_token_ids,
            names.LOGITS: output_logits,
            **cache.bindings(rows),
            **self._recurrent_bindings(rows, new_tokens, tokens),
            **{names.deepstack_embeds(i): embeds for i, embeds in enumerate(deepstack_embeds)},
            **{
                names.hidden_states(i): hidden_states
                for i, hidden_states in zip(
                    self.config.hidden_state_layers, output_hidden_states, strict=True
                )
            },
            **self._fused_bindings(batch, tokens),
        }
        self._execute(self._prefill, PREFILL_PROFILE, tensors, adapters)
        if self.records_prefills and batch == 1 and self.recurrent is None:  # a recorded run is repeated
            self._record_repeated_prefill()
        cache.commit_rows(rows, new_tokens)
        if self.recurrent is not None:
            self.recurrent.commit_rows(rows, new_tokens)

    def execute_vanilla_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter] = ()
    ) -> None:
        """Run one decode step: one new token for each of the first B rows.

        The step writes the KV rows of these tokens, but does not commit them. inputs_embeds [B,1,H];
        output_logits [B,1,V] float32; adapters: one for each row, empty = the base model for all. Only queues
        work on the device, so the step can be recorded as a graph.
        """
        batch = inputs_embeds.shape[0]
        engine = self._engine_of_step(batch, 1, adapters)
        tensors = self._decode_tensors(engine, inputs_embeds, output_logits)
        engine.inputs.for_decode(tensors, range(batch))
        self._execute(engine, DECODE_PROFILE, tensors, adapters)

    def execute_tree_decoding_step(
        self,
        inputs_embeds: Tensor,
        tree: DraftTree,
        kernels: TreeKernels,
        output_logits: Tensor,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        """Run one tree's nodes for each of the first B rows, with logits of every node.

        Node m is a token at position length + depth, which attends to the committed KV rows, to the nodes
        above and to itself. Its KV row is written to slot length + m, and not committed. inputs_embeds
        [B,M,H]; output_logits [B,M,V] float32. With recurrent layers the tree is a chain. Only queues work on
        the device.
        """
        batch = inputs_embeds.shape[0]
        engine = self._engine_of_step(batch, tree.size, adapters)
        tensors = self._tree_tensors(engine, inputs_embeds, output_logits)
        engine.inputs.for_tree(tensors, range(batch), tree, kernels)
        self._execute(engine, VERIFICATION_PROFILE, tensors, adapters)

    def verified(self, kernels: TreeKernels, nodes: int) -> None:
        """Let the next commit be that of a verification of so many nodes per row.

        Not a part of the verification, which may be a graph: its launch does nothing on the host.
        """
        self.verified_nodes = nodes
        if self.recurrent is not None:
            self.recurrent.verified(kernels, nodes)

    def fused_hidden_states(self, batch: int, tokens: int) -> Tensor:
        """Return the last run's token states for a draft head, [batch,tokens,Hd]."""
        return self._fused.view(batch, tokens, self._fused.shape[1])

    def bind_vanilla_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter]
    ) -> list[BoundRun]:
        """Bind the tensors of a decode step; return the runs of the engine.

        The runs identify the step.
        """
        engine = self._engine_of_step(inputs_embeds.shape[0], 1, adapters)
        tensors = self._decode_tensors(engine, inputs_embeds, output_logits)
        groups = self._groups(engine, DECODE_PROFILE, tensors, adapters)
        return [engine.executor.bound_run for _ in groups]

    def bind_tree_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter]
    ) -> list[BoundRun]:
        """Bind the tensors of a verification of trees; return the runs of the engine."""
        batch, nodes, _ = inputs_embeds.shape
        engine = self._engine_of_step(batch, nodes, adapters)
        tensors = self._tree_tensors(engine, inputs_embeds, output_logits)
        groups = self._groups(engine, VERIFICATION_PROFILE, tensors, adapters)
        return [engine.executor.bound_run for _ in groups]

    def set_lm_head_weights(self, name: str, weights: np.ndarray) -> None:
        """Replace the LM head, the input `lm_head.weight` [H,V], from the next step on.

        Engines that were exported with `lm_head_input` have this input. Its address stays the same, so
        recorded steps use the new weights. EngineError for another name or shape.
        """
        executor = self._prefill.executor
        binding = executor.bindings.get(name)
        if name != names.LM_HEAD or binding is None or not binding.is_input:
            raise EngineError(f"{executor.name}: no extra input {name!r} (export with lm_head_input)")
        if weights.shape != binding.shape:
            raise EngineError(
                f"{executor.name}: {name} must be {list(binding.shape)}, got {list(weights.shape)}"
            )
        if name not in self._shared:
            self._shared[name] = self._device.empty(weights.shape, binding.dtype)
        self._device.upload(self._shared[name], weights.astype(binding.dtype, copy=False))

    def share_embedding(self, table: Tensor) -> None:
        """Bind the embedding table [V,H] as the LM head, if the engine has this input."""
        engines = (self._prefill, self._decode, self._fused_decode)
        if any(names.EMBEDDING in engine.executor.bindings for engine in engines):
            self._shared[names.EMBEDDING] = table

    def _record_repeated_prefill(self) -> None:
        """Record a prefill whose tensors are those of the one before.

        Prompts of a robot have one length.
        """
        executor = self._prefill.executor
        if executor.snapshot == self._last_prefill:
            executor.record(self._device.stream, "prefills")
        self._last_prefill = executor.snapshot

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop what is kept for an adapter that was removed."""
        if self._adapted_decode is not None:
            self._lora_tables.drop(adapter)

    def _engine_of_step(self, batch: int, tokens: int, adapters: Sequence[LoraAdapter]) -> _Engine:
        """Return the engine that runs so many tokens of each row with these adapters."""
        rows = batch * tokens
        if rows > (self.most_fused_rows if tokens == 1 else self.most_verified_rows):
            return self._decode
        if all(adapter is self.loras.base for adapter in adapters):
            return self._fused_decode
        adapted = self._adapted_decode
        if adapted is None or rows > self._most_adapted_rows or not self._lora_tables.takes(adapters):
            return self._decode
        return adapted

    def _decode_tensors(
        self, engine: _Engine, inputs_embeds: Tensor, output_logits: Tensor
    ) -> dict[str, Tensor]:
        batch = inputs_embeds.shape[0]
        if batch not in engine.windows:
            engine.windows[batch] = self._decode_window(engine, range(batch))
        inputs = engine.windows[batch]
        return {**inputs, names.INPUTS_EMBEDS: inputs_embeds, names.LOGITS: output_logits}

    def _tree_tensors(
        self, engine: _Engine, inputs_embeds: Tensor, output_logits: Tensor
    ) -> dict[str, Tensor]:
        batch, nodes, _ = inputs_embeds.shape
        tensors = self._step_tensors(engine, range(batch), nodes, self._nodes_of(batch, nodes))
        if self.recurrent is not None:
            if nodes not in self._chain_lengths:
                lengths = np.full(self.config.max_supported_batch_size, nodes)
                self._chain_lengths[nodes] = on_device(self._device, lengths)
            lengths_of_rows = self._chain_lengths[nodes].rows(0, batch)
            tensors |= self._recurrent_bindings(range(batch), lengths_of_rows, nodes)
        return tensors | {names.INPUTS_EMBEDS: inputs_embeds, names.LOGITS: output_logits}

    def _decode_window(self, engine: _Engine, rows: range) -> dict[str, Tensor]:
        """Return views of the buffers of decode steps of this batch size."""
        batch = len(rows)
        return {
            **self._step_tensors(engine, rows, 1, self._first_token_ids.rows(0, batch)),
            **self._recurrent_bindings(rows, self._one_token.rows(0, batch), 1),
        }

    def _step_tensors(
        self, engine: _Engine, rows: range, tokens: int, last_token_ids: Tensor
    ) -> dict[str, Tensor]:
        """Return views of the buffers of a step of so many text tokens per row."""
        shape = (len(rows), tokens, self.config.hidden_size)
        tensors = {
            **engine.inputs.inputs(rows, tokens),
            names.LAST_TOKEN_IDS: last_token_ids,
            **self.kv_cache.bindings(rows),
            **{
                names.deepstack_embeds(i): self._no_deepstack.view(*shape)
                for i in range(self.config.num_deepstack_features)
            },
            **{name: buffer.view(*shape) for name, buffer in self._decode_hidden_states.items()},
            **self._fused_bindings(len(rows), tokens),
        }
        if not engine.fused:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name in engine.executor.bindings}

    def _nodes_of(self, batch: int, nodes: int) -> Tensor:
        """Return the indices of the nodes of trees [batch,nodes]."""
        if nodes not in self._node_indices:
            indices = np.tile(np.arange(nodes), (self.config.max_supported_batch_size, 1))
            self._node_indices[nodes] = on_device(self._device, indices)
        return self._node_indices[nodes].rows(0, batch)

    def _fused_bindings(self, batch: int, tokens: int) -> dict[str, Tensor]:
        if not self._fused.shape[1]:
            return {}
        return {names.FUSED_HIDDEN_STATES: self.fused_hidden_states(batch, tokens)}

    def _recurrent_bindings(self, rows: range, valid_tokens: Tensor, tokens: int) -> dict[str, Tensor]:
        if self.recurrent is None:
            return {}
        return {names.VALID_TOKENS: valid_tokens, **self.recurrent.bindings(rows, tokens)}

    def _execute(
        self,
        engine: _Engine,
        profile: int,
        tensors: dict[str, Tensor],
        adapters: Sequence[LoraAdapter],
    ) -> None:
        """Run the engine over the batch: once per group of rows with one adapter."""
        for _ in self._groups(engine, profile, tensors, adapters):
            engine.executor.execute(self._device.stream)

    def _groups(
        self,
        engine: _Engine,
        profile: int,
        tensors: dict[str, Tensor],
        adapters: Sequence[LoraAdapter],
    ) -> Iterator[None]:
        """Bind one group of rows with one adapter after another.

        A group consists of adjacent rows, or of one row if the engine needs one sequence per run. The fused
        kernels run the whole batch, in which each sequence has its own adapter. On a CPU, neither other
        groups nor other rows of a group change the bits of a row (OnnxRuntimeBackend).
        """
        if engine is self._adapted_decode:
            bound = {**tensors, names.LORA_TABLE: self._lora_tables.table(adapters)}
            self._bind(engine, profile, bound, self.loras.base)
            yield
            return
        batch, tokens, _ = tensors[names.INPUTS_EMBEDS].shape
        sequences = enumerate(adapters or [self.loras.base] * batch)
        alone = not engine.fused and engine.inputs.needs_one_sequence_per_run(tokens)
        for (adapter, _), group in groupby(sequences, lambda pair: (pair[1], alone and pair[0])):
            rows = [row for row, _ in group]
            part = engine.inputs.part(tensors, rows[0], rows[-1] + 1)
            self._bind(engine, profile, part, adapter)
            yield

    def _bind(
        self, engine: _Engine, profile: int, tensors: dict[str, Tensor], adapter: LoraAdapter
    ) -> None:
        dims = run_sizes(tensors) | rank_sizes(adapter.rank)
        executor, lora_inputs = engine.executor, {} if engine.fused else adapter.tensors
        shared = {name: tensor for name, tensor in self._shared.items() if name in executor.bindings}
        bound = {**tensors, **shared, **lora_inputs}
        executor.prepare(profile, dims, bound, self._device.stream)


def _check_engines(prefill: EngineExecutor, others: Sequence[EngineExecutor], capacity: int) -> None:
    """Raise EngineError unless all executors can share a KV cache."""
    expected = prefill.dtype(names.key_cache(0))
    for executor in (prefill, *others):
        dtype, shape = executor.dtype(names.key_cache(0)), executor.bindings[names.key_cache(0)].shape
        if shape[2] != capacity:
            raise EngineError(
                f"{executor.name}: key_cache_0 is {shape}, config.json has max_kv_cache_capacity {capacity}"
            )
        if dtype != expected:
            raise EngineError(f"{executor.name}: key_cache_0 is {dtype}, but {prefill.name} uses {expected}")
