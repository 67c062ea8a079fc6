# SPDX-License-Identifier: Apache-2.0
"""Training to continue chunks: what the expert sees of given actions; its loss."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from training.checkpoint import load_expert, save_expert  # noqa: E402
from training.continuing import SCORED_DELAYS, flow_errors, sample_delays, with_given_actions  # noqa: E402
from training.expert import ExpertDims, FlowExpert  # noqa: E402
from training.policy import Policy  # noqa: E402

DIMS = ExpertDims(hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8, rtc_max_delay=5)
ROWS, SIZE, STEPS = 3, 2, 6


class Judged:
    """A policy's flow loss, with a velocity of our own, which keeps its inputs."""

    def __init__(self, velocity) -> None:
        self.mean, self.std, self._velocity = torch.zeros(2), torch.ones(2), velocity

    def velocity(self, x, t, cache, length):
        self.x, self.t = x, t
        return self._velocity(x, t)

    def loss(self, delays) -> float:
        torch.manual_seed(0)
        self.actions = torch.randn(ROWS, STEPS, 2)
        has_actions, length = torch.tensor([True, False, True]), torch.tensor([4, 5, 6])
        batch = {"actions": self.actions, "has_actions": has_actions, "length": length}
        return Policy.flow_loss(self, batch, [], delays, SIZE).item()


def test_given_actions_have_no_noise_and_the_time_of_finished_ones():
    judged, delays = Judged(lambda x, t: x), torch.tensor([0, 2, 6, 1, 3, 5])
    judged.loss(delays)
    given = torch.arange(STEPS) < delays[:, None]
    repeated = judged.actions.repeat_interleave(SIZE, 0)
    torch.testing.assert_close(judged.x[given], repeated[given], atol=0, rtol=0)
    assert (judged.t[given] == 1).all()
    assert ((judged.t < 1) == ~given).all()
    assert (judged.t[1][2:] == judged.t[1][2]).all()
    assert not torch.isclose(judged.x[~given], repeated[~given]).all()


def test_given_actions_are_not_judged():
    delays = torch.tensor([3, 3, 3, 3, 3, 3])
    plain = Judged(lambda x, t: torch.zeros_like(x)).loss(delays)
    wrong = Judged(lambda x, t: torch.where(t[..., None] == 1, 1e6, 0.0).expand_as(x)).loss(delays)
    assert wrong == plain > 0


def test_without_given_actions_the_loss_is_that_of_one_time_for_all():
    one = Judged(lambda x, t: x * t[:, None, None])
    rows = Judged(lambda x, t: x * t[..., None])
    assert rows.loss(torch.zeros(ROWS * SIZE, dtype=torch.int64)) == pytest.approx(one.loss(None), rel=1e-6)
    assert one.t.shape == (ROWS * SIZE,)


def test_half_of_the_trajectories_start_over_and_the_others_have_every_delay():
    torch.manual_seed(0)
    delays = sample_delays(10_000, torch.device("cpu"), 4)
    shares = torch.bincount(delays, minlength=5) / 10_000
    torch.testing.assert_close(shares, torch.tensor([0.5, *[0.125] * 4]), atol=0.02, rtol=0)


def test_given_actions_are_those_of_a_mistaken_driver_where_there_is_one():
    """In the chosen share of trajectories with given actions, up to the longest delay."""
    torch.manual_seed(0)
    own, mistaken = torch.zeros(9_000, STEPS, 2), torch.ones(9_000, STEPS, 2)
    given = torch.tensor([0, 3, 5], dtype=torch.int16).repeat(3_000)
    batch = {"actions": own, "continued": mistaken, "given": given, "other": given}
    chosen, delays = with_given_actions(batch, 4)
    changed = chosen["actions"].flatten(1).all(1)
    assert torch.equal(changed, chosen["actions"].flatten(1).any(1))
    assert not changed[given != 3].any()
    assert (delays[changed] == 3).all()
    shares = [changed[given == 3].float().mean(), (delays[given == 3] == 0).float().mean()]
    torch.testing.assert_close(torch.stack(shares), torch.tensor([0.35, 0.5]), atol=0.03, rtol=0)
    assert delays.max() == 4
    assert chosen["other"] is given
    assert batch["actions"] is own


def test_a_time_for_each_action_is_that_of_all_where_they_are_equal():
    torch.manual_seed(0)
    expert, x = FlowExpert(DIMS), torch.randn(2, STEPS, 2)
    cache = [(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8))]
    angle = torch.randn(2, STEPS, 4)
    mask, time = torch.ones(2, 1, STEPS, 3 + STEPS, dtype=torch.bool), torch.tensor([0.3, 0.8])
    found, expected = (
        expert(x, t, cache, mask, angle.cos(), angle.sin()) for t in (time[:, None].expand(2, STEPS), time)
    )
    torch.testing.assert_close(found, expected)
    times = time[:, None].expand(2, STEPS).clone()
    times[:, 0] = 1.0
    assert not torch.allclose(expert(x, times, cache, mask, angle.cos(), angle.sin()), expected)


def test_the_checkpoint_tells_the_longest_delay(tmp_path):
    (tmp_path / "action_expert").mkdir()
    expert = FlowExpert(DIMS)
    save_expert(tmp_path / "action_expert", expert, vars(DIMS) | {"other": 1})
    assert load_expert(tmp_path).dims == DIMS
    assert json.loads((tmp_path / "action_expert" / "config.json").read_text())["rtc_max_delay"] == 5


def test_flow_errors_are_those_of_each_number_of_given_actions():
    """Of a model whose velocity is 0, over the actions that are not given."""
    torch.manual_seed(0)
    judged = Judged(lambda x, t: torch.zeros_like(x))
    judged.encode, judged.thinker = lambda batch: None, lambda sequences: (None, [])
    judged.flow_loss = lambda *arguments: Policy.flow_loss(judged, *arguments)
    actions, continued = torch.randn(2, 40, 2), torch.zeros(2, 40, 2)
    batch = {
        "actions": actions,
        "continued": continued,
        "given": torch.tensor([3, 0]),
        "has_actions": torch.tensor([True, True]),
        "length": torch.tensor([4, 5]),
    }
    errors = flow_errors(judged, [batch])
    torch.manual_seed(1)
    noise = torch.randn(16, 40, 2)
    error = (actions.repeat_interleave(8, 0) - noise).square().mean(2)
    for delay in SCORED_DELAYS:
        assert errors[str(delay)] == pytest.approx(error[:, delay:].mean().item(), rel=1e-5)
    assert errors["mistaken"] == pytest.approx(noise[:8, 3:].square().mean().item(), rel=1e-5)
