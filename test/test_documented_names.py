# SPDX-License-Identifier: Apache-2.0
"""Every name and every test in docs/edge_llm_names.md exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

TEST = Path(__file__).parent
PACKAGE = TEST.parent / "edgellm_ros"
PAGE = TEST.parent / "docs" / "edge_llm_names.md"
MARKED = re.compile(r"\blater: |\bnone: |\bas above\b")


def rows() -> list[list[str]]:
    """Return the cells of each row, without the headers of the tables."""
    cells = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row[0] != "there" and not row[0].startswith("---")]


ROWS = rows()
NAMES = sorted(
    {
        name
        for row in ROWS
        for name in re.findall(r"`([\w.]+)`", row[1])
        if name.split(".")[0] in ("runtime", "engine", "kernels", "multimodal", "builder", "engine_directory")
    }
)
TESTS = sorted({name for name in re.findall(r"`([\w/]+\.py::\w+)`", PAGE.read_text())})


def is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def find(name: str) -> object:
    """Return the class or function of a name, or the class of an attribute.

    Attributes may be set in methods or be fields of dataclasses.
    """
    parts = name.split(".")
    depth = next(i for i in range(len(parts), 0, -1) if is_module(parts[:i]))
    owner = getattr(importlib.import_module("edgellm_ros." + ".".join(parts[:depth])), parts[depth])
    if len(parts) == depth + 1:
        return owner
    (attribute,) = parts[depth + 1 :]
    own = re.search(rf"\bself\.{attribute}\b.* = ", inspect.getsource(owner))
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    if not (hasattr(owner, attribute) or own or attribute in fields):
        raise AttributeError(f"{name}: {owner} has no {attribute}")
    return owner


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_ours_exists(name):
    assert find(name) is not None


@pytest.mark.parametrize("name", TESTS)
def test_a_test_that_is_named_exists(name):
    path, function = name.split("::")
    tree = ast.parse((TEST / path).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_has_our_name_or_the_reason_for_none():
    for there, here, *_ in ROWS:
        assert set(re.findall(r"`([\w.]+)`", here)) & set(NAMES) or MARKED.search(here), there


def test_every_name_of_ours_has_a_test_beside_it():
    for there, here, *shown in ROWS:
        if shown and set(re.findall(r"`([\w.]+)`", here)) & set(NAMES):
            assert "::" in shown[0], there


def test_the_page_is_read_completely():
    assert len(NAMES) > 70
    assert len(TESTS) > 35


def test_an_unknown_name_is_an_error():
    for name in ("engine.executor.EngineExecutor.fly", "engine.executor.Nothing", "engine.nothing.Nothing"):
        with pytest.raises((AttributeError, ImportError)):
            find(name)
