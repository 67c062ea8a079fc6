# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources of a program, with their includes put in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
PRIMITIVES = "primitives.cuh"  # PTX, which the emulation replaces
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_ONCE = "#pragma once\n"


def expand(root: str, replaced: Mapping[str, str] | None = None) -> str:
    """Return a source with every file that it includes, each once, as one text.

    Compiler messages name file and line. root: a file of the folder `kernels`, such as "decoder.cu";
    replaced: texts in place of files, by name.
    """
    seen: set[Path] = set()

    def read(name: str, folder: Path) -> str:
        path = (folder / name).resolve()
        if path in seen:
            return ""
        seen.add(path)
        if replaced is not None and name in replaced:
            return replaced[name]
        parts, line = [f'#line 1 "{path.name}"\n'], 1
        text, end = path.read_text(encoding="utf-8").replace(_ONCE, "\n"), 0
        for found in _INCLUDE.finditer(text):
            before = text[end : found.start()]
            line += before.count("\n") + 1
            parts += [before, read(found[1], path.parent), f'#line {line} "{path.name}"\n']
            end = found.end()
        return "".join([*parts, text[end:]])

    return read(root, KERNELS)
