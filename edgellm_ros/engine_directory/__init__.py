# SPDX-License-Identifier: Apache-2.0
"""What an engine directory holds: the contract between the builder and the runtime."""
