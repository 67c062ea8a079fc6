# SPDX-License-Identifier: Apache-2.0
"""The language model's engine and its inputs."""
