# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers, and the library that compiles them."""
