# SPDX-License-Identifier: Apache-2.0
"""Exports Hugging Face checkpoints to engine directories, without PyTorch.

The modules behind these names are imported with the first of them: they take a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm_ros.builder.exporter.check import ExportReport, check, render_check
    from edgellm_ros.builder.exporter.export import export
    from edgellm_ros.builder.exporter.options import ExportOptions
    from edgellm_ros.builder.report.inspection import EngineReport, inspect, render

_MODULES = {
    "EngineReport": "report.inspection",
    "ExportOptions": "exporter.options",
    "ExportReport": "exporter.check",
    "check": "exporter.check",
    "export": "exporter.export",
    "inspect": "report.inspection",
    "render": "report.inspection",
    "render_check": "exporter.check",
}
__all__ = [
    "EngineReport",
    "ExportOptions",
    "ExportReport",
    "check",
    "export",
    "inspect",
    "render",
    "render_check",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
