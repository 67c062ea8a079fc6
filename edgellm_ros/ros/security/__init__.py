# SPDX-License-Identifier: Apache-2.0
"""Who may publish, subscribe, serve and call what, as permissions of SROS 2."""
