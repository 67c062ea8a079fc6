# SPDX-License-Identifier: Apache-2.0
"""`edgellm chat` and `generate` with a GGUF file in place of an engine directory."""

from __future__ import annotations

import io
import os
import shlex
import sys
from pathlib import Path

import pytest

from edgellm_ros.builder.gguf.reader import read_gguf
from edgellm_ros.cli import engine_argument
from edgellm_ros.cli.engine_argument import default_options
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.gguf_files import write_gguf

pytestmark = pytest.mark.slow
ASK = ("--prompt", "the inner tin", "--max-tokens", 8, "--json")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgellm_ros" / "engines"


def told_command(line: str) -> list[str]:
    """Return the arguments of the command `edgellm` in a line."""
    words = shlex.split(line)
    return words[words.index("edgellm") + 1 :]


def test_a_chat_is_that_with_the_engine_of_the_command_that_is_told(edgellm, cache, tmp_path, monkeypatch):
    def talk(engine):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the inner tin\nand now?\n"))
        return edgellm("chat", engine, "--max-tokens", 8)

    path = write_gguf(tmp_path / "a folder" / "tiny.gguf", kind="Q6_K")
    told = talk(path)
    assert told.err.startswith(f"{path} is exported first: ")
    assert told.err.count("\n") == 1
    command, gguf, engine, *options = told_command(told.err)
    assert (command, gguf, Path(engine).parent) == ("export", str(path), cache)
    assert {"--cpu-int8", "--no-report"} < set(options)
    assert edgellm("export", gguf, tmp_path / "engine", *options).code == 0
    assert talk(tmp_path / "engine").out == told.out != ""


def test_a_folder_with_the_file_is_taken_as_the_file(edgellm, cache, tmp_path):
    path = write_gguf(tmp_path / "model" / "tiny.gguf")
    first = edgellm("generate", path, *ASK)
    second = edgellm("generate", path.parent, *ASK)
    assert second.json["token_ids"] == first.json["token_ids"]
    assert second.err.startswith(f"{path} was exported before: ")
    assert told_command(second.err.splitlines()[0]) == told_command(first.err.splitlines()[0])


def test_a_file_that_has_changed_is_exported_again(edgellm, cache, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    first = edgellm("generate", path, *ASK)
    write_gguf(path, seed=1)
    os.utime(path, (0, 0))
    second = edgellm("generate", path, *ASK)
    assert second.err.startswith(f"{path} is exported first: ")
    assert second.json["token_ids"] != first.json["token_ids"]
    assert len(list(cache.glob("tiny-*"))) == 1


@pytest.mark.parametrize(("kind", "rounds"), [("Q4_1", True), ("Q6_K", True), ("F16", False)])
def test_only_a_file_of_blocks_is_multiplied_in_8_bits_on_a_cpu(tmp_path, monkeypatch, kind, rounds):
    monkeypatch.setattr(engine_argument, "SMALL", 0)
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", kind=kind))
    assert default_options(file, "cpu")["cpu_int8"] is rounds


@pytest.mark.parametrize(("kind", "rounds"), [("Q4_1", False), ("Q6_K", True)])
def test_a_small_model_in_4_bits_keeps_its_inputs_on_a_cpu(tmp_path, kind, rounds):
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", kind=kind))
    assert default_options(file, "cpu")["cpu_int8"] is rounds


def test_a_gpu_has_fp16_and_all_devices_keep_to_the_context_of_the_model(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))  # 512 tokens
    limits = {"max_batch_size": 1, "max_input_len": 256, "max_kv_cache_capacity": 512}
    assert default_options(file, "cuda") == {"precision": "fp16", **limits}
    assert default_options(file, "cpu") == {"cpu_int8": False, **limits}


def test_the_engine_has_the_limits_of_the_options(edgellm, cache, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    assert edgellm("generate", path, *ASK).code == 0
    (engine,) = cache.glob("tiny-*")
    assert EngineConfig.load(engine).builder.max_kv_cache_capacity == 512


BAD = {
    "missing.gguf": "missing.gguf not found",
    "tiny-00002-of-00002.gguf": "part 2 of 2: give the first, tiny-00001-of-00002.gguf",
    "bert.gguf": "general.architecture",
    "two": "several GGUF files: a.gguf, b.gguf: give the path of one",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_ends_with_one_line(edgellm, cache, tmp_path, name):
    write_gguf(tmp_path / "tiny-00002-of-00002.gguf")
    write_gguf(tmp_path / "bert.gguf", **{"general.architecture": "bert"})
    for each in "ab":
        write_gguf(tmp_path / "two" / f"{each}.gguf")
    told = edgellm("generate", tmp_path / name, *ASK)
    assert told.code == 2
    assert BAD[name] in told.err
    assert told.err.count("\n") == 1
    assert not cache.exists()


def test_plans_are_not_made_on_the_fly(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ValueError, match="--device tensorrt runs plans: make them with `edgellm export` and"):
        default_options(file, "tensorrt")
