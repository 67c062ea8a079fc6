# SPDX-License-Identifier: Apache-2.0
"""Exports Hugging Face checkpoints to engine directories, without PyTorch."""

from edgellm_ros.builder.exporter import export
from edgellm_ros.builder.inspection import EngineReport, inspect, render

__all__ = ["EngineReport", "export", "inspect", "render"]
