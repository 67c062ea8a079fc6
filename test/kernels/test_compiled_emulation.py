# SPDX-License-Identifier: Apache-2.0
"""The cache of the kernels that are compiled for the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doubles import compiled_files, host_compiler


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(compiled_files, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


class Compiler:
    """Writes a file, or fails after half of it."""

    def __init__(self, content: bytes = b"library", fails: bool = False) -> None:
        self.content, self.fails, self.runs = content, fails, 0

    def __call__(self, file: Path) -> None:
        self.runs += 1
        file.write_bytes(self.content[: 3 if self.fails else None])
        if self.fails:
            raise subprocess.CalledProcessError(1, "g++")


def test_a_file_is_compiled_once_by_all_that_ask_for_it_at_the_same_time(cache):
    compiler = Compiler()
    with ThreadPoolExecutor(8) as pool:
        files = set(pool.map(lambda _: compiled_files.cached(["a"], ".so", compiler), range(32)))
    assert (len(files), compiler.runs) == (1, 1)
    assert files.pop().read_bytes() == compiler.content


def test_a_compilation_that_fails_leaves_no_library(cache):
    with pytest.raises(subprocess.CalledProcessError):
        compiled_files.cached(["a"], ".so", Compiler(fails=True))
    assert list(cache.glob("*.so")) == []
    assert compiled_files.cached(["a"], ".so", Compiler()).read_bytes() == b"library"


def test_files_that_are_not_used_are_removed_beyond_a_size(cache, monkeypatch):
    monkeypatch.setattr(compiled_files, "MOST_BYTES", 250)
    sized = Compiler(bytes(100))
    first, second = (compiled_files.cached([name], ".so", sized) for name in "ab")
    for file in (first, second):
        os.utime(file, (0, 0))
    compiled_files.cached(["a"], ".so", sized)
    third = compiled_files.cached(["c"], ".so", sized)
    assert set(cache.glob("*.so")) == {first, third}
    compiled_files.cached(["d"], ".so", sized)  # all of them were used a moment ago
    assert len(list(cache.glob("*.so"))) == 3


def test_without_a_writable_folder_files_are_in_a_temporary_one(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(compiled_files, "CACHE", tmp_path / "file" / "cache")
    assert compiled_files.cached(["a"], ".so", Compiler()).read_bytes() == b"library"


def library(monkeypatch, kernels: str = "void f() {}", options: tuple[str, ...] = ("-DA=1",)) -> Path:
    """Return the file of `build_library`, which runs no compiler."""
    monkeypatch.setattr(host_compiler, "_run_compiler", lambda arguments: Path(arguments[-1]).touch())
    host_compiler._environment.cache_clear()
    folder = host_compiler.FOLDERS[1]
    return host_compiler.build_library(folder / "launch.cpp", kernels, (folder / "clusters.cpp",), options)


@pytest.mark.parametrize("changed", [{"kernels": "void g() {}"}, {"options": ("-DA=2",)}, {"options": ()}])
def test_other_kernels_and_options_have_another_library(cache, monkeypatch, changed):
    assert library(monkeypatch) == library(monkeypatch)
    assert library(monkeypatch) != library(monkeypatch, **changed)


@pytest.mark.parametrize(
    "file", ["cuda_on_cpu/cuda_on_cpu.h", "cuda_on_cpu/blocks.cpp", "fused_on_cpu/clusters.h"]
)
def test_a_changed_file_of_the_emulation_has_another_library(cache, monkeypatch, tmp_path, file):
    before = library(monkeypatch)
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in host_compiler.FOLDERS]
    monkeypatch.setattr(host_compiler, "FOLDERS", copies)
    assert library(monkeypatch) == before
    with (tmp_path / file).open("a") as stream:
        stream.write("// changed\n")
    assert library(monkeypatch) != before


def test_another_compiler_has_another_library(cache, monkeypatch, tmp_path):
    before = library(monkeypatch)
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'gcc version 99' >&2\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert library(monkeypatch) != before


@pytest.fixture(autouse=True)
def real_environment():
    yield
    host_compiler._environment.cache_clear()
