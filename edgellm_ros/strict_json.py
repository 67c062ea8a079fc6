# SPDX-License-Identifier: Apache-2.0
"""JSON: written so that every parser reads it, and read so that no file can harm."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100  # of objects and lists in each other; configurations of models have fewer than 20


def strict_json(content: Any, indent: int | None = None) -> str:
    r"""Return JSON whose text can be encoded.

    Half of a surrogate pair, as in the name of a file that is not UTF-8, becomes its escape, such as \udce4.
    ValueError for NaN and infinity.
    """
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text; bytes are UTF-8.

    ValueError with one line, without the name of a file, for text that is not JSON, whose numbers are too
    long, or with more than MAX_DEPTH objects and lists in each other: code that walks through the values
    would exceed Python's stack.
    """
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers of more than 4300 digits
        raise ValueError(f"not valid JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"JSON that is nested too deep: more than {MAX_DEPTH} objects and lists in each other"


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
