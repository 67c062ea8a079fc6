# SPDX-License-Identifier: Apache-2.0
"""Action heads: what the runtime asks of each kind, one file here per kind.

`ActionRunner` samples actions with any of them. docs/action_heads.md has the steps to add one.
"""
