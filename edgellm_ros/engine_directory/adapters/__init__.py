# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of an engine directory: files, scales and inputs."""
