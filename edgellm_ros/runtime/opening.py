# SPDX-License-Identifier: Apache-2.0
"""Begins to open an engine directory: options, their checks, the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.engine.device import Device, open_device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import CHAIN, graph_path
from edgellm_ros.engine_directory.parts import EngineParts
from edgellm_ros.fused.loading.availability import AUTO, FUSED, check_decode
from edgellm_ros.number_checks import check_number
from edgellm_ros.runtime.decoding.speculative.drafting_config import AUTO as DRAFTING_AUTO
from edgellm_ros.runtime.decoding.speculative.drafting_config import (
    SpecDecodeDraftingConfig,
    check_drafting,
    drafting_config,
)
from edgellm_ros.runtime.prompt import tool_calls


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """The options of `LLMInferenceRuntime`, whose docstring describes them."""

    device: str | Device = "cpu"
    threads: int = 0
    lora_dirs: Mapping[str, str | Path] | None = None
    prefix_cache_bytes: int | None = None
    decode_backend: str = ""
    drafting: SpecDecodeDraftingConfig | str | None = DRAFTING_AUTO
    decode: str = AUTO
    allow_plan_code: bool = False
    tool_call_format: str = tool_calls.AUTO
    stream: object = None
    cuda_graphs: bool = True
    without: Sequence[str] = ()

    @property
    def on_cpu(self) -> bool:
        """Whether the engines run on a CPU."""
        return (self.device if isinstance(self.device, str) else self.device.memory) == "cpu"


@dataclass(frozen=True, eq=False, kw_only=True)
class Opening:
    """An engine directory, the device that it is opened on, and how."""

    root: Path
    config: EngineConfig
    parts: EngineParts
    options: RuntimeOptions
    drafting: SpecDecodeDraftingConfig | None  # None = one token per step
    device: Device

    def engine(
        self, graph: str, backend: str = "", shared: Mapping[str, Tensor] | None = None
    ) -> EngineExecutor:
        """Open a graph of the directory; `shared`: weights that are on the device already."""
        forms = (CHAIN,) if self.drafting is not None and self.drafting.is_chain else ()
        path = self.root / graph_path(graph)
        return EngineExecutor.open(path, self.device, self.options.threads, backend, forms, shared)

    def policy_engine(self, graph: str) -> EngineExecutor:
        """Open a graph of a policy, which has one form."""
        executor = self.engine(graph)
        if not self.options.cuda_graphs:
            executor.stop_recording()
        return executor


def begin_opening(root: Path, options: RuntimeOptions) -> Opening:
    """Check options against an engine directory's configuration; open the device.

    Raises the errors of `LLMInferenceRuntime`.
    """
    _check_values(options)
    config = EngineConfig.load(root)
    parts = EngineParts(config, options.without)
    drafting, device = options.drafting, options.device
    if isinstance(drafting, str):
        drafting = drafting_config(drafting, config, options.on_cpu)
    if drafting is not None:
        check_drafting(drafting, config, options.on_cpu)
    if options.stream is not None and not isinstance(device, str):
        raise ValueError("a Device has its own stream: give the stream to open_device")
    if config.policy is not None:
        _check_policy(options, drafting)
    if isinstance(device, str):
        device = open_device(device, options.allow_plan_code, options.stream)
    return Opening(root=root, config=config, parts=parts, options=options, drafting=drafting, device=device)


def _check_values(options: RuntimeOptions) -> None:
    """Check values that no engine directory takes; ValueError names the option."""
    tool_calls.check_format(options.tool_call_format)
    check_decode(options.decode)
    if options.prefix_cache_bytes is not None:
        check_number("prefix_cache_bytes", options.prefix_cache_bytes, 0, 2**63 - 1)


def _check_policy(options: RuntimeOptions, drafting: SpecDecodeDraftingConfig | None) -> None:
    """Check the options of a policy; ValueError names one that needs a language model."""
    given = {
        "lora_dirs": options.lora_dirs,
        "prefix_cache_bytes": options.prefix_cache_bytes,
        "decode_backend": options.decode_backend,
        "drafting": drafting is not None,
        "decode": options.decode == FUSED,
        "tool_call_format": options.tool_call_format not in (tool_calls.AUTO, tool_calls.NONE),
    }
    for name, value in given.items():
        if value:
            raise ValueError(
                "a policy has no language model: no adapters, prefix cache, drafting, decode backend or tool "
                f"calls, but {name} is given"
            )
