# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: work recorded by `CudaDevice.capture`, queued with one call.

The driver launches a graph of kernels only much faster than one with memset nodes: a decode step of 380
nodes, 28 of them memset nodes, took the host 20 us to launch, without them 4 us (H200, the fastest launch of
500). So a kernel node that writes the same zeros replaces each memset node. No node can be removed from a
graph with allocation nodes; there the memset nodes are switched off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from edgellm_ros.engine.cuda.errors import check
from edgellm_ros.engine.cuda.staging import release_with
from edgellm_ros.engine.errors import EngineError

FILL_THREADS = 256
MAX_FILL_BLOCKS = 1024


class CudaGraph:
    """A graph that is ready to be launched.

    - nodes: number of kernels, copies and fills per launch
    - fill_kernel: the function `fill(pointer, bytes)` that replaces memset nodes; None = no replacement
    """

    def __init__(
        self, stream: Any, context: Any, graph: Any, activate: Callable[[], None], fill_kernel: Any = None
    ) -> None:
        switched_off = _replace_memsets(graph, fill_kernel) if fill_kernel is not None else []
        self.nodes = len(graph_nodes(graph)) - len(switched_off)
        self._stream, self._activate = stream, activate
        self._exec = check(driver.cuGraphInstantiate(graph, 0), "making a graph ready")
        release_with(self, context, driver.cuGraphExecDestroy, self._exec)
        for node in switched_off:
            check(driver.cuGraphNodeSetEnabled(self._exec, node, 0), "switching off a memset node")
        check(driver.cuGraphUpload(self._exec, stream), "uploading a graph")

    def launch(self, stream: Any) -> None:
        self._activate()
        check(driver.cuGraphLaunch(self._exec, self._stream), "launching a graph")


def _replace_memsets(graph: Any, fill_kernel: Any) -> list[Any]:
    """Put a kernel node in the place of each memset node of zeros.

    Returns the memset nodes that could not be removed from the graph.
    """
    remaining = []
    for node in graph_nodes(graph):
        if check(driver.cuGraphNodeGetType(node), "reading a graph") != (
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
        ):
            continue
        memset = check(driver.cuGraphMemsetNodeGetParams(node), "reading a graph")
        if memset.value != 0 or memset.height > 1:
            continue
        before, after = _neighbours(node)
        fill = _fill_params(fill_kernel, int(memset.dst), int(memset.width) * int(memset.elementSize))
        added = check(
            driver.cuGraphAddKernelNode(graph, before, len(before), fill), "adding a kernel to a graph"
        )
        if after:
            result = driver.cuGraphAddDependencies(graph, [added] * len(after), after, None, len(after))
            check(result, "adding a kernel to a graph")
        (status,) = driver.cuGraphDestroyNode(node)
        if status != driver.CUresult.CUDA_SUCCESS:
            remaining.append(node)
    return remaining


def _neighbours(node: Any) -> tuple[list[Any], list[Any]]:
    """Return the nodes that a node depends on, and the nodes that depend on it."""
    sides = []
    for read in (driver.cuGraphNodeGetDependencies, driver.cuGraphNodeGetDependentNodes):
        status, *_, count = read(node)
        check((status,), "reading a graph")
        nodes: list[Any] = []
        if count:
            status, nodes, *_ = read(node, count)
            check((status,), "reading a graph")
        sides.append(list(nodes[:count]))
    return sides[0], sides[1]


def _fill_params(kernel: Any, pointer: int, nbytes: int) -> Any:
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = kernel
    params.gridDimX = max(1, min(-(-nbytes // FILL_THREADS), MAX_FILL_BLOCKS))
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.blockDimX = FILL_THREADS
    params.kernelParams = ((pointer, nbytes), (ctypes.c_int64, ctypes.c_int64))
    return params


def graph_nodes(graph: Any) -> list[Any]:
    """Return the nodes of a recorded graph."""
    status, _, count = driver.cuGraphGetNodes(graph)
    check((status,), "reading a graph")
    status, nodes, count = driver.cuGraphGetNodes(graph, count)
    check((status,), "reading a graph")
    return list(nodes[:count])


def check_replayable(graph: Any) -> None:
    """Raise EngineError if a node touches host memory.

    Each launch would repeat a library's copy from host memory, which by then has other contents or is freed.
    """
    kinds = driver.CUgraphNodeType
    for node in graph_nodes(graph):
        kind = check(driver.cuGraphNodeGetType(node), "reading a graph")
        if kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
            raise EngineError("cannot record a graph with a callback to the host")
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = check(driver.cuGraphMemcpyNodeGetParams(node), "reading a graph")
            for memory, pointer, side in (
                (copy.srcMemoryType, copy.srcDevice if int(copy.srcDevice) else copy.srcHost, "from"),
                (copy.dstMemoryType, copy.dstDevice if int(copy.dstDevice) else copy.dstHost, "to"),
            ):
                if not _on_device(memory, int(pointer)):
                    raise EngineError(f"cannot record a graph with a copy {side} host memory")


def _on_device(memory: Any, pointer: int) -> bool:
    if memory != driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED:
        return memory == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, kind = driver.cuPointerGetAttribute(attribute, pointer)
    return status == driver.CUresult.CUDA_SUCCESS and int(kind) == int(
        driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    )
