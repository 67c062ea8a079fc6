# SPDX-License-Identifier: Apache-2.0
"""The graphs of an engine directory, how they are built, whose weights they share.

  form         for
  standard     every backend; the file model.onnx or verify.onnx
  cuda         ONNX Runtime's CUDA provider
  chain.cuda   the same, for chains of drafted tokens only
  cpu          ONNX Runtime's CPU provider, where that changes the graph

The other forms have the weights of the standard graph of their part, which comes before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgellm_ros.builder.action.flow_expert import build_expert
from edgellm_ros.builder.draft.block_graph import build_block, build_context
from edgellm_ros.builder.draft.graph import build_draft, draft_lm_head
from edgellm_ros.builder.draft.graph_cuda import build_cuda_draft
from edgellm_ros.builder.exporter.sources import Sources
from edgellm_ros.builder.graph.graph import FLOAT, GraphBuilder
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.onnxruntime.attention import has_cpu_kernel
from edgellm_ros.builder.lowering.onnxruntime.decoder import build_onnxruntime_llm
from edgellm_ros.builder.lowering.onnxruntime.recurrent import has_kernels
from edgellm_ros.builder.lowering.standard.decoder import build_llm
from edgellm_ros.builder.passes.int8_products import multiply_in_int8
from edgellm_ros.builder.passes.visible_rows import attend_to_visible_rows
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.draft_config import DFLASH, DraftConfig
from edgellm_ros.engine_directory.files import CHAIN, CONTEXT, DRAFT, VERIFY, graph_path
from edgellm_ros.engine_directory.parts import ACTION, VISUAL

LLM = "llm"
STANDARD, CUDA, CHAIN_CUDA, CPU = "", "cuda", f"{CHAIN}.cuda", "cpu"
LARGE_HEAD = 2**22  # values of a draft head's matrices: 16 MB in fp32
Graphs = dict[tuple[str, str], GraphBuilder]  # by part and form


@dataclass(frozen=True, eq=False)
class Artefact:
    """One graph of an engine directory."""

    part: str  # "llm", "visual", "audio", "action", "llm/verify", "draft" or "draft/context"
    form: str
    build: Callable[[], GraphBuilder]


def artefacts(sources: Sources, head: LMHead, draft: DraftConfig | None) -> Iterator[Artefact]:
    """Yield the graphs of an export; draft: configuration of the draft head, if any."""
    model, options = sources.model, sources.options
    precision, capacity = options.precision, options.max_kv_cache_capacity
    plain = sources.llm_options(head)
    build = partial(build_llm, model.decoder, sources.weights)
    build_cuda = partial(build_onnxruntime_llm, model.decoder, sources.weights)
    has_cuda = has_kernels(model.llm)
    yield Artefact(LLM, STANDARD, partial(build, plain))
    on_cpu = partial(build_cuda, dataclasses.replace(plain, cpu=True))
    yield Artefact(LLM, CPU, on_cpu if _has_cpu_kernel(sources) else partial(build, plain))
    if has_cuda:
        yield Artefact(LLM, CUDA, partial(build_cuda, plain))
    for part, encoder in model.encoders.items():
        yield Artefact(part, STANDARD, partial(encoder, precision))
        if options.cpu_int8:
            yield Artefact(part, CPU, partial(encoder, precision))
    for part, encoder in model.cuda_encoders.items():
        yield Artefact(part, CUDA, partial(encoder, precision))
    if sources.expert is not None:
        read = sources.expert.architecture, model.llm, sources.expert.weights, precision, capacity
        action = partial(build_expert, *read, kv_cache=options.kv_cache)
        yield Artefact(ACTION, STANDARD, action)
        yield Artefact(ACTION, CUDA, partial(action, cuda=True))
    recurrent = model.llm.recurrent is not None
    if sources.draft is not None or recurrent:
        states, layers = None, plain.hidden_state_layers
        if sources.draft is not None:
            states = sources.draft.states
        if draft is not None:
            layers = draft.states_of_verification(layers)
        verifying = dataclasses.replace(
            plain, head_states=states, hidden_state_layers=layers, verifies=recurrent
        )
        yield Artefact(VERIFY, STANDARD, partial(build, verifying))
        yield Artefact(VERIFY, CPU, partial(build, verifying))
        if has_cuda:
            # With an FP8 cache no attention takes the mask of a tree.
            if recurrent or options.kv_cache is None:
                yield Artefact(VERIFY, CUDA, partial(build_cuda, verifying))
            if not recurrent:  # else it takes chains only
                chains = dataclasses.replace(verifying, only_chains=True)
                yield Artefact(VERIFY, CHAIN_CUDA, partial(build_cuda, chains))
    if sources.draft is not None and draft is not None:
        lm_head, rows = draft_lm_head(sources.draft, head), draft.cache_capacity(capacity)
        read_head = sources.draft, lm_head, precision, rows
        if draft.kind == DFLASH:
            block, context = partial(build_block, *read_head), partial(build_context, sources.draft)
            for form in (STANDARD, CPU):
                yield Artefact(DRAFT, form, block)
                yield Artefact(CONTEXT, form, partial(context, precision, rows))
            return
        yield Artefact(DRAFT, STANDARD, partial(build_draft, *read_head))
        yield Artefact(DRAFT, CPU, partial(build_draft, *read_head))
        yield Artefact(DRAFT, CUDA, partial(build_cuda_draft, *read_head))
        yield Artefact(DRAFT, CHAIN_CUDA, partial(build_cuda_draft, *read_head, only_chains=True))


def _has_cpu_kernel(sources: Sources) -> bool:
    """Tell whether the language model's graph for a CPU has GroupQueryAttention.

    Its numbers depend on the other sequences of a run. Those of quantised weights do so anyway.
    """
    fp32 = sources.options.precision == "fp32" and sources.options.kv_cache is None
    return fp32 and sources.weights.is_quantized and has_cpu_kernel(sources.model.decoder)


def build_graphs(table: Iterable[Artefact], sources: Sources) -> Graphs:
    """Build graphs; a graph for a CPU only if it differs from the standard graph.

    No weight is read.
    """
    built: Graphs = {}
    for each in table:
        graph = each.build()
        if each.form == CPU and not _adapt_to_cpu(each.part, graph, sources.options.cpu_int8):
            continue
        built[each.part, each.form] = graph
        _share_weights(each, built, sources)
    return built


def artefact_path(part: str, form: str = STANDARD) -> str:
    """Return where a graph is in the engine directory."""
    path = graph_path(part)
    return path if form == STANDARD else f"{path.removesuffix('.onnx')}.{form}.onnx"


def file_name(part: str, form: str = STANDARD) -> str:
    """Return the name of a graph's file."""
    return Path(artefact_path(part, form)).name


def _adapt_to_cpu(part: str, graph: GraphBuilder, int8: bool) -> bool:
    """Adapt a graph to a CPU; return whether it differs from the standard graph."""
    differs = attend_to_visible_rows(graph.graph)
    differs |= any(value.name == names.KV_LENGTH for value in graph.graph.inputs)
    # Guesses of a draft head do not change answers, so rounding its products costs no more than guesses. Less
    # time is taken by matrices that the processor's cache does not hold.
    if not int8 and (part != DRAFT or graph.dtype != FLOAT or _matrix_values(graph) < LARGE_HEAD):
        return differs
    # The LM head finds values that are not finite, which pixels never are.
    return multiply_in_int8(graph, lm_head=part == DRAFT, by_rows=part not in (VISUAL, DRAFT)) or differs


def _matrix_values(graph: GraphBuilder) -> int:
    """Return the number of values in constant matrices."""
    tensors = (value.const_value for value in graph.graph.initializers.values())
    return sum(tensor.size for tensor in tensors if tensor is not None and len(tensor.shape) == 2)


def _share_weights(artefact: Artefact, built: Graphs, sources: Sources) -> None:
    """Let a graph take weights from the files of graphs before it."""
    part, form = artefact.part, artefact.form
    graph, quantized = built[part, form], sources.weights.is_quantized
    if form == STANDARD:
        if part == VERIFY:
            graph.share_weights(built[LLM, STANDARD], file_name(LLM), own=sources.draft is not None)
        return
    if quantized and part == VERIFY and form != CPU and (LLM, CUDA) in built:
        graph.share_weights(built[LLM, CUDA], file_name(LLM, CUDA), own=True)
    # Only graphs for CUDA have quantised weights in a layout of their own, which those of `llm` have for all;
    # only graphs for a CPU have new integers.
    own = quantized or (form == CPU and (sources.options.cpu_int8 or part == DRAFT))
    graph.share_weights(built[part, STANDARD], file_name(part), own=own)
