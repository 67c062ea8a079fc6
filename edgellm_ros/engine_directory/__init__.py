# SPDX-License-Identifier: Apache-2.0
"""Contents of an engine directory: the contract between builder and runtime."""
