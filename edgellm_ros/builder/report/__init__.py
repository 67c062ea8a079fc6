# SPDX-License-Identifier: Apache-2.0
"""What an engine directory holds, and which memory it needs."""
