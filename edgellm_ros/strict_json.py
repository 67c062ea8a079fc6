# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser reads and every file takes."""

from __future__ import annotations

import json
from typing import Any


def strict_json(content: Any, indent: int | None = None) -> str:
    r"""Return JSON whose text can be encoded.

    Half of a surrogate pair, as in the name of a file that is not UTF-8, becomes its escape, such as \udce4.
    ValueError for NaN and infinity.
    """
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()
