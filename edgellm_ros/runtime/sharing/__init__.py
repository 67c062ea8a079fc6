# SPDX-License-Identifier: Apache-2.0
"""One runtime for several clients, each with a share."""
