# SPDX-License-Identifier: Apache-2.0
"""A folder in Hugging Face format for a GGUF file.

The folder has configuration, tokenizer and chat template; the weights are read from the GGUF file, to which
it has a link. A vision tower is a second file.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.gguf.architectures import find_architecture, make_config, text_tensors
from edgellm_ros.builder.gguf.keys import Keys, architecture
from edgellm_ros.builder.gguf.reader import PART, SUFFIX, GgufFile, read_gguf
from edgellm_ros.builder.gguf.tokenizer import Vocabulary
from edgellm_ros.builder.gguf.vision import Tower, read_tower
from edgellm_ros.echo import quoted

logger = logging.getLogger(__name__)

LINK = "gguf_files"  # in the folder: the paths of the model and of its tower, if it has one
TEMPLATE_KEY = "tokenizer.chat_template"
TOWER = "mmproj"  # in the names of vision towers


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names; None if it names none.

    The path is that of a file, or of a folder with one such file and no `config.json`.
    """
    if path.suffix == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    models, towers = _models_and_towers(path)
    if len(models) > 1:
        names = ", ".join(each.name for each in models)
        raise ValueError(f"{path}: several GGUF files: {names}: give the path of one")
    if towers and not models:
        raise ValueError(f"{path}: {towers[0].name} is a vision tower: its language model is missing")
    return models[0] if models else None


def find_tower(model: Path) -> Path | None:
    """Return the vision tower of a folder that has one model and one tower.

    model: the path of the model. A warning tells of towers that are not taken.
    """
    models, towers = _models_and_towers(model.parent)
    if not towers or TOWER in model.name.lower():
        return None
    if len(models) == 1 and len(towers) == 1:
        return towers[0]
    names = ", ".join(each.name for each in towers)
    logger.warning("%s: without images: name its vision tower with --mmproj; there are %s", model, names)
    return None


def _models_and_towers(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the GGUF files of a folder, of split ones the first."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    first = [each for each in found if (part := PART.fullmatch(each.name)) is None or int(part[2]) == 1]
    towers = [each for each in first if TOWER in each.name.lower()]
    return [each for each in first if each not in towers], towers


@contextmanager
def as_checkpoint(path: Path, mmproj: str | Path | None = None) -> Iterator[Path]:
    """Write the folder of a GGUF file, until the block ends.

    mmproj: the file of its vision tower; None = that of `find_tower`. FileNotFoundError or ValueError, which
    names file and key, for a file that is damaged or not supported. Errors of the block name the file, and
    not the folder.
    """
    file = read_gguf(path)
    find_architecture(file)
    tower = _tower_beside(file, path) if mmproj is None else _read_tower(file, Path(mmproj))
    vocabulary = Vocabulary(file)
    config = make_config(file, tower, vocabulary.tokens)
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
            LINK: [str(path.resolve())],
        }
        if tower is not None:
            texts[LINK].append(str(tower.file.path.resolve()))
            texts["preprocessor_config.json"] = tower.processor
        for name, contents in texts.items():
            (folder / name).write_text(json.dumps(contents), encoding="utf-8")
        tokenizer.save(str(folder / "tokenizer.json"))
        try:
            yield folder
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(str(error).replace(str(folder), str(path))) from None


def linked_tensors(folder: Path) -> Mapping[str, StoredTensor] | None:
    """Return the tensors that a folder of `as_checkpoint` links; None for others."""
    link = folder / LINK
    if not link.is_file():
        return None
    model, *towers = (Path(each) for each in json.loads(link.read_text(encoding="utf-8")))
    file = read_gguf(model)
    tensors = text_tensors(file, whole=bool(towers))
    return tensors | _read_tower(file, towers[0]).tensors() if towers else tensors


def _tower_beside(file: GgufFile, path: Path) -> Tower | None:
    """Read the tower of a model's folder, if it is supported.

    A warning tells why not.
    """
    found = find_tower(path)
    if found is None:
        return None
    try:
        tower = _read_tower(file, found)
    except ValueError as error:
        logger.warning("%s: without images: %s", path, error)
        return None
    logger.info("%s: with the vision tower %s", path, found.name)
    return tower


def _read_tower(file: GgufFile, mmproj: Path) -> Tower:
    keys = Keys(file, architecture(file))
    return read_tower(read_gguf(mmproj), keys, find_architecture(file).projectors)
