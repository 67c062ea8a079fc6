# SPDX-License-Identifier: Apache-2.0
"""The table of `make test-tensorrt`: a row for each plan that was built."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter) -> None:
    reports = terminalreporter.getreports("passed")
    rows = [value for report in reports for name, value in report.user_properties if name == "tensorrt_build"]
    if not rows:
        return
    columns = {name: max(len(name), *(len(text(row[name])) for row in rows)) for name in rows[0]}

    def line(cells: dict) -> str:
        return "  ".join(text(cells[name]).ljust(width) for name, width in columns.items()).rstrip()

    terminalreporter.section("TensorRT builds (parse_s, build_s: seconds beside the other worker)")
    terminalreporter.line(line({name: name for name in columns}))
    for row in sorted(rows, key=lambda row: row["graph"]):
        terminalreporter.line(line(row))


def text(value: str | int | float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
