# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node edgellm: its topics, services, action and worker thread."""
