# SPDX-License-Identifier: Apache-2.0
"""Subcommands for a policy on another computer, by openpi's protocol."""
