# SPDX-License-Identifier: Apache-2.0
"""A folder in Hugging Face format for a GGUF file.

The folder has configuration, tokenizer and chat template; the weights are read from the GGUF file, to which
it has a link.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import DTYPES, StoredTensor
from edgellm_ros.builder.gguf.blocks import BlockType, Codes
from edgellm_ros.builder.gguf.config import PAIRED, make_config
from edgellm_ros.builder.gguf.names import ROPE_FACTORS, is_paired, published_name, rows_from_pairs
from edgellm_ros.builder.gguf.reader import PART, SUFFIX, GgufFile, TensorPlace, read_gguf
from edgellm_ros.builder.gguf.tokenizer import Vocabulary
from edgellm_ros.echo import quoted

LINK = "gguf_file"  # in the folder: the path of the file
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, eq=False)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, whose values are floats."""

    type: BlockType
    order: np.ndarray | None  # row of the file for each row; None = the same

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop`, all by default; blocks become fp32."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        if self.type.unpack is None:
            dtype = DTYPES[self.type.dtype]
            return self._rows(first, last).view(dtype).reshape(last - first, *self.shape[1:])
        codes = self.type.unpack(self._blocks(first, last))
        return codes.weights(self.type.centre).reshape(last - first, *self.shape[1:])

    def codes(self) -> Codes:
        """Read all blocks of a matrix."""
        assert self.type.unpack is not None
        codes = self.type.unpack(self._blocks(0, self.shape[0]))
        if not np.isfinite(codes.scales).all() or not (
            codes.minima is None or np.isfinite(codes.minima).all()
        ):
            raise ValueError(f"{self.file}: tensor {self.name!r} has scales that are not finite")
        return codes

    def _blocks(self, first: int, last: int) -> np.ndarray:
        rows = self._rows(first, last)
        return rows.reshape(len(rows), -1, self.type.bytes)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Read rows as bytes [rows,bytes]."""
        width = self.size // self.shape[0]
        start, count = (first, last - first) if self.order is None else (0, self.shape[0])
        with self.file.open("rb") as file:
            file.seek(self.offset + start * width)
            data = np.fromfile(file, np.uint8, count * width)
        if data.size != count * width:
            raise ValueError(f"{self.file}: cut short while it was read: tensor {self.name!r} is incomplete")
        rows = data.reshape(count, width)
        return rows if self.order is None else rows[self.order[first:last]]


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names; None if it names none.

    The path is that of a file, or of a folder with one such file and no `config.json`.
    """
    if path.suffix == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    first = [each for each in found if (part := PART.fullmatch(each.name)) is None or int(part[2]) == 1]
    if len(first) > 1:
        names = ", ".join(each.name for each in first)
        raise ValueError(f"{path}: several GGUF files: {names}: give the path of one")
    return first[0] if first else None


@contextmanager
def as_checkpoint(path: Path) -> Iterator[Path]:
    """Write the folder of a GGUF file, until the block ends.

    FileNotFoundError or ValueError, which names file and key, for a file that is damaged or not supported.
    """
    file = read_gguf(path)
    config, vocabulary = make_config(file), Vocabulary(file)
    tokenizer, stops = vocabulary.tokenizer(), vocabulary.stop_tokens()
    template = file.keys.get(TEMPLATE_KEY)
    if not isinstance(template, str):
        raise ValueError(f"{path}: {TEMPLATE_KEY} is {quoted(template)}, expected the model's chat template")
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-") as temporary:
        folder = Path(temporary)
        texts: dict[str, Any] = {
            "config.json": config,
            "generation_config.json": {"eos_token_id": stops} if stops else {},
            "tokenizer_config.json": {**vocabulary.special_tokens(), "chat_template": template},
            LINK: str(path.resolve()),
        }
        for name, contents in texts.items():
            (folder / name).write_text(json.dumps(contents), encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
        yield folder


def linked_tensors(folder: Path) -> Mapping[str, StoredTensor] | None:
    """Return the tensors that a folder of `as_checkpoint` links; None for others."""
    link = folder / LINK
    return _tensors(read_gguf(Path(json.loads(link.read_text(encoding="utf-8"))))) if link.is_file() else None


def _tensors(file: GgufFile) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, place in file.tensors.items():
        if name != ROPE_FACTORS:
            published = published_name(name)
            found[published] = GgufTensor(
                file=place.file,
                name=published,
                dtype=place.type.dtype,
                shape=place.shape,
                offset=place.offset,
                size=place.size,
                type=place.type,
                order=_order(file, place),
            )
    return found


def _order(file: GgufFile, place: TensorPlace) -> np.ndarray | None:
    """Return the order of the rows of queries and keys."""
    name = file.keys["general.architecture"]
    if name not in PAIRED or not is_paired(place.name):
        return None
    heads = file.keys[f"{name}.attention.head_count"]
    if ".attn_k." in place.name:
        heads = file.keys.get(f"{name}.attention.head_count_kv", heads)
    rows = place.shape[0]
    if rows % (2 * heads):
        raise ValueError(
            f"{place.file}: tensor {place.name!r} has {rows} rows, no multiple of 2 x {heads} heads"
        )
    return rows_from_pairs(rows, heads)
