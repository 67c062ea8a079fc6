# SPDX-License-Identifier: Apache-2.0
"""A decode method of the test: known answers, several tokens a step, some wrong.

The real loop, batch and sampling rows run it, as they run every decode method.
"""

import numpy as np
import pytest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.on_device import put
from fixtures.random_requests import cancelled_at
from fixtures.requests_for_tests import IMAGE, request

WRONG = 299
TALKING = {"prompt": "what do you see?", "repetition_penalty": 1.3}
DRAWING = {"prompt": "stop", "temperature": 1.2, "seed": 3, "repetition_penalty": 1.2}
ACTING = {"prompt": "go to the red box", "images": (IMAGE,), "action_samples": 2}


class ScriptedDecoding:
    """Offers 1 to 4 next tokens of a script per row and step.

    `scripts`: prompt -> tokens of its answer.
    """

    tokens_per_step = 4

    def __init__(self, pipeline, scripts: dict[str, list[int]]) -> None:
        self.pipeline, self.scripts = pipeline, scripts
        self.steps = 0

    def clear(self) -> None:
        pass

    def begin(self, batch) -> None:
        self.scripted = [self.scripts[one.request.prompt] for one in batch.sequences]
        self.places = [len(one.generated) for one in batch.sequences]
        self.logprobs = max(one.request.logprobs for one in batch.sequences)

    def prefilled(self, rows) -> None:
        pass

    def queues_ahead(self, sequences) -> bool:
        return True

    def delivered(self, result, served) -> None:
        pass

    def queue(self, room):
        pipeline, batch = self.pipeline, len(self.places)
        device, sampling = pipeline.device, pipeline.sampling
        tokens = np.full((batch, 4), WRONG)
        offered = [1 + (self.steps + row) % 4 for row in range(batch)]
        logits = np.zeros((batch, 4, pipeline.config.output_vocab_size), np.float32)
        for row, (script, place, count) in enumerate(zip(self.scripted, self.places, offered, strict=True)):
            known = script[place : place + count]
            tokens[row, : len(known)] = known
            logits[row, range(4), tokens[row]] = 5
            self.places[row] += count
        self.steps += 1
        device.upload(sampling.begin_step(batch, 4)[1], tokens)
        pipeline.batch.commit(sampling.count(offered=put(device, offered)))
        return sampling.copy_to_host(put(device, logits), self.logprobs)


@pytest.fixture(scope="module")
def scripted(acting_engine, acting_runtime, device):
    """A runtime that decodes the answers of `acting_runtime` by script."""
    script = {}
    for one in (TALKING, DRAWING, ACTING):
        script[one["prompt"]] = acting_runtime.handle_request(request(**one, max_tokens=40)).token_ids
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0) as runtime:
        runtime.pipeline.use_decode_method(ScriptedDecoding(runtime.pipeline, script))
        yield runtime


def assert_same_words(one, other) -> None:
    for name in ("text", "token_ids", "finish_reason", "prompt_tokens"):
        assert getattr(one, name) == getattr(other, name)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9, 30])
def test_limits_stop_tokens_and_wrong_tokens_in_a_batch(scripted, acting_runtime, max_tokens):
    """ACTING's future-start token is within a step; sequences leave one by one."""
    batch = [request(**one, max_tokens=max_tokens) for one in (TALKING, DRAWING, ACTING)]
    for one, other in zip(
        scripted.handle_request(batch), map(acting_runtime.handle_request, batch), strict=True
    ):
        assert_same_words(one, other)
        assert (one.actions is None) == (other.actions is None)


def test_steps_yield_several_tokens(scripted):
    before = scripted.generation_metrics.total_runs
    answer = scripted.handle_request(request(**TALKING, max_tokens=30))
    assert scripted.generation_metrics.total_runs - before < len(answer.token_ids) / 2


def test_a_trigger_in_the_middle_of_a_step_commits_its_row(scripted, trigger_index):
    lengths, queue = [], scripted.pipeline.action.queue_part

    def watched(cache, *rest):
        lengths.extend(scripted.pipeline.device.download(cache.length).tolist())
        return queue(cache, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted.pipeline.action, "queue_part", watched)
        answer = scripted.handle_request(request(**ACTING, max_tokens=30))
    assert answer.actions is not None
    assert lengths == [answer.prompt_tokens + trigger_index + 1]


def test_stop_strings_streaming_and_log_probabilities(scripted, acting_runtime):
    whole = acting_runtime.handle_request(request(**TALKING, max_tokens=30)).text
    seen: list[str] = []
    rules = {**TALKING, "max_tokens": 30, "stop": (whole[9:11],), "logprobs": 1}
    one = request(**rules, on_progress=lambda progress: seen.append(progress.text))
    answer = scripted.handle_request([one, request(**DRAWING, max_tokens=20)])[0]
    assert_same_words(answer, acting_runtime.handle_request(request(**rules)))
    assert all(answer.text.startswith(text) for text in seen)
    assert len(answer.logprobs) == len(answer.token_ids)
    assert [entries[0][0] for entries in answer.logprobs[1:]] == answer.token_ids[1:]


def test_a_cancelled_sequence_leaves_the_others(scripted, acting_runtime):
    batch = [cancelled_at(request(**TALKING, max_tokens=30), "decode", 2), request(**DRAWING, max_tokens=30)]
    cancelled, other = scripted.handle_request(batch)
    assert cancelled.finish_reason == "cancelled"
    assert 2 < len(cancelled.token_ids) < 30
    assert_same_words(other, acting_runtime.handle_request(batch[1]))
