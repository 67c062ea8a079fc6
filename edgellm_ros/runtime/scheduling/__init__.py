# SPDX-License-Identifier: Apache-2.0
"""Many requests at once: submitted, queued, and answered in one running batch."""
