# SPDX-License-Identifier: Apache-2.0
"""The parameter `loras` at run time, with loads that last as long as a test wants."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rclpy
from edgellm_ros.srv import ListLoras, SwitchLora
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.parts import EngineParts
from edgellm_ros.ros.node import node as node_module
from edgellm_ros.ros.node.settings.loras import change_loras
from edgellm_ros.ros.node.worker.job import Job

TIMEOUT_S = 20.0


class SlowRuntime:
    """A runtime that has adapters by name alone.

    A load waits for `go`; a directory called broken cannot be loaded.
    """

    def __init__(self) -> None:
        builder = SimpleNamespace(max_action_samples=1, max_batch_size=4)
        self.config = SimpleNamespace(
            audio=None, vision=None, action=None, expert=None, policy=None, builder=builder
        )
        self.parts = EngineParts(self.config)
        self.active_lora = ""
        self.has_draft_model = False
        self.rows = 4
        self.closed = False
        self.go = threading.Event()
        self.loading = threading.Event()
        self._names = {"built_in"}

    def lora_names(self) -> list[str]:
        return sorted(self._names)

    def add_lora(self, name: str, directory: Path) -> None:
        self.loading.set()
        if not self.go.wait(TIMEOUT_S):
            raise ValueError("the test has not let the load go on")
        if directory.name == "broken":
            raise EngineError(f"{name} is broken")
        self._names.add(name)

    def remove_lora(self, *names: str) -> None:
        self._names -= set(names)

    def switch_lora_weights(self, name: str) -> None:
        if self.closed or name not in self._names:
            raise ValueError(f"unknown {name}")
        self.active_lora = name

    def close(self) -> None:
        self.closed = True


class Bench:
    """A configured node and a client of its services in one executor."""

    def __init__(self, domain: int, root: Path) -> None:
        self._root = root
        self._context = rclpy.Context()
        rclpy.init(context=self._context, domain_id=domain)
        self.executor = SingleThreadedExecutor(context=self._context)
        self.node = node_module.EdgeLLMNode(context=self._context)
        self._client_node = rclpy.create_node("client", context=self._context)
        self.executor.add_node(self.node)
        self.executor.add_node(self._client_node)
        self._clients = {
            kind: self._client_node.create_client(kind, f"/edgellm/{name}")
            for kind, name in ((SwitchLora, "switch_lora"), (ListLoras, "list_loras"))
        }
        self.node.trigger_configure()
        for client in self._clients.values():
            self.spin_until(client.service_is_ready)

    def close(self) -> None:
        self.executor.shutdown()
        self.node.destroy_node()
        self._client_node.destroy_node()
        rclpy.shutdown(context=self._context)

    @property
    def parts(self):
        return self.node._parts

    @property
    def parameter(self) -> list[str]:
        """Names of the adapters in the parameter."""
        return [value.partition("=")[0] for value in self.node.get_parameter("loras").value if value]

    def set(self, *names: str):
        """Set the parameter to these adapters.

        One whose name begins with broken cannot be loaded.
        """
        values = []
        for name in names:
            directory = self._root / name / ("broken" if name.startswith("broken") else "good")
            directory.mkdir(parents=True, exist_ok=True)
            values.append(f"{name}={directory}")
        return self.node.set_parameters([Parameter("loras", value=values or [""])])[0]

    def spin_until(self, condition) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end
            self.executor.spin_once(timeout_sec=0.02)

    def call(self, kind, **request: str):
        """The future of a service call."""
        return self._clients[kind].call_async(kind.Request(**request))

    def spin(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.spin_once(timeout_sec=0.02)

    def names(self) -> list[str]:
        """The answer of ~/list_loras, which waits for all changes."""
        future = self.call(ListLoras)
        self.spin_until(future.done)
        return list(future.result().names)


@pytest.fixture
def runtime(monkeypatch):
    runtime = SlowRuntime()
    monkeypatch.setattr(node_module, "open_runtime", lambda parameters, logger: runtime)
    return runtime


@pytest.fixture
def bench(domain, runtime, tmp_path):
    bench = Bench(domain, tmp_path)
    yield bench
    runtime.go.set()
    bench.close()


def test_the_parameter_is_set_before_its_adapters_are_loaded(bench, runtime):
    start = time.monotonic()
    assert bench.set("late").successful
    assert time.monotonic() - start < 5
    assert bench.parameter == ["late"]
    assert runtime.lora_names() == ["built_in"]
    runtime.go.set()
    assert bench.names() == ["built_in", "late"]


def test_other_callbacks_run_while_an_adapter_is_loaded(bench, runtime):
    bench.set("late")
    assert runtime.loading.wait(TIMEOUT_S)
    ticks = []
    bench.node.create_timer(0.01, lambda: ticks.append(1))
    bench.spin_until(lambda: len(ticks) >= 3)


def test_a_change_waits_for_the_jobs_before_it_and_not_for_those_after_it(bench, runtime):
    runtime.go.set()
    before, seen = threading.Event(), []
    worker = bench.parts.worker
    worker.submit_goal(Job(lambda: before.wait(TIMEOUT_S), math.inf, lambda outcome: None))
    bench.set("late")
    worker.submit_goal(Job(lambda: seen.append(runtime.lora_names()), math.inf, lambda outcome: None))
    assert not runtime.loading.wait(0.1)
    before.set()
    bench.spin_until(lambda: seen)
    assert seen == [["built_in", "late"]]


def test_a_switch_after_a_change_is_answered_after_the_load(bench, runtime):
    bench.set("late")
    switch = bench.call(SwitchLora, name="late")
    bench.spin(0.3)
    assert not switch.done()
    runtime.go.set()
    bench.spin_until(switch.done)
    assert switch.result().success, switch.result().message
    assert runtime.active_lora == "late"


def test_after_a_failed_load_the_parameter_is_what_is_loaded(bench, runtime):
    runtime.go.set()
    bench.set("good")
    assert bench.names() == ["built_in", "good"]
    bench.set("good", "new", "broken")
    assert bench.names() == ["built_in", "good"]
    assert bench.parameter == ["good"]
    assert bench.parts.loras.problem == "the change of the parameter loras failed: broken is broken"
    bench.set("good", "other")
    assert bench.names() == ["built_in", "good", "other"]
    assert bench.parts.loras.problem == ""


def test_a_newer_change_is_not_lost_with_an_older_one_that_fails(bench, runtime):
    bench.set("broken")
    bench.set("late")
    runtime.go.set()
    assert bench.names() == ["built_in", "late"]
    assert bench.parameter == ["late"]


def test_two_failed_changes_leave_the_adapters_that_are_loaded(bench, runtime):
    runtime.go.set()
    bench.set("good")
    bench.set("good", "broken")
    bench.set("broken_too")
    assert bench.names() == ["built_in", "good"]
    assert bench.parameter == ["good"]


def test_a_name_that_is_removed_first_can_be_loaded_again(bench, runtime):
    bench.set("late")
    bench.set()
    bench.set("late")
    runtime.go.set()
    assert bench.names() == ["built_in", "late"]


def test_the_active_adapter_is_not_removed(bench, runtime):
    runtime.go.set()
    bench.set("late")
    assert bench.names() == ["built_in", "late"]
    runtime.active_lora = "late"
    verdict = bench.set()
    assert verdict.reason == "adapter 'late' is active: switch to another before it is removed"


def test_a_change_that_waits_outlives_deactivation(bench, runtime):
    bench.node.trigger_activate()
    bench.set("late")
    bench.set("late", "later")
    bench.node.trigger_deactivate()
    runtime.go.set()
    assert bench.names() == ["built_in", "late", "later"]


def test_cleanup_drops_changes_and_keeps_the_parameter_for_the_next_configure(bench, runtime):
    bench.set("late")
    bench.set("late", "later")
    switch = bench.call(SwitchLora, name="later")
    bench.spin(0.3)
    threading.Timer(0.1, runtime.go.set).start()
    bench.node.trigger_cleanup()
    bench.spin_until(switch.done)
    assert not switch.result().success
    assert bench.parameter == ["late", "later"]


def test_changes_that_wait_take_no_place_of_a_goal(bench, runtime):
    worker = bench.parts.worker
    for number in range(bench.node.parameters.queue_size + 2):
        assert bench.set(f"adapter{number}").successful
    assert worker.waiting == 0
    assert not worker.is_full()


def test_the_number_of_changes_that_wait_is_bounded(bench, runtime):
    verdicts = [bench.set(f"adapter{number}") for number in range(101)]
    assert [verdict.successful for verdict in verdicts] == [True] * 100 + [False]
    assert verdicts[-1].reason == "100 changes of loras wait already"


def test_an_engine_error_in_the_middle_of_a_change_changes_nothing(runtime):
    runtime.go.set()
    with pytest.raises(EngineError, match="b is broken"):
        change_loras(runtime, {}, {"a": Path("good"), "b": Path("broken")})
    assert runtime.lora_names() == ["built_in"]
