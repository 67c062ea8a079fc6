# SPDX-License-Identifier: Apache-2.0
"""Messages in JSON, as OpenAI's chat API writes them."""
