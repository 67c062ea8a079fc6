# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face checkpoint to an engine directory, and a look into one; no PyTorch needed."""

from edgellm_ros.builder.exporter import export
from edgellm_ros.builder.inspection import EngineReport, inspect, render

__all__ = ["EngineReport", "export", "inspect", "render"]
