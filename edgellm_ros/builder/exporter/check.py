# SPDX-License-Identifier: Apache-2.0
"""Tells what an export would write, and which memory the engine would need."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.exporter.artefacts import CHAIN_CUDA, CPU, CUDA, artefact_path, file_name
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import ExportPlan, plan_export
from edgellm_ros.builder.report.inspection import PARTS, adapter_reports, model_rows, part_report, table
from edgellm_ros.builder.report.memory import MemoryReport, memory_report, memory_rows, size_rows
from edgellm_ros.builder.report.reports import AdapterReport, PartReport
from edgellm_ros.builder.weights.adapters import copied_files
from edgellm_ros.builder.weights.unread_weights import UnreadWeights, listed
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import VERIFY, graph_path


@dataclass(frozen=True)
class DiskReport:
    """Space on the disk of the engine directory."""

    directory: str
    needed: int  # bytes of the export, less those of files that it replaces
    free: int  # bytes
    short: bool


@dataclass(frozen=True)
class ExportReport:
    """All data that `edgellm export --check` shows."""

    checkpoint: str
    family: str
    parameters: int
    unread: tuple[UnreadWeights, ...]  # tensors that no graph has
    config: EngineConfig  # as the engine's `config.json` would be, but without files
    parts: tuple[PartReport, ...]
    adapters: tuple[AdapterReport, ...]
    memory: MemoryReport  # the same figures as in `inspect`'s report of the engine
    files: dict[str, int]  # path -> bytes; without `config.json`, which has SHA-256 of the files
    bytes: int  # of all files
    disk: DiskReport


def check(
    checkpoint_dir: str | Path, options: ExportOptions | None = None, engine_dir: str | Path = "."
) -> ExportReport:
    """Check whether a checkpoint can be exported, and with which result.

    Everything that `export` does before it writes is done: configurations and headers of tensors are read,
    and graphs are built. Only disk space can then keep the export from its end, which the report tells of the
    disk of `engine_dir`. Raises the errors of `export`.
    """
    plan = plan_export(Path(checkpoint_dir), options or ExportOptions())
    parts = tuple(_part(plan, name) for name in PARTS if graph_path(name) in plan.graphs)
    inputs = {binding.name: binding.shape for binding in parts[0].inputs}
    files = _file_sizes(plan)
    return ExportReport(
        checkpoint=str(checkpoint_dir),
        family=plan.family,
        parameters=plan.parameters,
        unread=plan.unread,
        config=plan.config,
        parts=parts,
        adapters=adapter_reports(plan.config, inputs, plan.adapters),
        memory=memory_report(plan.config, parts),
        files=files,
        bytes=sum(files.values()),
        disk=_disk(Path(engine_dir), files),
    )


def render_check(report: ExportReport) -> str:
    """Render the report as tables: the model, memory, files."""
    rows = [
        ("checkpoint", f"{report.checkpoint}, {report.parameters / 1e9:.3f} billion parameters"),
        ("family", report.family),
        *model_rows(report.config, report.adapters),
    ]
    rows += [
        (part.name, f"{part.nodes} nodes, opset {part.opset}{part.quantized_text}") for part in report.parts
    ]
    if report.unread:
        rows.append(("left out", listed(report.unread)))
    disk = report.disk
    space = [("needed", disk.needed), ("free", disk.free)]
    sections = [
        table(rows),
        "memory\n" + table(memory_rows(report.parts, report.adapters, report.memory)),
        "files\n" + table(size_rows([*report.files.items(), ("all", report.bytes)])),
        f"disk of {disk.directory}{': TOO SMALL' if disk.short else ''}\n" + table(size_rows(space)),
    ]
    return "\n\n".join(sections)


def _part(plan: ExportPlan, name: str) -> PartReport:
    path, forms = graph_path(name), (CHAIN_CUDA, CPU, CUDA)
    variants = tuple(file_name(name, form) for form in forms if artefact_path(name, form) in plan.graphs)
    shared = plan.graphs[graph_path("llm")].graph.initializers if name == VERIFY else ()
    return part_report(name, plan.graphs[path].graph, variants, shared=shared)


def _file_sizes(plan: ExportPlan) -> dict[str, int]:
    sizes = {name: len(contents) for name, contents in plan.texts.items()}
    sizes |= {name: tensor.size for name, tensor in plan.tensors.items()}
    for name, graph in plan.graphs.items():
        sizes |= {path.as_posix(): size for path, size in graph.saved_sizes(Path(name)).items()}
    for name, folder in plan.adapter_folders.items():
        sizes |= {file: source.stat().st_size for file, source in copied_files(name, folder).items()}
    return dict(sorted(sizes.items()))


def _disk(engine: Path, files: dict[str, int]) -> DiskReport:
    """Compare sizes with the space on the disk of a directory that need not exist.

    OSError if the directory cannot be made or written.
    """
    existing = next(path for path in (engine, *engine.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing}: expected a directory for the engine, found a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing}: no permission to write an engine directory here")
    replaced = [engine / name for name in files]
    needed = sum(files.values()) - sum(path.stat().st_size for path in replaced if path.is_file())
    free = shutil.disk_usage(existing).free
    return DiskReport(str(engine), needed, free, short=needed > free)
