# SPDX-License-Identifier: Apache-2.0
"""JSON of OpenAI's API to requests of the runtime, and answers to JSON."""
