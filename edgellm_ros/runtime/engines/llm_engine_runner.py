# SPDX-License-Identifier: Apache-2.0
"""LLMEngineRunner: runs the language model's engine for prefill and decode.

Owns the KV cache, the recurrent state, the attention inputs (attention_inputs.py), and the adapters, which
are inputs too. Prefill and decode may use two backends on one KV cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.adapters.lora_scales import LoraScales
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.loading.fused_decoding import FusedDecoding
from edgellm_ros.kernels import DraftTree, Kernels, TreeKernels
from edgellm_ros.runtime.adapters.lora import LoraAdapter, LoraAdapters
from edgellm_ros.runtime.engines.attention_inputs import AttentionInputs
from edgellm_ros.runtime.engines.engine_runs import EngineRuns, RunnableEngine
from edgellm_ros.runtime.engines.hidden_states import HiddenStates
from edgellm_ros.runtime.engines.lm_heads import LMHeads
from edgellm_ros.runtime.engines.prompt_inputs import PromptInputs, PromptRun
from edgellm_ros.runtime.engines.row_states import make_kv_cache, make_recurrent_state
from edgellm_ros.runtime.engines.step_engines import StepEngines, check_shared_cache
from edgellm_ros.runtime.engines.step_tensors import StepTensors
from edgellm_ros.runtime.prompt.rope import make_rope_table

LLMEngineRunnerConfig = EngineConfig  # the name in TensorRT Edge-LLM

PREFILL_PROFILE = 0
DECODE_PROFILE = 1
VERIFICATION_PROFILE = 2


class LLMEngineRunner:
    """The language model on a device.

    Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V
    vocabulary.

    - positions_beyond: number of positions of `rope_table` after the cache's last one, for the action head
    - decode_executor: executes decode steps; None = the same executor as for prefills
    - max_tree_size: maximum number of nodes of a tree of drafted tokens, which the executor of decode steps
      verifies; 0 = none
    - only_chains: whether each node of such a tree has one child at most
    - fused_size: size of the engine's output `fused_hidden_states`; 0 = it has none
    - state_layers: layers of the engine's outputs `hidden_states_i`; None = those of the configuration
    - fused: the fused kernels, which run decode steps of at most `most_fused_rows` rows, verifications of at
      most `most_verified_rows` nodes in all, and prompts if `fuses_prompts`; None = the executors of others
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
        state_layers: Sequence[int] | None = None,
        fused: FusedDecoding | None = None,
        lora_scales: LoraScales | None = None,
    ) -> None:
        self.config = config
        self.state_layers = config.hidden_state_layers if state_layers is None else tuple(state_layers)
        decode_executor = decode_executor or executor
        check_shared_cache(executor, [decode_executor, *([fused.executor] if fused else [])], config)
        self._device = device
        self.most_fused_rows = fused.most_rows if fused else 0
        self.most_verified_rows = fused.most_verified_rows if fused else 0
        self.fuses_prompts = fused is not None and fused.prefill is not None
        self.embeds_dtype = executor.dtype(names.INPUTS_EMBEDS)
        self.prompt_states = HiddenStates(
            device,
            self.state_layers,
            batch=config.max_supported_batch_size,
            tokens=config.max_supported_input_length,
            hidden_size=config.hidden_size,
            dtype=self.embeds_dtype,
        )
        self.kv_cache = make_kv_cache(device, kernels, config, executor)
        self.recurrent = make_recurrent_state(device, kernels, config, executor, verifies=max_tree_size > 0)
        self.verified_nodes = 0  # of each row, in the verification that is committed
        positions = config.max_kv_cache_capacity + positions_beyond
        self.rope_table = make_rope_table(config.rope_config, positions, device)
        tokens = max(config.max_supported_input_length, max_tree_size)

        def inputs(executor: EngineExecutor, fused: bool) -> AttentionInputs:
            return AttentionInputs(
                executor.bindings,
                config.rope_config,
                device=device,
                kernels=kernels,
                cache=self.kv_cache,
                rope_table=self.rope_table,
                max_tokens=max(1, max_tree_size) if fused else tokens,
                masks_one_token=not fused,
            )

        self._engines = StepEngines(executor, decode_executor, fused, inputs)
        self._prefill, self._decode = self._engines.prefill, self._engines.decode
        if max_tree_size and not (only_chains or self._decode.inputs.has_mask):
            raise EngineError(
                f"{decode_executor.name}: drafting trees needs an engine with an attention mask"
            )
        self._tensors = StepTensors(
            device,
            config,
            executor,
            kv_cache=self.kv_cache,
            recurrent=self.recurrent,
            max_tokens=tokens,
            max_tree_size=max_tree_size,
            fused_size=fused_size,
            state_layers=self.state_layers,
        )
        self.loras = LoraAdapters(
            device,
            executor.bindings.values(),
            config.max_supported_lora_rank,
            executor.supports_empty_tensors and decode_executor.supports_empty_tensors,
            lora_scales,
        )
        self._engines.use_adapters(device, self.loras, config.llm.num_hidden_layers)
        self.lm_heads = LMHeads(device, executor.bindings.get(names.LM_HEAD), executor.name)
        self._runs = EngineRuns(device, self.loras.base)

    @property
    def joins_first_prompts(self) -> bool:
        """Whether prompts run together only if they reuse nothing."""
        return self._prefill.inputs.takes_first_prompts and not self.fuses_prompts

    @property
    def prefill_executor(self) -> EngineExecutor:
        """The executor of prefills without adapters; on a CPU, also of decode steps."""
        return self._engines.of_prefill((), self.fuses_prompts).executor

    @property
    def shared(self) -> Collection[Tensor]:
        """Tensors of every run: LM head, embedding table."""
        return self._runs.shared.values()

    def check_room(self, rows: range, tokens: int) -> None:
        """Raise EngineError if the KV cache has no room for `tokens` more of each row."""
        longest, capacity = max(map(self.kv_cache.host_length, rows)), self.kv_cache.capacity
        if longest + tokens > capacity:
            name = self.prefill_executor.name
            raise EngineError(f"{name}: {tokens} tokens after {longest} exceed the capacity {capacity}")

    def depends_on_first(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Return whether runs on prompts differ by `PromptRun.first`."""
        return self.recurrent is not None or not self._engines.of_prefill(adapters, self.fuses_prompts).fused

    def execute_prefill_step(
        self,
        inputs_embeds: Tensor,
        inputs: PromptInputs,
        run: PromptRun,
        *,
        deepstack_embeds: Sequence[Tensor],
        output_logits: Tensor,
        output_hidden_states: Sequence[Tensor] = (),
    ) -> list[BoundRun]:
        """Prefill: write the KV rows of prompts to rows of the batch, and commit them.

        - inputs_embeds, each of deepstack_embeds [B,S,H]: parts of prompts, padded at the end to one length
        - output_logits [B,1,V] float32: of each prompt's last token
        - output_hidden_states [B,S,H]: one for each of `state_layers`

        New KV rows follow the first inputs.starts[b] ones; the recurrent states of a row of which nothing is
        cached begin with zeros. Only queues work on the device, so it can be recorded; returns the runs of
        the engine. EngineError if the KV cache has no room for S more.
        """
        batch, tokens, _ = inputs_embeds.shape
        self.check_room(run.rows, tokens)
        engine = self._engines.of_prefill(run.adapters, self.fuses_prompts)
        rows, cache, new_tokens = run.rows, self.kv_cache, inputs.new_tokens
        cache.begin_rows(rows, inputs.starts, inputs.deltas)
        for row, is_first in zip(rows, run.first, strict=True):
            if is_first and self.recurrent is not None:
                self.recurrent.clear_row(row)
        tensors = {
            names.INPUTS_EMBEDS: inputs_embeds,
            **engine.inputs.for_prefill(rows, inputs.positions),
            names.LAST_TOKEN_IDS: inputs.last_token_ids,
            names.LOGITS: output_logits,
            **cache.bindings(rows),
            **self._tensors.recurrent(rows, new_tokens, tokens),
            **{names.deepstack_embeds(i): embeds for i, embeds in enumerate(deepstack_embeds)},
            **self._tensors.hidden_states(output_hidden_states),
            **self._tensors.fused(batch, tokens),
        }
        if engine.fused:
            tensors = {name: each for name, each in tensors.items() if name in engine.executor.bindings}
        runs = self._runs.execute(engine, PREFILL_PROFILE, tensors, run.adapters, run.first)
        cache.commit_rows(rows, new_tokens)
        if self.recurrent is not None:
            self.recurrent.commit_rows(rows, new_tokens)
        return runs

    def execute_vanilla_decoding_step(
        self,
        inputs_embeds: Tensor,
        output_logits: Tensor,
        adapters: Sequence[LoraAdapter] = (),
        output_hidden_states: Sequence[Tensor] = (),
    ) -> None:
        """Run one decode step: one new token for each of the first B rows.

        The step writes the KV rows of these tokens, but does not commit them. inputs_embeds [B,1,H];
        output_logits [B,1,V] float32; adapters: one for each row, empty = the base model for all;
        output_hidden_states [B,1,H]: one for each of `state_layers`, empty = the tensors of
        `step_hidden_states`. Only queues work on the device, so the step can be recorded as a graph.
        """
        batch = inputs_embeds.shape[0]
        engine = self._engine_of_step(batch, 1, adapters)
        tensors = self._tensors.decode(engine, inputs_embeds, output_logits)
        if output_hidden_states:
            tensors |= self._tensors.hidden_states(output_hidden_states)
        engine.inputs.for_decode(tensors, range(batch))
        self._runs.execute(engine, DECODE_PROFILE, tensors, adapters)

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
        tensors = self._tensors.tree(engine, inputs_embeds, output_logits)
        engine.inputs.for_tree(tensors, range(batch), tree, kernels)
        self._runs.execute(engine, VERIFICATION_PROFILE, tensors, adapters)

    def verified(self, kernels: TreeKernels, nodes: int) -> None:
        """Make the next commit that of a verification of `nodes` nodes per row.

        Not a part of the verification, which may be a graph: its launch does nothing on the host.
        """
        self.verified_nodes = nodes
        if self.recurrent is not None:
            self.recurrent.verified(kernels, nodes)

    def step_hidden_states(self, batch: int, tokens: int, layers: Sequence[int]) -> list[Tensor]:
        """Return the last step's hidden states [batch,tokens,H] of each of these layers.

        tokens: of each row, 1 or the nodes of a tree. The next step overwrites the tensors.
        """
        buffers = [self._tensors.hidden_state_buffers[names.hidden_states(i)] for i in layers]
        return [buffer.view(batch, tokens, buffer.shape[2]) for buffer in buffers]

    def fused_hidden_states(self, batch: int, tokens: int) -> Tensor:
        """Return the last run's token states for a draft head, [batch,tokens,Hd]."""
        return self._tensors.fused_states(batch, tokens)

    def bind_vanilla_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter]
    ) -> list[BoundRun]:
        """Bind the tensors of a decode step; return the runs of the engine.

        The runs identify the step.
        """
        engine = self._engine_of_step(inputs_embeds.shape[0], 1, adapters)
        tensors = self._tensors.decode(engine, inputs_embeds, output_logits)
        return self._runs.bind(engine, DECODE_PROFILE, tensors, adapters)

    def bind_tree_decoding_step(
        self, inputs_embeds: Tensor, output_logits: Tensor, adapters: Sequence[LoraAdapter]
    ) -> list[BoundRun]:
        """Bind the tensors of a verification of trees; return the runs of the engine."""
        batch, nodes, _ = inputs_embeds.shape
        engine = self._engine_of_step(batch, nodes, adapters)
        tensors = self._tensors.tree(engine, inputs_embeds, output_logits)
        return self._runs.bind(engine, VERIFICATION_PROFILE, tensors, adapters)

    def set_lm_head_weights(self, name: str, weights: object) -> None:
        """Replace the base LM head, the input `lm_head.weight` [H,V], for later steps.

        Engines that were exported with `lm_head_input` have this input. weights: an array on the host, or one
        on the GPU, which is copied there. The address of the base head stays the same, so recorded steps use
        the new weights. EngineError for another name or shape. A step uses other heads than the base head if
        its adapters are those of `lm_heads.apply`.
        """
        executor = self._prefill.executor
        binding = executor.bindings.get(name)
        if name != names.LM_HEAD or binding is None or not binding.is_input:
            raise EngineError(f"{executor.name}: no extra input {name!r} (export with lm_head_input)")
        head = self.lm_heads.checked(weights)
        if name not in self._runs.shared:
            self._runs.shared[name] = self._device.empty(head.shape, binding.dtype)
        if isinstance(head, Tensor):
            self._device.copy(self._runs.shared[name], head)
            self._device.synchronize()  # the caller may change its array
        else:
            self._device.upload(self._runs.shared[name], head)

    def share_embedding(self, table: Tensor) -> None:
        """Bind the embedding table [V,H] as the LM head, if the engine has this input."""
        step = self._engines
        fused = step.fused_prefill, step.fused_decode, step.fused_verification
        engines = (self._prefill, self._decode, *fused)
        if any(names.EMBEDDING in engine.executor.bindings for engine in engines):
            self._runs.shared[names.EMBEDDING] = table

    def _engine_of_step(self, batch: int, tokens: int, adapters: Sequence[LoraAdapter]) -> RunnableEngine:
        most = self.most_fused_rows if tokens == 1 else self.most_verified_rows
        return self._engines.of_step(batch * tokens, most, adapters)

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the tables of a removed adapter."""
        self._engines.drop(adapter)
