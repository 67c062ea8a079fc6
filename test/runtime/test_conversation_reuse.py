# SPDX-License-Identifier: Apache-2.0
"""A turn of a conversation computes its new tokens only.

The model answers as if it had computed all.
"""

import shutil
import threading

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, SOUND, assert_same_answer, request
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import CHAT_TEMPLATE

# Tokens of a turn beside its words, as characters (a special token is one of them): the history after its
# start token, which every turn has, and what the template writes between the words and the answer.
AROUND = len("01234567>") + len(">\n<assistant\n")
# As in Qwen3: reasoning of earlier turns is left out, and answers are trimmed.
REASONING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{{ m.content[2:] | trim }}{% else %}{{ m.content }}{% endif %}",
)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """The tiny engine with room for a conversation."""
    directory = tmp_path_factory.mktemp("talk") / "engine"
    export(tiny_checkpoint, directory, max_input_len=960, max_kv_cache_capacity=1024)
    return directory


@pytest.fixture
def engine_with(tiny_checkpoint, tmp_path):
    """`engine_with(template)`: such an engine with another chat template."""

    def make(template: str):
        shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "chat_template.jinja").write_text(template)
        export(tmp_path / "checkpoint", tmp_path / "engine", max_input_len=960, max_kv_cache_capacity=1024)
        return tmp_path / "engine"

    return make


@pytest.fixture(scope="module")
def recomputing(engine, device):
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def caching(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture
def reusing(caching):
    """A runtime with an empty prefix cache."""
    caching.clear_prefix_cache()
    return caching


def ask(messages, max_tokens=8, **parameters) -> LLMGenerationRequest:
    sampling = request(max_tokens=max_tokens, temperature=0.8, seed=len(messages)).sampling
    return LLMGenerationRequest(messages=messages, sampling=sampling, logprobs=3, **parameters)


def question(turn: int) -> Message:
    """What the user says in a turn: in two of ten with an image, in one with a sound."""
    parts = {2: [ImagePart(IMAGE)], 4: [AudioPart(SOUND)], 6: [ImagePart(OTHER_IMAGE)]}.get(turn, [])
    return Message("user", [*parts, TextPart(f"question {turn}, and what else?")])


def converse(reusing, recomputing, turns) -> list:
    """Compare each answer with that of the whole conversation; return the answers."""
    messages = [Message("system", "you are a small robot.")]
    answers = []
    for turn in range(turns):
        messages.append(question(turn))
        answers.append(reusing.handle_request(ask(messages)))
        assert_same_answer(answers[-1], recomputing.handle_request(ask(messages)))
        messages.append(Message("assistant", answers[-1].text))
    return answers


@pytest.mark.slow
def test_each_of_ten_turns_with_two_images_computes_its_new_tokens_only(reusing, recomputing):
    encoded = reusing.multimodal_metrics.total_images
    answers = converse(reusing, recomputing, 10)
    assert reusing.multimodal_metrics.total_images == encoded + 2
    assert answers[0].reused_tokens == 0
    for turn in (1, 3, 5, 7, 8, 9):
        new = len(question(turn).content[0].text) + AROUND
        assert answers[turn].prompt_tokens - answers[turn].reused_tokens == new


@pytest.mark.slow
def test_answers_that_the_template_rewrites_are_reused(engine_with, runtime_device):
    engine = engine_with(REASONING_TEMPLATE)
    with (
        LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as recomputing,
        LLMInferenceRuntime(engine, runtime_device) as reusing,
    ):
        last = converse(reusing, recomputing, 4)[3]
    assert last.prompt_tokens - last.reused_tokens == len(question(3).content[0].text) + AROUND


def test_storing_a_turn_encodes_no_sound_or_image_after_the_history_again(reusing, recomputing):
    """Each turn computes the previous message of the user again from its history on."""
    heard = Sound(0.5 * SOUND.samples, SOUND.sample_rate)  # for the first time
    messages = [Message("user", [TextPart("this"), AudioPart(heard), ImagePart(IMAGE), TextPart("go")])]
    metrics = reusing.multimodal_metrics
    before = metrics.total_sounds, metrics.total_images
    answers = reusing.handle_request([ask(messages), ask([question(0), *messages])])
    # The rows of the sound are copied for the second prompt.
    assert (metrics.total_sounds - before[0], metrics.total_images - before[1]) == (1, 2)
    following = ask([*messages, Message("assistant", answers[0].text), question(1)])
    assert_same_answer(reusing.handle_request(following), recomputing.handle_request(following))


def test_an_answer_that_the_client_changed_is_computed(reusing, recomputing):
    answer = reusing.handle_request(ask([question(0)]))
    for text in (answer.text + "!", "?" + answer.text, ""):
        messages = [question(0), Message("assistant", text), question(1)]
        changed = reusing.handle_request(ask(messages))
        assert_same_answer(changed, recomputing.handle_request(ask(messages)))


def test_the_turn_after_a_continued_answer_computes_its_new_tokens_only(reusing, recomputing):
    begun = ask([question(0), Message("assistant", "it is ")], continue_final_message=True)
    answer = reusing.handle_request(begun)
    assert_same_answer(answer, recomputing.handle_request(begun))
    following = ask([question(0), Message("assistant", "it is " + answer.text), question(1)])
    last = reusing.handle_request(following)
    assert last.prompt_tokens - last.reused_tokens == len(question(1).content[0].text) + AROUND
    assert_same_answer(last, recomputing.handle_request(following))


def test_conversations_of_one_batch_are_continued_by_the_next(reusing, recomputing):
    starts = [[question(turn)] for turn in (0, 2, 4)]
    answers = reusing.handle_request([ask(messages) for messages in starts])
    continued = [
        ask([*messages, Message("assistant", answer.text), question(1)])
        for messages, answer in zip(starts, answers, strict=True)
    ]
    for answer, one in zip(reusing.handle_request(continued), continued, strict=True):
        new = len(question(1).content[0].text) + AROUND
        assert answer.prompt_tokens - answer.reused_tokens == new
        assert_same_answer(answer, recomputing.handle_request(one))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_conversations_in_a_cache_that_is_too_small_answer_the_same(
    engine, recomputing, seed, runtime_device
):
    rng = np.random.default_rng(seed)
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=18 * 24576) as runtime:
        talks = [[Message("system", f"robot {index}")] for index in range(3)]
        for _ in range(8):
            chosen = [talks[index] for index in rng.choice(3, rng.integers(1, 4), replace=False)]
            for messages in chosen:
                messages.append(question(int(rng.integers(0, 7))))
            answers = runtime.handle_request([ask(messages) for messages in chosen])
            for messages, answer in zip(chosen, answers, strict=True):
                assert_same_answer(answer, recomputing.handle_request(ask(messages)))
                messages.append(Message("assistant", answer.text))
        assert runtime.prefill_metrics.reused_tokens > 200


def test_a_conversation_with_an_adapter_is_continued_with_this_adapter_only(
    tiny_lora_engine, tiny_checkpoint, tmp_path, runtime_device
):
    adapters = {"one": write_adapter(tmp_path / "one", tiny_checkpoint, seed=1, r=4)}
    with LLMInferenceRuntime(tiny_lora_engine, runtime_device, lora_dirs=adapters) as runtime:
        answer = runtime.handle_request(ask([question(0)], lora="one"))
        messages = [question(0), Message("assistant", answer.text), question(1)]
        assert runtime.handle_request(ask(messages)).reused_tokens == 0
        continued = runtime.handle_request(ask(messages, lora="one"))
        new = len(question(1).content[0].text) + AROUND
        assert continued.prompt_tokens - continued.reused_tokens == new


def test_the_short_form_stores_its_prompt_only(reusing):
    answer = reusing.handle_request(request("go"))
    pages = [page for _, page in reusing.pipeline.prefixes.pages()]
    assert sum(len(page.keys) for page in pages) == answer.prompt_tokens


def test_a_cancelled_answer_is_not_stored(reusing, recomputing):
    cancel = threading.Event()

    def on_progress(progress):
        if progress.stage == "decode" and progress.step == 2:
            cancel.set()

    answer = reusing.handle_request(ask([question(0)], cancel=cancel, on_progress=on_progress))
    assert answer.finish_reason == "cancelled"
    messages = [question(0), Message("assistant", answer.text), question(1)]
    continued = reusing.handle_request(ask(messages))
    assert continued.reused_tokens < answer.prompt_tokens + 8
    assert_same_answer(continued, recomputing.handle_request(ask(messages)))


def test_no_progress_is_reported_for_the_stored_answer(reusing):
    stages = []
    one = ask([question(2)], on_progress=lambda progress: stages.append((progress.stage, progress.step)))
    answer = reusing.handle_request(one)
    assert stages == [("vision", 0), ("prefill", 0), *(("decode", i) for i in range(len(answer.token_ids)))]


def test_hidden_states_and_counters_are_those_of_the_prompt(reusing, recomputing, device):
    answer = reusing.handle_request(ask([question(0)]))
    assert [len(ids) for ids in reusing.base_model_input_token_ids] == [answer.prompt_tokens]
    computed = reusing.prefill_metrics.computed_tokens
    one = ask([question(1)])
    reusing.handle_request(one, output_thinker_embeddings=True)
    recomputing.handle_request(one, output_thinker_embeddings=True)
    assert reusing.prefill_metrics.computed_tokens == computed + len(reusing.base_model_input_token_ids[0])
    states = [device.download(runtime.base_model_hidden_states(0)) for runtime in (reusing, recomputing)]
    np.testing.assert_array_equal(*states)


def test_a_template_that_refuses_the_next_turn_does_not_spoil_the_answer(engine_with, runtime_device):
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    with LLMInferenceRuntime(engine_with(refusing + CHAT_TEMPLATE), runtime_device) as runtime:
        one = ask([Message("user", "hello")])
        assert runtime.handle_request(one).token_ids
        assert runtime.handle_request(one).reused_tokens > 0
