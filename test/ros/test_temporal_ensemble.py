# SPDX-License-Identifier: Apache-2.0
"""Temporal ensembling: weights, stamps between rows, where it begins again."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_ros.ros.arm.parameters import SPECS, read_settings
from edgellm_ros.ros.arm.temporal_ensemble import MAX_CHUNKS, TemporalEnsemble
from fixtures.arm_on_a_clock import SECOND, SETTINGS, Arm, ramp

DT = 0.1
ENSEMBLING = replace(SETTINGS, blend_time=0.0, ensemble_coeff=0.3)


def weighted(values: list[np.ndarray], coeff: float) -> np.ndarray:
    """Return the mean of values, the oldest first."""
    weights = [math.exp(-coeff * index) for index in range(len(values))]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


class TestMean:
    def test_weights_fall_from_the_oldest_chunk_of_each_time(self):
        ensemble = TemporalEnsemble()
        rng = np.random.default_rng(0)
        chunks = rng.normal(size=(9, 5, 2))  # 5 rows each, one row apart
        for index, chunk in enumerate(chunks):
            mean = ensemble.add(round(index * DT * SECOND), DT, chunk, 0.3)
            for row in range(5):
                oldest = max(0, index + row - 4)
                values = [chunks[each, index + row - each] for each in range(oldest, index + 1)]
                assert mean[row] == pytest.approx(weighted(values, 0.3), abs=1e-6)

    def test_chunks_between_rows_count_on_a_straight_line(self):
        ensemble = TemporalEnsemble()
        ensemble.add(0, DT, np.array([[0.0], [1.0], [3.0]]), 0.0)
        mean = ensemble.add(round(0.25 * DT * SECOND), DT, np.zeros((3, 1)), 0.0)
        assert mean[:, 0] == pytest.approx([0.25 / 2, 1.5 / 2, 0.0])  # the last row is past the first chunk's

    def test_chunks_of_other_lengths_and_rates(self):
        ensemble = TemporalEnsemble()
        ensemble.add(0, 2 * DT, np.array([[2.0], [4.0]]), 0.5)  # at 0.2 and 0.4 s
        mean = ensemble.add(round(DT * SECOND), DT, np.zeros((5, 1)), 0.5)  # at 0.2 to 0.6 s
        share = 1 / (1 + math.exp(-0.5))
        assert mean[:, 0] == pytest.approx([2 * share, 3 * share, 4 * share, 0, 0])

    def test_a_time_before_a_chunks_first_row_is_not_predicted_by_it(self):
        ensemble = TemporalEnsemble()
        ensemble.add(0, 4 * DT, np.ones((3, 1)), 0.0)
        assert ensemble.add(0, DT, np.zeros((4, 1)), 0.0)[:, 0] == pytest.approx([0, 0, 0, 0.5])

    @pytest.mark.parametrize("coeff", [-1.0, 1.0])
    def test_the_newest_chunks_count_if_there_are_very_many(self, coeff):
        ensemble = TemporalEnsemble()
        for index in range(MAX_CHUNKS + 100):
            mean = ensemble.add(index, 1.0, np.full((2, 1), float(index)), coeff)
        kept = [np.array([float(each)]) for each in range(100, MAX_CHUNKS + 100)]
        assert mean[0] == pytest.approx(weighted(kept, coeff))


class TestInTheFollower:
    def test_the_arm_moves_along_the_mean(self):
        arm, ensemble = Arm(settings=ENSEMBLING), TemporalEnsemble()
        rng = np.random.default_rng(1)
        for index in range(20):
            wanted = 0.4 * np.sin(0.8 * (index + np.arange(1, 11)) * DT) + rng.normal(0, 0.01, 10)
            mean = ensemble.add(index * round(DT * SECOND), DT, wanted[:, None], 0.3)
            arm.send(wanted, dt=DT)
            reached = arm.run(DT)[-1, 0]
            assert reached == pytest.approx(mean[0, 0], abs=0.005) or index < 3

    def test_the_mean_is_smoother_than_the_newest_chunks(self):
        rng = np.random.default_rng(2)
        noise = rng.normal(0, 0.003, (30, 10))  # little for the acceleration
        rough, smooth = Arm(settings=replace(ENSEMBLING, ensemble_coeff=None)), Arm(settings=ENSEMBLING)
        for arm in (rough, smooth):
            for each in noise:
                arm.send(each, dt=DT)
                arm.run(DT)
        jumps = [np.abs(np.diff(arm.commands, axis=0)).mean() for arm in (rough, smooth)]
        assert jumps[1] < 0.6 * jumps[0]

    @pytest.mark.parametrize("end", ["stop", "drop", "run out", "clock"])
    def test_the_mean_begins_again_after_a_stop(self, end):
        arm = Arm(settings=ENSEMBLING)
        arm.send([0.2] * 40, dt=DT)
        arm.run(0.5)
        if end == "stop":
            arm.follower.stop(arm.now)
            arm.run(0.5)
            arm.follower.resume(arm.wall)
        elif end == "drop":
            arm.follower.drop(arm.now)
        elif end == "run out":
            arm.run(SETTINGS.max_chunk_age)
        else:
            arm.tick(jump=1.0)
        arm.send([0.1] * 40, dt=DT)
        assert arm.run(1.0)[-1, 0] == pytest.approx(0.1, abs=1e-3)

    def test_an_outlier_is_refused_and_does_not_count(self):
        arm = Arm(settings=ENSEMBLING)
        arm.send(ramp(0.2, 20), dt=DT)
        arm.run(DT)
        with pytest.raises(ValueError, match=r"the chunk begins at 0\.9"):
            arm.send([0.9] * 20, dt=DT, name="far")
        arm.send([0.0] * 20, dt=DT)
        share = 1 / (1 + math.exp(-0.3))
        assert arm.run(1.9)[-1, 0] == pytest.approx(0.2 * share, abs=5e-3)

    def test_the_parameters_turn_it_on(self):
        values = {name: spec.default for name, spec in SPECS.items()}
        node = SimpleNamespace(get_parameter=lambda name: SimpleNamespace(value=values[name]))
        assert read_settings(node).ensemble_coeff is None
        values |= {"temporal_ensembling": True, "temporal_ensemble_coeff": -0.5}
        assert read_settings(node).ensemble_coeff == -0.5

    def test_without_it_the_newest_chunk_is_followed(self):
        arm = Arm()
        arm.send([0.2] * 20, dt=DT)
        arm.run(DT)
        arm.send([0.0] * 20, dt=DT)
        assert arm.run(1.5)[-1, 0] == pytest.approx(0.0, abs=1e-6)
