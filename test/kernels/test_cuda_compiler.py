# SPDX-License-Identifier: Apache-2.0
"""Compilation of the CUDA kernels and its cache on disk; needs no GPU."""

import dataclasses
import re

import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")


from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.cuda import compiler
from fixtures.draws import draws
from fixtures.ptx import kernel_bodies
from fixtures.ptxas_report import ptxas_report

# Jetson Orin, Jetson Thor; between them H100 and H200
ARCHITECTURES = draws(("sm_87", "sm_110"), ("sm_87", "sm_90", "sm_110"))
WIDTHS = (1, 2, 4, 8, 16)
BY_WIDTH = ("embed", "deepstack", "copy_cache_rows", "copy_cache_ranges", "causal_mask", "commit_states")
OTHERS = (
    "resize_width", "resize_height", "place_image", "cut_patches", "rope_rows", "mrope_rows", "visible_rows",
    "count_tokens",
    "commit_tokens", "commit_rows", "map_tokens", "euler_step", "conditioned_step", "denoising_step",
    "mask_logits", "sample", "log_probabilities", "fill", "open_row", "move_row",
    "begin_rows",
)  # fmt: skip
TREES_BY_WIDTH = (
    "begin_accepted", "begin_level", "tree_mask", "move_cache_rows", "take_rows", "take_accepted",
    "put_rows",
)  # fmt: skip
OTHER_TREES = (
    "add_candidates", "add_candidates_half", "select_tree", "tree_rope_rows", "sample_path",
    "find_continuation", "append_history", "advance_states", "advance_windows",
)  # fmt: skip
PROGRAMS = [
    pytest.param(compiler.KERNELS, BY_WIDTH, OTHERS, id="steps"),
    pytest.param(compiler.TREE_KERNELS, TREES_BY_WIDTH, OTHER_TREES, id="trees"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("files", "by_width", "others"), PROGRAMS)
def test_all_kernels_compile_and_keep_their_variables_in_registers(files, by_width, others, arch):
    report = ptxas_report(compiler.source(files), compiler.options(arch))
    frames = dict(re.findall(r"entry function '(\w+)' for '\w+'\n.*\n.*?(\d+) bytes stack frame", report))
    assert set(frames) == {*others, *(f"{name}_{width}" for name in by_width for width in WIDTHS)}
    assert {name: frame for name, frame in frames.items() if frame != "0"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("files", [compiler.KERNELS, compiler.TREE_KERNELS], ids=["steps", "trees"])
def test_every_kernel_waits_before_it_touches_memory(files):
    bodies = kernel_bodies(compiler.source(files), compiler.options("sm_90"))
    assert len(bodies) > 30
    for name, body in bodies.items():
        before, waited, after = body.partition("griddepcontrol.wait")
        assert waited, name
        assert re.search(r"(ld|st|atom)\.(global|volatile)", after), name
        assert not re.search(r"(ld|st|atom)\.(global|volatile)", before), name


def test_a_compile_error_names_file_and_line(monkeypatch):
    monkeypatch.setattr(compiler, "source", lambda files: '#line 7 "rows.cu"\nint broken = ;\n')
    with pytest.raises(EngineError, match=r"'sm_90'(.|\n)*rows.cu\(7\)"):
        compiler.compile_kernels("sm_90")


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(EngineError, match="sm_12345"):
        compiler.compile_kernels("sm_12345")


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The architectures that were compiled, in order, by a fake compiler."""
    made = []

    def compile_kernels(arch: str, files) -> bytes:
        made.append(arch)
        return f"{arch}, number {len(made)}".encode()

    monkeypatch.setattr(compiler, "compile_kernels", compile_kernels)
    return made


def test_kernels_are_compiled_once_for_each_architecture(compiled, tmp_path):
    for _ in range(2):
        assert compiler.cached_kernels("sm_90", tmp_path) == b"sm_90, number 1"
        assert compiler.cached_kernels("sm_87", tmp_path) == b"sm_87, number 2"
    assert compiled == ["sm_90", "sm_87"]


def test_changed_sources_options_or_compilers_cause_a_new_compilation(compiled, tmp_path, monkeypatch):
    options, success = compiler.options, compiler.nvrtc.nvrtcResult.NVRTC_SUCCESS
    compiler.cached_kernels("sm_90", tmp_path)
    for place, name, changed in (
        (compiler, "source", lambda files: "other"),
        (compiler, "options", lambda arch: dataclasses.replace(options(arch), fma=True)),
        (compiler.nvrtc, "nvrtcVersion", lambda: (success, 99, 0)),
    ):
        monkeypatch.setattr(place, name, changed)
        compiler.cached_kernels("sm_90", tmp_path)
    assert len(compiled) == len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"", lambda content: b"x" + content]
)
def test_a_damaged_file_is_compiled_again(compiled, tmp_path, damage):
    compiler.cached_kernels("sm_90", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert compiler.cached_kernels("sm_90", tmp_path) == b"sm_90, number 2"
    assert compiler.cached_kernels("sm_90", tmp_path) == b"sm_90, number 2"


def test_an_unwritable_folder_costs_compilation_only(compiled, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for number in (1, 2):
        cubin = compiler.cached_kernels("sm_90", tmp_path / "file" / "folder")
        assert cubin == f"sm_90, number {number}".encode()


def test_a_failed_write_leaves_no_file(compiled, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    assert compiler.cached_kernels("sm_90", tmp_path) == b"sm_90, number 1"
    assert list(tmp_path.iterdir()) == []
