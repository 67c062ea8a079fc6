# SPDX-License-Identifier: Apache-2.0
"""The search for the sizes of the fused kernels, without a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from benchmarks.tune_fused import SIZES, improve, tune
from benchmarks.tuned_decoder import Conditions, Decoder, engine_steps, shape_of, with_steps
from doubles.fused_on_cpu import FusedDoubleDevice, FusedDoubleProgram
from edgellm_ros.builder import export
from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.tuning import ADAPTED, DENSE, QUANTIZED, TunedStep
from fixtures.small_tuning import H200, small_tuning
from fixtures.tiny_checkpoint import write_tiny_checkpoint

STEP = H200.steps[0]
SHORT = Conditions(layers=1, vocab=512, context=20, steps=1, turns=1)


class Recorded:
    """A graph on the host."""

    def __init__(self, record: Callable[[], None]) -> None:
        self._record = record

    def launch(self, stream: object) -> None:
        self._record()


class Mark:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        return self._time - earlier._time


class TimedDevice(FusedDoubleDevice):
    """The emulation, with graphs and times of the host."""

    def capture(self, record: Callable[[], None]) -> Recorded:
        return Recorded(record)

    def mark(self) -> Mark:
        return Mark()


def test_a_size_that_is_faster_stays_and_others_do_not():
    def seconds(config: StepConfig) -> float:
        return 1.0 + 0.1 * abs(config.stages - 4) + (0.5 if config.threads != 256 else 0.0)

    found = improve(STEP, SIZES[DENSE], seconds, turns=3)
    assert found.changes == {"stages": 4}
    assert found.after_s / found.before_s == pytest.approx(1.0 / 1.3)


def test_a_difference_of_noise_changes_nothing():
    times = iter([1.0, 0.995] * 10000)
    assert improve(STEP, SIZES[DENSE], lambda config: next(times), turns=3).changes == {}


def test_sizes_that_change_no_kernel_are_not_measured():
    measured = []

    def seconds(config: StepConfig) -> float:
        measured.append(config)
        return 1.0

    improve(STEP, SIZES[DENSE], seconds, turns=3, program=lambda config: config.stages)
    assert {config.stages for config in measured} == {STEP.config.stages, *SIZES[DENSE]["stages"]}
    assert {config.tile for config in measured} == {STEP.config.tile}


def test_the_tile_of_a_head_changes_the_kernels_of_an_untied_model_only():
    step = dataclasses.replace(STEP, hidden=128)
    for tied in (True, False):
        conditions = dataclasses.replace(SHORT, tied=tied)
        decoder = Decoder(TimedDevice(4), shape_of(step, conditions), conditions, FusedDoubleProgram)
        tables = (H200.changed(lambda each, tile=tile: {"head_tile": tile}) for tile in (64, 128))
        one, other = map(decoder.program, tables)
        assert (one == other) is tied


@pytest.mark.slow
@pytest.mark.parametrize("name, value", [(n, v) for n, values in SIZES[DENSE].items() for v in values])
def test_every_size_that_is_tried_has_the_kernels_of_its_step(name, value):
    step = dataclasses.replace(STEP, hidden=128)
    decoder = Decoder(TimedDevice(4), shape_of(step, SHORT), SHORT, FusedDoubleProgram)
    decoder.seconds(H200.changed(lambda each: {name: value}))


def test_sizes_without_room_on_the_gpu_are_left_out():
    def seconds(config: StepConfig) -> float | None:
        return None if config.stages > 5 else 1.0 / config.stages

    small = dataclasses.replace(STEP, config=dataclasses.replace(STEP.config, stages=3))
    assert improve(small, {"stages": (4, 5, 7, 10)}, seconds, turns=1).config.stages == 5
    assert improve(STEP, SIZES[DENSE], seconds, turns=1) is None


@pytest.mark.parametrize("step", H200.steps, ids=lambda step: f"{step.weights}, {step.rows}, {step.hidden}")
def test_every_row_has_a_shape_that_it_is_for(step):
    shape = shape_of(step, SHORT)
    adapted = step.weights == ADAPTED
    assert shape.unsupported() is None
    assert H200.config(shape, step.rows, adapted) == step.config


@pytest.mark.slow
@pytest.mark.parametrize("weights", [DENSE, QUANTIZED])
def test_steps_of_a_decoder_with_random_weights_are_timed(weights, monkeypatch):
    monkeypatch.setitem(SIZES, weights, {"split_rows": (16, 32)})
    step = TunedStep(weights, 2, 128, small_tuning().config(shape_of(STEP, SHORT), 2))
    tuning = dataclasses.replace(H200, steps=(step, *small_tuning().steps))
    (found,) = tune(TimedDevice(4), tuning, {step: shape_of(step, SHORT)}, SHORT, FusedDoubleProgram)
    assert found.before_s > 0
    assert found.changes.keys() <= {"split_rows"}


@pytest.mark.slow
def test_a_decoder_that_does_not_fit_has_no_time():
    device = TimedDevice(4)
    device.most_shared_memory = 1 << 10
    step = dataclasses.replace(STEP, hidden=128)
    assert Decoder(device, shape_of(step, SHORT), SHORT, FusedDoubleProgram).seconds(H200) is None


@pytest.mark.slow
def test_a_verification_is_timed_with_its_mask_and_its_own_kernels_alone():
    made = []

    def compile(plan):
        made.append(plan.rows)
        return FusedDoubleProgram(plan)

    step = dataclasses.replace(STEP, rows=4, hidden=128)
    shape = shape_of(step, SHORT)
    decoder = Decoder(TimedDevice(4), shape, SHORT, compile, trees=True)
    assert decoder.seconds(small_tuning()) > 0
    assert made == [4]


def test_rows_for_an_engine_come_before_those_for_more():
    config = STEP.config
    added = [TunedStep(QUANTIZED, 4, 576, config), TunedStep(QUANTIZED, 16, 576, config)]
    before = dataclasses.replace(H200, steps=tuple(step for step in H200.steps if step.hidden != 576))
    table = with_steps(before, added)
    assert [step for step in table.steps if step not in added] == list(before.steps)
    shape = dataclasses.replace(shape_of(TunedStep(QUANTIZED, 1, 576, config), SHORT), hidden=576)
    assert table.config(shape, 4) is table.config(shape, 16) is config
    for rows, hidden in ((1, 576), (2, 576), (16, 1024)):
        other = dataclasses.replace(shape, hidden=hidden)
        assert table.config(other, rows) == before.config(other, rows)
    assert with_steps(table, added) == table


def test_an_engine_has_rows_of_its_own_size(tmp_path):
    engine = tmp_path / "engine"
    export(write_tiny_checkpoint(tmp_path / "checkpoint"), engine, precision="fp16")
    for step, shape in engine_steps(engine, H200, (1, 8)).items():
        assert (step.weights, step.rows, step.hidden) == (DENSE, shape.max_rows, 64)
        assert step.config == H200.config(shape, shape.max_rows)
