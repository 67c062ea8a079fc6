# SPDX-License-Identifier: Apache-2.0
"""Exports Hugging Face checkpoints to engine directories, without PyTorch."""

from edgellm_ros.builder.export_check import ExportReport, check, render_check
from edgellm_ros.builder.export_plan import ExportOptions
from edgellm_ros.builder.exporter import export
from edgellm_ros.builder.inspection import EngineReport, inspect, render

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
