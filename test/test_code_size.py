# SPDX-License-Identifier: Apache-2.0
"""Limits of the size of functions, files, calls and folders."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgellm_ros"
MOST_FUNCTION_LINES = 79
MOST_FILE_LINES = 350
MOST_POSITIONAL = 6
MOST_FILES = 20

# Longer files, each with the reason: what is looked up as one table, or compared line by line with its twin.
LONG_FILES = {
    "fused/params.py": "the parameters of each kernel, as one table",
    "kernels/tree_host.py": "kernels of trees in NumPy, in the order of their twins in cuda/tree.cu",
    "kernels/tree_protocol.py": "the signatures of these kernels",
    "ros/node/settings/parameters.py": "the table of the node's parameters",
}
# Functions whose parameters have no names (of OpenCV, of logging, of NumPy with sizes or axes), and kernels.
WITHOUT_KEYWORDS = ("cv2", "logger", "kernels")
SIZES_OR_AXES = {"reshape", "transpose"}


def sources() -> Iterator[tuple[str, str]]:
    """Yield names and texts of the package's files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for name, text in sources():
        for node in ast.walk(ast.parse(text)):
            yield name, node


def test_functions_have_less_than_80_lines():
    long = [
        f"{name}:{node.lineno}: {node.name} has {lines} lines"
        for name, node in nodes()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := node.end_lineno - node.lineno + 1) > MOST_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_files_have_at_most_350_lines():
    lengths = {name: len(text.splitlines()) for name, text in sources()}
    long = {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES}
    assert set(long) <= set(LONG_FILES), long
    assert set(LONG_FILES) <= set(long), "these files are short now: remove them from LONG_FILES"


def takes_no_keywords(call: ast.Call) -> bool:
    owner, _, function = ast.unparse(call.func).rpartition(".")
    return owner.endswith(WITHOUT_KEYWORDS) or function in SIZES_OR_AXES


def test_calls_have_at_most_6_positional_arguments():
    long = [
        f"{name}:{node.lineno}: {ast.unparse(node.func)} has {len(node.args)}"
        for name, node in nodes()
        if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL and not takes_no_keywords(node)
    ]
    assert not long, "\n".join(long)


def test_folders_have_at_most_20_files():
    counts = Counter(Path(name).parent.as_posix() for name, _ in sources())
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}
