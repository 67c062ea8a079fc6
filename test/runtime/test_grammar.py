# SPDX-License-Identifier: Apache-2.0
"""Answers of a JSON schema, a regular expression or choices.

jsonschema and `re` judge them.
"""

import itertools
import re
import sys
import threading

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.grammar.grammar import Grammars, write_masks
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import SamplingParams
from edgellm_ros.runtime.text.tokenizer import Tokenizer
from fixtures.answers_of_grammars import GRAMMARS, PLAN, SCHEMA, WORD, check, random_requests
from fixtures.requests_for_tests import IMAGE, assert_same_answer, assert_same_bits, request


@pytest.fixture(scope="module")
def tokenizer(tiny_engine) -> Tokenizer:
    return Tokenizer(tiny_engine / "tokenizer.json")


def answers_are_valid(runtime, seed: int, count: int) -> None:
    requests = random_requests(seed, count)
    batch = runtime.config.builder.max_batch_size
    ended = 0
    for start in range(0, count, batch):
        part = requests[start : start + batch]
        ended += sum(map(check, part, runtime.handle_request(part)))
    assert ended > 0.7 * count


@pytest.mark.parametrize("seed", range(5))
def test_answers_that_end_by_themselves_are_valid(runtime, seed):
    answers_are_valid(runtime, seed, 10)


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_may_begin_with_another_one(runtime, seed):
    choices = ("left", "left turn", 'a "b"\n\\', "größer")
    answer = runtime.handle_request(request(choices=choices, temperature=2.0, seed=seed))
    assert answer.text in choices
    assert answer.grammar_complete is True


def test_a_grammar_keeps_letters_that_the_tokenizer_changes_in_prompts(runtime):
    """The tiny tokenizer writes prompts in lower case."""
    answer = runtime.handle_request(request(choices=["The Größe IS 7 \u212b"], max_tokens=60))
    assert (answer.text, answer.grammar_complete) == ("The Größe IS 7 \u212b", True)


def test_a_seed_reproduces_an_answer_and_another_one_does_not(runtime):
    texts = [runtime.handle_request(request(seed=seed, **PLAN)).text for seed in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_answers_do_not_depend_on_the_batch(runtime):
    requests = [request(**rules, seed=5) for rules in GRAMMARS]
    requests.append(request("what do you see?", max_tokens=30, temperature=1.2, seed=3, logprobs=2))
    alone = [runtime.handle_request(one) for one in requests]
    for chosen in ([3, 0], [1, 3, 2], [0, 1, 2, 3]):
        answers = runtime.handle_request([requests[index] for index in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            assert_same_answer(answer, alone[index])


def test_a_limit_in_the_middle_says_that_the_answer_is_not_complete(runtime):
    answer = runtime.handle_request(request(json_schema=SCHEMA, max_tokens=5))
    assert (answer.finish_reason, answer.grammar_complete) == ("length", False)
    assert len(answer.token_ids) == 5


def test_a_limit_at_the_end_says_that_the_answer_is_complete(runtime):
    answer = runtime.handle_request(request(regex="abc", max_tokens=3))
    assert (answer.text, answer.finish_reason, answer.grammar_complete) == ("abc", "length", True)


def test_an_answer_without_a_grammar_says_nothing_about_it(runtime):
    assert runtime.handle_request(request()).grammar_complete is None


@pytest.mark.parametrize("regex, complete", [("ab,cd", False), ("(ab)?,cd|ab", True)])
def test_the_text_before_a_stop_string_is_complete_or_not(runtime, tokenizer, regex, complete):
    for seed in range(30):
        answer = runtime.handle_request(request(regex=regex, stop=(",",), temperature=2.0, seed=seed))
        if answer.text == "ab" and tokenizer.encode(",")[0] in answer.token_ids:
            break
    assert (answer.text, answer.finish_reason, answer.grammar_complete) == ("ab", "stop", complete)
    assert len(answer.token_ids) == 3


def test_log_probabilities_are_those_of_the_allowed_tokens(runtime, tokenizer):
    answer = runtime.handle_request(request(regex="[ab]{4}", logprobs=5, temperature=1.0))
    allowed = {tokenizer.encode(letter)[0] for letter in "ab"}
    for entries in answer.logprobs[:4]:
        assert {token for token, _ in entries} == allowed
        assert sum(np.exp([value for _, value in entries])) == pytest.approx(1)
    assert {token for token, _ in answer.logprobs[4]} == set(runtime.config.stop_token_ids)


def test_streamed_texts_grow_to_the_answer(runtime):
    texts = []
    answer = runtime.handle_request(request(**WORD, on_progress=lambda progress: texts.append(progress.text)))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == answer.text
    assert len(texts) > 4


def test_trajectories_follow_a_complete_answer(acting_runtime):
    """The model's trigger token is allowed where the grammar is complete."""
    one = request(images=(IMAGE,), max_tokens=30, regex="[\\s\\S]{3}", action_samples=1, temperature=1.0)
    answer = acting_runtime.handle_request(one)
    assert (answer.finish_reason, answer.grammar_complete) == ("stop", True)
    triggered = answer.token_ids[-1] == acting_runtime.config.action.future_start_token_id
    assert (answer.actions is not None) == triggered


@pytest.fixture(scope="module")
def reduced(tiny_checkpoint, tiny_engine, tokenizer, tmp_path_factory, device):
    """A runtime with every second printable ASCII token, in falling order.

    "a" has a logit, "b" has none.
    """
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("reduced")
    first, stops = tokenizer.encode("a")[0] % 2, EngineConfig.load(tiny_engine).stop_token_ids
    ids = sorted({*range(first, 94, 2), *stops}, reverse=True)
    save_file({"vocab_map": np.array(ids, np.int32)}, directory / "map.safetensors")
    export(tiny_checkpoint, directory / "engine", vocab_map=directory / "map.safetensors")
    with LLMInferenceRuntime(directory / "engine", device, prefix_cache_bytes=0) as runtime:
        yield runtime


def test_a_reduced_vocabulary_writes_what_the_grammar_allows(reduced):
    answer = reduced.handle_request(request(regex="[a-f]{5}", temperature=1.0))
    assert re.fullmatch("[ace]{5}", answer.text)
    assert answer.grammar_complete is True


def test_a_grammar_that_allows_the_greedy_answer_does_not_change_it(reduced):
    for number in range(10):
        rules = {"max_tokens": 9, "repetition_penalty": 1.2, "logprobs": 2}
        free = reduced.handle_request(request(f"{number}", **rules))
        bound = reduced.handle_request(request(f"{number}", regex="[!-~]*", **rules))
        assert_same_bits(bound, free)


def test_an_answer_ends_where_the_vocabulary_lacks_a_byte(reduced):
    answer = reduced.handle_request(request(regex="acb"))
    assert (answer.text, answer.finish_reason, answer.grammar_complete) == ("ac", "stop", False)


def allowed_next(grammars: Grammars, regex: str, logits: int) -> list[int]:
    """Return the logit indices that are allowed at the beginning of an answer."""
    mask = np.zeros(-(-logits // 32), np.uint32)
    write_masks([grammars.start(SamplingParams(regex=regex).grammar)], [mask])
    return [i for i in range(32 * len(mask)) if mask[i // 32] >> np.uint32(i % 32) & 1]


def test_a_stop_token_that_is_a_letter_is_not_allowed_before_the_end(tokenizer):
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    grammars = Grammars(tokenizer, tokenizer.size, [a])
    assert allowed_next(grammars, "[ab]c", tokenizer.size) == [b]
    assert allowed_next(grammars, "([ab]c)?", tokenizer.size) == [a, b]


def test_tokens_beyond_the_logits_are_not_allowed(tokenizer):
    """The tokenizer may have more tokens than the model has logits."""
    last = tokenizer.encode("b")[0]
    assert last % 32  # the mask's last word has bits of no logit
    whole, cut = Grammars(tokenizer, last + 1, [0, 2]), Grammars(tokenizer, last, [0, 2])
    assert allowed_next(whole, "b", last + 1) == [last]
    assert allowed_next(cut, "b", last) == [0, 2]  # no token is left: the answer ends


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"regex": "("}, r"regex '\(' cannot be used: unclosed group"),
        ({"regex": "\ud800"}, r"regex '\\ud800' cannot be used: 'utf-8' codec"),
        ({"regex": 7}, "regex must be a string, got 7"),
        ({"regex": "(?=a)b"}, r"regex '\(\?=a\)b' cannot be used: look-around.* not supported"),
        ({"json_schema": {"type": "text"}}, "json_schema .* cannot be used: Invalid type: text"),
        ({"json_schema": {"not": {}}}, "json_schema .* cannot be used: Unimplemented keys"),
        ({"choices": "left"}, "choices must be a sequence of non-empty strings, got 'left'"),
        ({"choices": ("a", "")}, "choices must be a sequence of non-empty strings"),
        ({"choices": ("a",), "regex": "a"}, "an answer has regex or choices, not both"),
        ({"json_schema": "{}", "regex": "a"}, "an answer has json_schema or regex, not both"),
    ],
)
def test_bad_grammars_are_refused_in_one_line_that_names_them(rules, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        SamplingParams(**rules)
    assert "\n" not in str(refused.value)


def test_without_the_library_a_grammar_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"^choices needs llguidance.*pip install 'edgellm\[grammar\]'$"):
        SamplingParams(choices=("a", "b"))
    assert SamplingParams(max_tokens=3).grammar is None


def test_an_answer_does_not_depend_on_the_states_of_earlier_ones(runtime, monkeypatch):
    """Each answer needs more than half of the states that a compiled grammar may have."""
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=1000)
    monkeypatch.setattr("edgellm_ros.runtime.grammar.library._limits", lambda: limits)
    growing = "|".join(f"([\\s\\S]*{chr(97 + i)}[\\s\\S]{{{i * 9 + 10}}}z)" for i in range(10))
    rules = {"regex": growing, "temperature": 2.0, "max_tokens": 60}
    answers = [runtime.handle_request(request(seed=1, **rules)) for _ in range(2)]
    runtime.handle_request([request(seed=seed, **rules) for seed in (2, 3)])
    answers.append(runtime.handle_request(request(seed=1, **rules)))
    for answer in answers:
        assert len(answer.token_ids) == 60
        assert_same_bits(answer, answers[0])


def test_a_request_is_cancelled_while_its_grammar_is_compiled(runtime, monkeypatch):
    cancel, stages, compiling = threading.Event(), [], threading.Event()

    def report(progress):
        stages.append(progress.stage)
        cancel.set()

    monkeypatch.setattr("edgellm_ros.runtime.grammar.grammar.compile_grammar", lambda *_: compiling.wait(20))
    answer = runtime.handle_request(request(regex="a", on_progress=report, cancel=cancel))
    compiling.set()
    assert stages == ["grammar"]
    assert (answer.finish_reason, answer.grammar_complete, answer.text) == ("cancelled", False, "")


def test_others_of_a_batch_go_on_when_a_grammar_is_cancelled(runtime, monkeypatch):
    from edgellm_ros.runtime.grammar import grammar

    cancel, compiling, compiled = threading.Event(), threading.Event(), grammar.compile_grammar

    def compile_one(rule, vocabulary):
        return compiling.wait(20) if rule.text == "slow" else compiled(rule, vocabulary)

    monkeypatch.setattr(grammar, "compile_grammar", compile_one)
    slow = request(regex="slow", on_progress=lambda progress: cancel.set(), cancel=cancel)
    answers = runtime.handle_request([slow, request(regex="abc")])
    compiling.set()
    assert [answer.finish_reason for answer in answers] == ["cancelled", "stop"]
    assert answers[1].text == "abc"
