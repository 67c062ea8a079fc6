# SPDX-License-Identifier: Apache-2.0
"""Relative links of the documents lead to files and headings that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "-C", ROOT, "ls-files", "*.md"], capture_output=True, text=True)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, made as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(document.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 1
        while (name := anchor if number == 1 else f"{anchor}-{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def broken(document: Path) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if re.match(r"\w+:", link):  # of the web
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", LISTED.stdout.split())
def test_links_lead_to_files_and_headings(name):
    assert broken(ROOT / name) == []


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path):
    document = tmp_path / "page.md"
    links = "[a](#a-b-c) [b](#b) [c](none.md) [d](https://none.example) [e](page.md#a-b-c)"
    document.write_text(f"# A `b`, c\n{links}\n")
    assert broken(document) == ["#b", "none.md"]
