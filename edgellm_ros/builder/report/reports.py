# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine directory as `edgellm inspect` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BindingReport:
    """One input or output of a graph; dimensions are numbers or symbols."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class PlanReport:
    """One TensorRT plan of a graph."""

    name: str  # of its file
    library: str  # name and version of the library that made it
    gpus: tuple[str, ...]  # that it runs on, such as "sm_89"
    version_compatible: bool  # later versions of the library load it too
    bytes: int
    profiles: tuple[str, ...]  # optimization profiles: name and range of each symbol
    problem: str  # why it cannot run anywhere, "" if nothing is wrong


@dataclass(frozen=True)
class PartReport:
    """One graph of the engine directory."""

    name: str
    opset: int
    nodes: int
    operators: tuple[str, ...]
    inputs: tuple[BindingReport, ...]
    outputs: tuple[BindingReport, ...]
    weight_bytes: int  # without those of `llm/model.onnx` that the graph shares
    quantized_bytes: dict[str, int]  # of these, by type: "int4", "int8", "float8e4m3fn"
    variants: tuple[str, ...]  # graphs for other devices with the same weights
    plans: tuple[PlanReport, ...]

    @property
    def quantized_text(self) -> str:
        """Tell, after other words, how many bytes of weights are quantised; "" if none."""
        return "".join(f", {size / 2**20:.3f} MiB of {kind}" for kind, size in self.quantized_bytes.items())


@dataclass(frozen=True)
class AdapterReport:
    """One adapter of the engine directory."""

    name: str
    rank: int
    modules: int  # linear layers that the adapter changes
    bytes: int  # of its tensors when loaded
