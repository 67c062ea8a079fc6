# SPDX-License-Identifier: Apache-2.0
"""Images and sounds of newcomers are encoded beside the steps of the others."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from doubles.played_encoder import PlayedEncoder
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.encoders import Encoders
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling.claims import Claims
from edgellm_ros.runtime.scheduling.encoding import MOST_INTERRUPTS
from edgellm_ros.runtime.scheduling.shares import FIRST_CLAIM, Share
from edgellm_ros.runtime.scheduling.turns import LOOK_S, Turns
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, SOUND, assert_same_bits, request

pytestmark = pytest.mark.only_on("cpu", reason="a GPU has one stream")
WAIT_S = 60.0
TALKING = request("what do you see?", max_tokens=200)


class HeldEncoders:
    """Encoders whose runs wait until they are let go or interrupted.

    - interruptible: whether `interrupt` ends a run that waits

    `began`: prompts of the requests whose runs began since `hold`, in this order.
    """

    def __init__(self, monkeypatch, interruptible: bool = True) -> None:
        self.began: list[str] = []
        self._changed = threading.Condition()
        self._held = self._interrupted = False
        compute, interrupt, resume = Encoders._once, Encoders.interrupt, Encoders.resume
        monkeypatch.setattr(Encoders, "_once", lambda *given: self._wait(given[1]) or compute(*given))
        if interruptible:
            monkeypatch.setattr(Encoders, "interrupt", lambda all: self._set(True) or interrupt(all))
            monkeypatch.setattr(Encoders, "resume", lambda all: self._set(False) or resume(all))

    def hold(self) -> None:
        self.began.clear()
        self._held = True

    def let_go(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_for(self, *prompts: str) -> None:
        """Wait until runs of these requests have begun, and no others."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.began) >= len(prompts), WAIT_S)
        assert self.began == list(prompts)

    def _set(self, interrupted: bool) -> None:
        with self._changed:
            self._interrupted = interrupted
            self._changed.notify_all()

    def _wait(self, sequence) -> None:
        with self._changed:
            self.began.append(sequence.request.prompt)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held or self._interrupted, WAIT_S)
            if self._interrupted:
                raise EngineError("the run was interrupted")


@pytest.fixture
def held(monkeypatch, request):
    held = HeldEncoders(monkeypatch, interruptible=getattr(request, "param", True))
    yield held
    held.let_go()


stubborn = pytest.mark.parametrize("held", [True, False], ids=["interruptible", "not"], indirect=True)


def looking(prompt: str, **parts):
    return request(prompt, max_tokens=6, **(parts or {"images": (IMAGE,)}))


class Talker:
    """A request that halts when it begins; newcomers join it once it goes on."""

    def __init__(self, runtime) -> None:
        self._goes = threading.Event()
        waiting = dataclasses.replace(TALKING, on_progress=lambda progress: self._goes.wait(WAIT_S))
        self.handle = runtime.submit(waiting)

    def go(self) -> None:
        self._goes.set()


@pytest.fixture
def talker(runtime, held):
    """A running request, whose answer is that alone."""
    expected = runtime.handle_request(TALKING)
    held.hold()
    talker = Talker(runtime)
    yield talker
    talker.go()
    held.let_go()
    assert_same_bits(talker.handle.result(WAIT_S), expected)


def check(runtime, handle, one) -> None:
    """Compare an answer with that alone."""
    response = handle.result(WAIT_S)
    assert_same_bits(response, runtime.handle_request(one))


@pytest.mark.parametrize("parts", [{"images": (IMAGE,)}, {"audio": (SOUND,)}], ids=["image", "sound"])
def test_others_have_steps_while_a_newcomer_is_encoded(runtime, held, talker, parts):
    joining = runtime.submit(looking("go", **parts))
    talker.go()
    held.wait_for("go")
    assert len(talker.handle.result(WAIT_S).token_ids) == TALKING.sampling.max_tokens
    assert not joining.done
    held.let_go()
    check(runtime, joining, looking("go", **parts))


def test_a_newcomer_without_images_does_not_wait_for_the_encoders_of_another(runtime, held, talker):
    joining = runtime.submit(looking("go"))
    talker.go()
    held.wait_for("go")
    assert runtime.submit(request("stop")).result(WAIT_S).finish_reason in ("stop", "length")
    assert not joining.done
    held.let_go()
    check(runtime, joining, looking("go"))


def test_driving_does_not_wait_for_the_encoders_of_another(runtime, held, talker):
    low = runtime.submit(looking("go"))
    talker.go()
    held.wait_for("go")
    driving = runtime.submit(looking("left"), priority=FIRST_CLAIM)
    held.wait_for("go", "left")
    held.let_go()
    response = driving.result(WAIT_S)
    check(runtime, low, looking("go"))
    assert held.began[:3] == ["go", "left", "go"]
    assert_same_bits(response, runtime.handle_request(looking("left")))


@stubborn
def test_a_newcomer_is_cancelled_while_it_is_encoded(runtime, held, talker):
    joining = runtime.submit(looking("go"))
    talker.go()
    held.wait_for("go")
    joining.cancel()
    response = joining.result(WAIT_S)
    assert (response.finish_reason, response.token_ids) == ("cancelled", [])
    other = runtime.submit(looking("stop", images=(OTHER_IMAGE,)))
    held.let_go()
    check(runtime, other, looking("stop", images=(OTHER_IMAGE,)))


def test_an_error_of_the_encoder_ends_its_request_only(runtime, held, talker, monkeypatch):
    held.let_go()
    encode = VisionRunner.encode

    def fail(runner, image, *rows):
        if image is OTHER_IMAGE:
            raise EngineError("no memory for an image")
        encode(runner, image, *rows)

    monkeypatch.setattr(VisionRunner, "encode", fail)
    failing, other = runtime.submit(looking("go", images=(IMAGE, OTHER_IMAGE))), runtime.submit(looking("go"))
    talker.go()
    with pytest.raises(EngineError, match="no memory for an image"):
        failing.result(WAIT_S)
    check(runtime, other, looking("go"))


@pytest.mark.parametrize("held", [False], ids=["not interruptible"], indirect=True)
def test_handle_request_waits_for_the_encoders_of_a_cancelled_request(runtime, held):
    images = {"images": (OTHER_IMAGE,)}
    expected = runtime.handle_request(looking("stop", **images))
    held.hold()
    joining = runtime.submit(looking("go"))
    held.wait_for("go")
    joining.cancel()
    joining.result(WAIT_S)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(runtime.handle_request(looking("stop", **images)))
    )
    asking.start()
    time.sleep(0.1)
    assert held.began == ["go"]
    held.let_go()
    asking.join(WAIT_S)
    assert_same_bits(answers[0], expected)


def encoder_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgellm-encoders"]


@stubborn
def test_close_ends_a_newcomer_that_is_encoded(tiny_engine, held):
    runtime = LLMInferenceRuntime(tiny_engine, "cpu")
    before = len(encoder_threads())
    held.hold()
    joining = runtime.submit(looking("go"))
    held.wait_for("go")
    closing = threading.Thread(target=runtime.close)
    closing.start()
    time.sleep(0.05)  # a run that cannot be interrupted is waited for
    held.let_go()
    closing.join(WAIT_S)
    with pytest.raises(EngineError, match="the runtime is closed"):
        joining.result(WAIT_S)
    assert len(encoder_threads()) == before


def test_progress_is_reported_on_one_thread_and_in_order(runtime, held, talker):
    talker.go()
    held.let_go()
    seen: list[tuple[str, int]] = []
    threads = set()

    def listen(progress) -> None:
        threads.add(threading.current_thread().name)
        if progress.stage != "decode":
            seen.append((progress.stage, progress.step))

    parts = {"images": (IMAGE, OTHER_IMAGE), "audio": (SOUND,)}
    runtime.submit(looking("go", **parts, on_progress=listen)).result(WAIT_S)
    assert seen == [("vision", 0), ("vision", 1), ("audio", 0), ("prefill", 0)]
    assert threads == {"edgellm-scheduler"}


def test_the_seconds_of_the_encoders_are_counted(runtime, held, talker):
    talker.go()
    held.let_go()
    before = runtime.multimodal_metrics
    seconds, images = before.seconds, before.total_images
    response = runtime.submit(looking("go")).result(WAIT_S)
    assert response.metrics["vision_s"] > 0
    assert runtime.multimodal_metrics.seconds > seconds
    assert runtime.multimodal_metrics.total_images == images + 1


def test_the_scheduler_sleeps_while_there_is_nothing_but_a_run_of_the_encoders(runtime, held, monkeypatch):
    turns, turn = [], Turns.turn
    monkeypatch.setattr(Turns, "turn", lambda *given, **named: turns.append(1) or turn(*given, **named))
    held.hold()
    joining = runtime.submit(looking("go"))
    held.wait_for("go")
    turns.clear()
    time.sleep(2 * LOOK_S)
    assert len(turns) < 10
    held.let_go()
    assert joining.result(WAIT_S).token_ids


def test_clients_with_images_and_sounds_get_the_answers_alone(runtime):
    parts = [
        {"images": (IMAGE, OTHER_IMAGE)},
        {"images": (OTHER_IMAGE,)},
        {"audio": (SOUND,)},
        {"images": ()},
    ]
    requests = [looking(prompt, **each) for prompt in ("go", "stop", "left") for each in parts]
    expected = [runtime.handle_request(one) for one in requests]
    wrong: list[BaseException] = []

    def ask(client: int) -> None:
        rng = np.random.default_rng(client)
        try:
            for index in rng.permutation(len(requests)):
                one = dataclasses.replace(requests[index], images=[*map(np.copy, requests[index].images)])
                handle = runtime.submit(one, priority=int(rng.choice([0, 0, 1, FIRST_CLAIM])))
                if rng.random() < 0.2:
                    handle.cancel()
                response = handle.result(WAIT_S)
                if response.finish_reason != "cancelled":
                    assert_same_bits(response, expected[index])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not wrong
    assert runtime.scheduling_metrics.running == runtime.scheduling_metrics.waiting == 0


@pytest.fixture
def played(runtime):
    """Turns beside which each run of the encoders takes three."""
    played = PlayedTurns(runtime, encoder=PlayedEncoder(0, turns=3))
    yield played
    played.turns.fail_all(RuntimeError("the test has failed"))


def test_newcomers_are_encoded_one_after_another_by_priority(runtime, played, monkeypatch):
    held = HeldEncoders(monkeypatch)
    both = {"images": (IMAGE, OTHER_IMAGE)}
    arrivals = [("go", 0, both), ("stop", 0, {}), ("left", 1, both)]
    entries = [played.submit(looking(prompt, **parts), priority) for prompt, priority, parts in arrivals]
    played.finish()
    assert held.began == ["left", "left", "go", "go", "stop"]
    for entry, (prompt, _, parts) in zip(entries, arrivals, strict=True):
        check(runtime, entry.handle, looking(prompt, **parts))


def test_the_share_that_has_had_least_is_encoded_first(played, monkeypatch):
    held = HeldEncoders(monkeypatch)
    played.submit(TALKING)
    played.turn()
    for prompt in ("go", "stop"):
        played.submit(looking(prompt))
    played.turn()
    played.submit(looking("left"), share=Share())
    played.finish()
    assert held.began == ["go", "left", "stop"]


def test_a_request_that_runs_alone_waits_for_the_encoders_of_a_cancelled_one(runtime, played, monkeypatch):
    monkeypatch.setattr(Claims, "is_alone", lambda claims, entry: entry.request.prompt == "left")
    encode, busy = Encoders.encode_images, []
    joining = played.submit(looking("go"))
    played.turn()
    joining.cancel()
    alone = played.submit(looking("left"))

    def watched(*given) -> None:
        busy.append(played.encoder.is_busy)
        encode(*given)

    monkeypatch.setattr(Encoders, "encode_images", watched)
    played.finish()
    assert busy == [False]
    check(runtime, alone.handle, looking("left"))


def test_a_deadline_ends_a_newcomer_while_it_is_encoded(played):
    joining = played.submit(looking("go"), deadline=1.0)
    played.turn()
    assert joining.run is not None
    played.turn(seconds=2.0)
    played.turn()
    assert joining.handle.result(0).finish_reason == "cancelled"
    played.finish()


def test_a_newcomer_that_loses_its_row_is_encoded_again(runtime, played):
    for _ in range(runtime.config.builder.max_batch_size - 1):
        played.submit(TALKING)
    joining = played.submit(looking("go"))
    played.turn()
    assert joining.run is not None
    driving = played.submit(looking("stop"), priority=FIRST_CLAIM)
    played.turn()
    assert played.turns.waiting == [joining]
    assert joining.run is None
    played.finish()
    check(runtime, joining.handle, looking("go"))
    check(runtime, driving.handle, looking("stop"))


def test_a_run_that_was_interrupted_three_times_is_completed_beside_driving(runtime, played):
    low = played.submit(looking("go"))
    driving = [played.submit(request("stop", max_tokens=2), priority=FIRST_CLAIM)]
    while not low.prompts:
        if driving[-1].handle.done and played.turns._rows.encoding.current is low:
            driving.append(played.submit(request("stop", max_tokens=2), priority=FIRST_CLAIM))
        played.turn()
    assert played.encoder.interrupted == MOST_INTERRUPTS == 3
    played.finish()
    check(runtime, low.handle, looking("go"))


def test_what_was_reused_and_is_dropped_meanwhile_is_encoded(tiny_engine):
    both = looking("go", images=(IMAGE, OTHER_IMAGE))
    with LLMInferenceRuntime(tiny_engine, "cpu") as runtime:
        expected = runtime.handle_request(both)
        runtime.clear_prefix_cache()
        encoder = PlayedEncoder(0)
        played = PlayedTurns(runtime, encoder=encoder)
        played.submit(looking("stop", images=(IMAGE,)))
        played.finish()
        encoded = runtime.multimodal_metrics.total_images
        joining = played.submit(both)
        played.turn()
        assert encoder.is_busy
        assert joining.sequence.reused_tokens > 0
        runtime.pipeline.reuse.clear()  # as after an EngineError of another request
        played.submit(request("turn left at the door and stop " * 3, max_tokens=1))  # takes the same pages
        played.finish()
        assert runtime.multimodal_metrics.total_images == encoded + 2
        assert_same_bits(joining.handle.result(0), expected)
