# SPDX-License-Identifier: Apache-2.0
"""The CUDA device: memory, streams, graphs and errors of the runtime API."""
