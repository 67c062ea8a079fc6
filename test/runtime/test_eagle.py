# SPDX-License-Identifier: Apache-2.0
"""Drafts with an EAGLE head: candidates against a head that sees the whole text.

Answers are compared with those of vanilla decoding.
"""

import numpy as np
import pytest

from doubles.scripted_drafter import draft_by_script
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.draws import draws
from fixtures.head_reference import assert_scores, reference_of, watched_drafts
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, SOUND, assert_same_with_drafting, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("cpu", "cuda", reason="minutes on the double, which runs other tests of drafts"),
]
TREE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
TALKING = {"prompt": "what do you see?", "repetition_penalty": 1.3}
DRAWING = {"prompt": "stop", "temperature": 1.2, "seed": 3, "repetition_penalty": 1.2}
SEEING = {"images": (IMAGE,), "audio": (SOUND,)}


@pytest.fixture(scope="module")
def engine(draft_engine):
    return draft_engine


@pytest.fixture(scope="module")
def plain(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def drafting(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0, drafting=TREE) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def reference(engine, device):
    with reference_of(engine, device, TREE) as run:
        yield run


@pytest.fixture
def drafts(drafting):
    """The list of all drafts of the runtime."""
    with watched_drafts(drafting) as found:
        yield found


@pytest.mark.parametrize("right", [0.0, 0.9])
@pytest.mark.parametrize("one", [TALKING, SEEING], ids=["words", "image and sound"])
def test_candidates_are_those_of_a_head_that_sees_the_whole_text(
    drafting, plain, reference, drafts, one, right
):
    one = request(**one, max_tokens=14)
    answer = plain.handle_request(one).token_ids
    draft_by_script(drafting, TREE.drafting_step, 10, right=right).answers = lambda request: answer
    drafting.handle_request(one)
    recorded = reference(one)
    assert len(drafts) > 3
    for draft in drafts:
        assert_scores(draft, *recorded)


def test_candidates_in_a_batch_whose_sequences_come_and_go(drafting, plain, reference, drafts):
    """Rows move up when others leave, pending tokens and head rows included."""
    limits = ((TALKING, 4), (SEEING, 17), (DRAWING, 12))
    batch = [request(**one, max_tokens=limit) for one, limit in limits]
    answers = {id(one): plain.handle_request(one).token_ids for one in batch}
    draft_by_script(drafting, TREE.drafting_step, 10).answers = lambda one: answers[id(one)]
    drafting.handle_request(batch)
    for one in batch:
        recorded = reference(one)
        for draft in (draft for draft in drafts if draft.request is one):
            assert_scores(draft, *recorded)


@pytest.mark.parametrize("vanilla", [0, 8], ids=["between rounds", "between vanilla steps"])
def test_candidates_of_a_request_that_joins_a_running_batch(drafting, plain, reference, drafts, vanilla):
    early = [request(**TALKING, max_tokens=30), request(**DRAWING, max_tokens=6)]
    late = [request(**SEEING, max_tokens=20)]
    answers = {id(one): plain.handle_request(one) for one in (*early, *late)}
    pipeline = drafting.pipeline
    scripted = draft_by_script(drafting, TREE.drafting_step, 10, right=0.6)
    scripted.answers = lambda one: answers[id(one)].token_ids
    waiting, done = [early, late], []
    worth_it = [True, *[False] * vanilla]
    pipeline.method._chosen_size = lambda most: most if not worth_it or worth_it.pop(0) else 1
    while waiting or pipeline.batch.sequences:
        if waiting:
            joining = pipeline.prepare(waiting.pop(0), 0)
            pipeline.encode_images(joining)
            pipeline.encode_audio(joining)
            pipeline.prefill(joining)
        ended = pipeline.decode()
        pipeline.batch.evict(ended)
        done += ended
    assert len(done) == 3
    for sequence in done:
        assert sequence.generated == answers[id(sequence.request)].token_ids
        recorded = reference(sequence.request)
        for draft in (draft for draft in drafts if draft.request is sequence.request):
            assert_scores(draft, *recorded)


def test_candidates_after_vanilla_steps(drafting, plain, reference, drafts):
    """The head catches up, from the states that the vanilla steps have kept."""
    one = request(**TALKING, max_tokens=30)
    answer = plain.handle_request(one).token_ids
    draft_by_script(drafting, TREE.drafting_step, 10).answers = lambda request: answer
    kinds = iter([True, False, True, True, *[False] * 11, True, *[False] * 4, *[True] * 99])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting.pipeline.method, "_chosen_size", lambda most: most if next(kinds) else 1)
        drafting.handle_request(one)
    recorded = reference(one)
    lengths = [draft.length for draft in drafts]
    assert max(np.diff(lengths)) > 11
    for draft in drafts:
        assert_scores(draft, *recorded)


def test_in_a_pause_the_head_runs_on_many_tokens_at_once(drafting, plain, reference, drafts):
    one = request(**TALKING, max_tokens=100)
    answer = plain.handle_request(one).token_ids
    draft_by_script(drafting, TREE.drafting_step, 10, right=0.0).answers = lambda request: answer
    kinds = iter([True, *[False] * 80, *[True] * 99])
    eagle, sizes = drafting.pipeline.drafter.drafter.drafter, []
    execute = eagle._head.execute_accepted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            eagle._head,
            "execute_accepted",
            lambda embeds, *rest: sizes.append(embeds.shape[1]) or execute(embeds, *rest),
        )
        patch.setattr(drafting.pipeline.method, "_chosen_size", lambda most: most if next(kinds) else 1)
        drafting.handle_request(one)
    width = TREE.tokens_per_round
    assert len(answer) == 100
    assert sizes[:4] == [width, 64, 32, width], "a round; 80 tokens in two runs; the next round"
    recorded = reference(one)
    for draft in drafts:
        assert_scores(draft, *recorded)


def test_nan_of_an_earlier_sequence_does_not_stay(drafting, plain, drafts):
    pipeline, one = drafting.pipeline, request(**TALKING, max_tokens=5)
    cache = pipeline.drafter.kv_cache
    for tensor in cache.bindings(range(1)).values():
        pipeline.device.upload(tensor, np.full(tensor.shape, np.nan, tensor.dtype))
    answer = plain.handle_request(one).token_ids
    draft_by_script(drafting, TREE.drafting_step, 10).answers = lambda request: answer
    drafting.handle_request(one)
    assert all(np.isfinite(draft.table["scores"]).all() for draft in drafts)


@pytest.mark.parametrize("seed", range(draws(2, 4)))
@pytest.mark.parametrize("tree", [(1, 3, 4), (3, 3, 10), (5, 4, 32)], ids=str)
def test_answers_are_those_of_vanilla_decoding(engine, plain, device, tree, seed):
    rng = np.random.default_rng(seed)
    config = SpecDecodeDraftingConfig(*tree, falls_back=False)
    batch = [
        request(
            ["", "stop", "go to the red box", "abc abc abc"][rng.integers(4)],
            images=((), (IMAGE,))[rng.integers(2)],
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0, 0.5, 1.3])),
            repetition_penalty=float(rng.choice([1, 1.2])),
            seed=int(rng.integers(1000)),
            logprobs=int(rng.choice([0, 3])),
        )
        for _ in range(rng.integers(1, 5))
    ]
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0, drafting=config) as runtime:
        for one, other in zip(runtime.handle_request(batch), map(plain.handle_request, batch), strict=True):
            assert_same_with_drafting(one, other)


SYSTEM = "you are a small robot on a floor with coloured solids. " * 2
SHARED = [  # prompts that branch in the middle of a page, at its end, and in an image
    request("go to the red box", system_prompt=SYSTEM, max_tokens=5),
    request("go to the blue box", system_prompt=SYSTEM, max_tokens=5),
    request("x" * 200, max_tokens=5),
    request("x" * 210 + "y", max_tokens=5),
    request("what do you see?", system_prompt=SYSTEM, images=(IMAGE,), max_tokens=5),
    request("what do you see now?", system_prompt=SYSTEM, images=(IMAGE,), max_tokens=5),
    request("what do you see?", system_prompt=SYSTEM, images=(OTHER_IMAGE,), max_tokens=5),
]


@pytest.fixture
def caching(engine, device):
    with LLMInferenceRuntime(engine, device, drafting=TREE) as runtime:
        yield runtime


class TestPrefixReuse:
    def test_the_heads_rows_of_a_reused_prefix_are_those_of_its_tokens(self, caching, plain, reference):
        for one in [*SHARED, *SHARED]:
            with watched_drafts(caching) as drafts:
                answer = caching.handle_request(one)
            assert_same_with_drafting(answer, plain.handle_request(one))
            for draft in drafts:
                assert_scores(draft, *reference(one))
        assert answer.reused_tokens == answer.prompt_tokens - 1

    def test_prompts_that_share_a_page_in_one_batch(self, caching, plain, reference):
        caching.handle_request(SHARED[0])
        with watched_drafts(caching) as drafts:
            answers = caching.handle_request(SHARED[1:5])
        assert [answer.reused_tokens > 0 for answer in answers] == [True, False, False, True]
        for one in SHARED[1:5]:
            for draft in (draft for draft in drafts if draft.request is one):
                assert_scores(draft, *reference(one))

    def test_a_file_has_the_heads_rows(self, caching, engine, device, reference, tmp_path):
        caching.handle_request(SHARED[0])
        caching.save_prefix_cache(tmp_path / "prefixes")
        with LLMInferenceRuntime(engine, device, drafting=TREE) as other:
            assert other.load_prefix_cache(tmp_path / "prefixes") > 0
            with watched_drafts(other) as drafts:
                assert other.handle_request(SHARED[1]).reused_tokens > 0
        for draft in drafts:
            assert_scores(draft, *reference(SHARED[1]))

    def test_a_file_without_the_heads_rows_is_refused(self, caching, engine, device, tmp_path):
        with LLMInferenceRuntime(engine, device, drafting="off") as other:
            other.handle_request(SHARED[0])
            other.save_prefix_cache(tmp_path / "prefixes")
        with pytest.raises(ValueError, match=r"saved by another engine .*\+draft, format"):
            caching.load_prefix_cache(tmp_path / "prefixes")

    def test_a_conversation_reuses_the_heads_rows_of_its_answers(self, caching, reference):
        question = Message("user", "what do you see?")
        one = LLMGenerationRequest(messages=(question,), sampling=request(max_tokens=9).sampling)
        answer = caching.handle_request(one).text
        turns = (question, Message("assistant", answer), Message("user", "and now?"))
        two = LLMGenerationRequest(messages=turns, sampling=request(max_tokens=9).sampling)
        with watched_drafts(caching) as drafts:
            found = caching.handle_request(two)
        assert found.reused_tokens > len(answer)
        for draft in drafts:
            assert_scores(draft, *reference(two))
