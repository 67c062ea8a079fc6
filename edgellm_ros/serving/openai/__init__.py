# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP API around a runtime."""
