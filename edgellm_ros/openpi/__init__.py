# SPDX-License-Identifier: Apache-2.0
"""openpi's protocol between a robot and a policy: messages, keys, and the client."""
