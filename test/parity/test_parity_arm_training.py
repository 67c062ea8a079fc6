# SPDX-License-Identifier: Apache-2.0
"""Training of the arm's policies: folders, engines, and steps on a CPU."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import lerobot_policies  # noqa: E402
from recorded_policies import SEED, TOLERANCE, noise  # noqa: E402

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest  # noqa: E402
from edgellm_tabletop.evaluation.task import export_policy  # noqa: E402
from edgellm_tabletop.units import JOINTS  # noqa: E402
from edgellm_tabletop.world import GOALS, IMAGE_SIZE, INSTRUCTIONS  # noqa: E402
from training.arm.demonstrations import CHUNK_SIZE  # noqa: E402
from training.stream import new_chunk  # noqa: E402

IMAGES = np.random.default_rng(0).integers(0, 256, (8, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def arm() -> Iterator[SimpleNamespace]:
    """The modules of training.arm.

    PyTorch has one thread: where other processes run, small operations wait long for a second one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lerobot_policies.arm_training()
    torch.set_num_threads(threads)


def rows(count: int) -> dict:
    """Make rows of the buffer with random values, and their instructions."""
    generator = torch.Generator().manual_seed(count)
    return {
        "image": torch.from_numpy(IMAGES[np.arange(count) % len(IMAGES)]),
        "state": 30 * torch.randn(count, len(JOINTS), generator=generator),
        "action": 30 * torch.randn(count, CHUNK_SIZE, len(JOINTS), generator=generator),
        "is_pad": torch.arange(CHUNK_SIZE).expand(count, -1) >= CHUNK_SIZE - 5,
        "task": [list(INSTRUCTIONS.values())[i % 2] for i in range(count)],
    }


def random_policy(arm, name: str, folder) -> tuple:
    """Make a policy and its processors."""
    torch.manual_seed(0)
    kind, data = arm.folder.KINDS[name], rows(8)
    policy = kind.make("cpu", folder)
    return policy, kind.processors(policy, arm.kind.statistics(data["image"], data["state"], data["action"]))


def spread_weights(policy) -> None:
    """Draw weights from a wider distribution, by which all inputs change a chunk."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values * parameter[0].numel() ** -0.5)


def saved(arm, name: str, folder) -> tuple:
    """Save a random policy, and rename its folder.

    Returns the folder and the weights, which are saved in float16.
    """
    policy, processors = random_policy(arm, name, folder / "made")
    spread_weights(policy)
    arm.folder.save_policy(folder / "made", policy, processors)
    return (folder / "made").rename(folder / "moved"), policy.state_dict()


@pytest.mark.parametrize("name", ["act", "smolvla"])
def test_a_policy_in_a_folder_that_has_moved_is_loaded(arm, name, tmp_path):
    folder, weights = saved(arm, name, tmp_path)
    policy, (before, _) = arm.folder.load_policy(folder, "cpu")
    assert not policy.training
    assert policy.state_dict().keys() == weights.keys()
    for key, value in policy.state_dict().items():
        torch.testing.assert_close(value, weights[key].half().float(), rtol=0, atol=0)
    assert arm.kind.lerobot_batch(rows(2), (before, None))[arm.kind.STATE].shape == (2, len(JOINTS))


def test_chunks_of_the_engine_are_those_of_lerobot_for_both_instructions(arm, tmp_path):
    folder, _ = saved(arm, "smolvla", tmp_path)
    policy, (before, after) = arm.folder.load_policy(folder, "cpu")
    state = np.random.default_rng(1).normal(0, 30, len(JOINTS)).astype(np.float32)
    frame = torch.from_numpy(IMAGES[0]).permute(2, 0, 1).float() / 255
    start = noise(1, CHUNK_SIZE, policy.config.max_action_dim)
    export_policy(folder, tmp_path / "engine", print)
    expected, found = [], []
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        for task in INSTRUCTIONS.values():
            observation = before(
                {arm.kind.STATE: torch.from_numpy(state), arm.kind.IMAGE: frame, "task": task}
            )
            expected.append(
                after(policy.predict_action_chunk(observation, noise=torch.tensor(start))).numpy()
            )
            request = LLMGenerationRequest(task, images=(IMAGES[0],), state=state, noise_seed=SEED)
            found.append(runtime.handle_request(request).actions)
    range_ = np.ptp(expected)
    assert np.abs(expected[0] - expected[1]).max() > 10 * TOLERANCE * range_
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * range_)


def test_chunks_by_which_an_act_is_scored_are_those_of_its_engine(arm, tmp_path):
    folder, _ = saved(arm, "act", tmp_path)
    make = arm.score.chunk_maker(*arm.folder.load_policy(folder, "cpu"))
    export_policy(folder, tmp_path / "engine", print)
    state = np.full(len(JOINTS), 20, np.float32)
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        request = LLMGenerationRequest("", images=(IMAGES[1],), state=state)
        found = runtime.handle_request(request).actions[0]
    expected = make(IMAGES[1], state, INSTRUCTIONS["left"])
    assert np.ptp(expected) > 10
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.ptp(expected))


class Recorder:
    """A world of 26 steps that records its targets."""

    goal, state, succeeded = "right", np.zeros(len(JOINTS), np.float32), True

    def __init__(self) -> None:
        self.targets: list[float] = []

    @property
    def ended(self) -> bool:
        return len(self.targets) == 26

    def reset(self, seed: int, goal: str) -> None:
        pass

    def image(self) -> np.ndarray:
        return IMAGES[0]

    def step(self, target: np.ndarray) -> None:
        self.targets.append(float(target[0]))


def test_a_scored_arm_holds_its_target_while_a_chunk_is_computed(arm):
    world, tasks = Recorder(), []

    def make(image, state, instruction) -> np.ndarray:
        tasks.append(instruction)
        return 100 * len(tasks) + np.tile(np.arange(CHUNK_SIZE, dtype=float)[:, None], len(JOINTS))

    assert arm.score.play(make, world, seed=3, delay_steps=2)
    first, second = ([100 * chunk + i for i in range(10)] for chunk in (1, 2))
    assert world.targets == [0, 0, *first, 109, 109, *second, 209, 209]
    assert set(tasks) == {INSTRUCTIONS["right"]}


def test_a_policy_of_another_kind_is_refused_by_its_name(arm, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"type": "pi0"}))
    with pytest.raises(ValueError, match=r"config\.json: expected the type act or smolvla, got 'pi0'"):
        arm.folder.load_policy(tmp_path, "cpu")


def begun(arm, tmp_path) -> tuple:
    """Return an ACT prepared for training with a batch, and this batch."""
    policy, processors = random_policy(arm, "act", tmp_path)
    batch = arm.kind.lerobot_batch(rows(4), processors)
    policy.train()
    arm.folder.KINDS["act"].begin(policy, batch)
    return policy, batch


def test_frozen_norms_of_an_act_begin_with_the_statistics_of_the_batch(arm, tmp_path):
    policy, batch = begun(arm, tmp_path)
    measured = []

    def measure(norm, inputs: tuple) -> None:
        mean, variance = inputs[0].mean((0, 2, 3)), inputs[0].var((0, 2, 3))
        measured.append((norm.running_mean, mean, norm.running_var, variance))

    for module in policy.modules():
        if type(module).__name__ == "FrozenBatchNorm2d":
            module.register_forward_pre_hook(measure)
    policy.forward(batch)
    assert len(measured) == 20  # of a ResNet-18
    for running_mean, mean, running_variance, variance in measured:
        torch.testing.assert_close(running_mean, mean)
        torch.testing.assert_close(running_variance, variance)


def test_gradients_of_an_acts_decoder_are_bounded_at_the_beginning(arm, tmp_path):
    policy, batch = begun(arm, tmp_path)
    arm.folder.KINDS["act"].loss(policy, batch).backward()
    gradients = dict(policy.model.decoder.layers[0].self_attn.named_parameters())["in_proj_bias"].grad
    assert 0 < gradients.norm() < 1


def test_statistics_of_a_share_of_the_images_are_near_those_of_all(arm, monkeypatch):
    rng = np.random.default_rng(2)
    images = torch.from_numpy(rng.integers(0, 256, (1000, 4, 4, 3), dtype=np.uint8))
    data = rows(8)
    everything = images.float().flatten(0, 2) / 255
    for most, images_used in ((1000, 1000), (300, 250)):
        monkeypatch.setattr(arm.kind, "MOST_IMAGES", most)
        found = arm.kind.statistics(images, data["state"], data["action"])[arm.kind.IMAGE]
        error = max(
            (found["mean"].flatten() - everything.mean(0)).abs().max().item(),
            (found["std"].flatten() - everything.std(0)).abs().max().item(),
        )
        assert error < 0.02
        assert (error < 1e-6) == (images_used == len(images))


@pytest.mark.parametrize("minutes", ["0", "-1"])
def test_a_training_without_time_is_refused(arm, minutes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["arm", "--out", "there", "--minutes", minutes])
    with pytest.raises(SystemExit):
        arm.main.arguments()
    assert f"--minutes {minutes}: expected more than 0" in capsys.readouterr().err


class Stream:
    """Gray pictures, with joints at 10 times the place of the goal in GOALS."""

    def __init__(self, fields, make_writer, workers: int, rows: int, slots: int, seed: int) -> None:
        self._fields, self._rows = fields, rows

    def take(self, wait: bool) -> list:
        chunk = new_chunk(self._fields, self._rows)
        chunk["image"][:] = 128
        chunk["goal"][:] = np.arange(self._rows) % len(GOALS)
        chunk["state"][:] = 10 * chunk["goal"][:, None]
        return [chunk]

    def close(self) -> None:
        pass


@pytest.fixture
def sampled(arm, monkeypatch) -> dict:
    """A batch of demonstrations."""
    monkeypatch.setattr(arm.main, "SampleStream", Stream)
    data = arm.main.Demonstrations(Namespace(workers=1, rows=64, seed=0), "cpu")
    data.collect()
    return data.sample(200)


def test_a_demonstration_is_learned_with_the_instruction_of_its_mark(sampled):
    instructions = [INSTRUCTIONS[goal] for goal in GOALS]
    assert sampled["task"] == [instructions[int(state[0]) // 10] for state in sampled["state"]]
    assert set(sampled["task"]) == set(instructions)


def test_pictures_of_a_batch_differ_in_brightness(arm, sampled):
    gray = sampled["image"].flatten(1)
    assert (gray == gray[:, :1]).all()
    brightness = arm.main.BRIGHTNESS
    assert gray[:, 0].mean().item() == pytest.approx(128, abs=5)
    expected = np.hypot(128, 255) * brightness
    assert gray[:, 0].std().item() == pytest.approx(expected, rel=0.2)


class Clock:
    """Batches that take 70 s each; the run is interrupted after `last` of them."""

    def __init__(self, last: int) -> None:
        self.now, self.batches, self._last = 0.0, 0, last

    def monotonic(self) -> float:
        return self.now

    def sample(self, count: int) -> dict:
        if self.batches == self._last:
            raise KeyboardInterrupt
        self.batches += 1
        self.now += 70
        return rows(count)


@pytest.fixture
def small(arm, monkeypatch) -> None:
    """Let a SmolVLA have few layers."""
    monkeypatch.setattr(arm.smolvla, "LAYERS", 2)
    monkeypatch.setitem(arm.smolvla.TEXT, "num_hidden_layers", 2)
    monkeypatch.setitem(arm.smolvla.VISION, "num_hidden_layers", 1)


@pytest.mark.usefixtures("small")
def test_what_is_left_of_a_run_that_ends_is_the_policy_saved_every_two_minutes(arm, monkeypatch, tmp_path):
    clock, written = Clock(last=6), []  # the first batch comes before the steps

    def save(folder, policy, processors) -> None:
        weights = {key: value.half().float() for key, value in policy.state_dict().items()}
        written.append((clock.batches - 1, weights))
        arm.folder.save_policy(folder, policy, processors)

    monkeypatch.setattr(arm.main, "time", clock)
    monkeypatch.setattr(arm.main, "save_policy", save)
    args = Namespace(out=tmp_path, batch=2, rate=None, minutes=60)
    policy, processors = random_policy(arm, "smolvla", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        arm.main.train(args, clock, arm.folder.KINDS["smolvla"], policy, processors)
    assert [steps for steps, _ in written] == [2, 4]
    found, _ = arm.folder.load_policy(tmp_path, "cpu")
    for key, value in found.state_dict().items():
        torch.testing.assert_close(value, written[-1][1][key], rtol=0, atol=0)
