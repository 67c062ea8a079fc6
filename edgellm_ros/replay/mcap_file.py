# SPDX-License-Identifier: Apache-2.0
"""Locates damage in MCAP files.

The bag library only reports an unexpected end of the file. An MCAP file is the magic bytes, records (opcode,
length as uint64, content), and the magic bytes again: https://mcap.dev/spec
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = b"\x89MCAP0\r\n"
HEADER = struct.Struct("<BQ")  # opcode, bytes of content
RECORDS = (
    "Header", "Footer", "Schema", "Channel", "Message", "Chunk", "Message Index", "Chunk Index", "Attachment",
    "Attachment Index", "Statistics", "Metadata", "Metadata Index", "Summary Offset", "Data End",
)  # fmt: skip
PRIVATE = 0x80  # opcodes from here on are for private use


def find_damage(path: Path) -> str:
    """Say where the records of an MCAP file end early; empty if they are whole.

    `path`: the file, or the folder of a bag, whose .mcap files are checked in order.
    """
    files = sorted(path.glob("*.mcap")) if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".mcap" and (damage := _check_file(file)):
            return f"{file.name} {damage}"
    return ""


def _check_file(path: Path) -> str:
    size = path.stat().st_size
    if not size:
        return "is empty"
    with path.open("rb") as file:
        if (start := file.read(len(MAGIC))) != MAGIC:
            return f"is not an MCAP file: it begins with {start!r}"
        at, last = len(MAGIC), "magic bytes"
        while True:
            file.seek(at)
            head = file.read(HEADER.size)
            if head == MAGIC and at + len(MAGIC) == size:
                return ""
            if len(head) < HEADER.size:
                return f"is truncated: it ends at byte {size}, after the {last}, without its footer"
            opcode, length = HEADER.unpack(head)
            if not 1 <= opcode <= len(RECORDS) and opcode < PRIVATE:
                return f"is damaged: no record begins at byte {at}, after the {last}"
            name = RECORDS[opcode - 1] if opcode < PRIVATE else "private"
            end = at + HEADER.size + length
            if end > size:
                return (
                    f"is truncated or damaged: it ends at byte {size}, inside the {name} record "
                    f"from byte {at} to byte {end}"
                )
            at, last = end, f"{name} record at byte {at}"
