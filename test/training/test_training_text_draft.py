# SPDX-License-Identifier: Apache-2.0
"""The command that trains an EAGLE-3 head for a text model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.counted_time import CountedTime  # noqa: E402
from fixtures.draws import only_with_all_draws  # noqa: E402
from fixtures.published_checkpoint import write_published_checkpoint  # noqa: E402
from fixtures.requests_for_tests import request  # noqa: E402
from training import text_draft  # noqa: E402
from training.draft_rounds import Drafting, rounds_of  # noqa: E402
from training.eagle import DraftDims, DraftHead, load_head  # noqa: E402
from training.own_texts import Texts, Turns, Writer, load_model  # noqa: E402
from training.questions import Questions  # noqa: E402
from training.text_rows import lesson_of, state_layers  # noqa: E402
from training.text_score import UNSEEN, answered, kind_of  # noqa: E402

LIMITS = {"max_input_len": 64, "max_kv_cache_capacity": 192}
COMMAND = (
    "--minutes 0.3 --texts 64 --tokens 120 --write-batch 32 --batch 8 --steps 3 --intermediate 64 "
    "--score-tokens 8"
)
QUESTIONS = ("go to the red box", "stop", "turn left")
TOKENS = 60
CHAIN = Drafting(1, 3, 4)
READING = 0.05  # seconds from one reading of the clock to the next, of which a step has four


def train(checkpoint: Path, out: Path, *arguments: str) -> str:
    """Run the command with as many steps on every computer; return what it prints."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(text_draft, "time", CountedTime(READING))
        text_draft.main(["--checkpoint", str(checkpoint), "--out", str(out), *COMMAND.split(), *arguments])
    return told.getvalue()


@pytest.fixture(scope="module")
def monotonous(tmp_path_factory):
    """A model whose texts repeat themselves."""
    return write_published_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", num_hidden_layers=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose texts have many tokens."""
    directory = tmp_path_factory.mktemp("model") / "checkpoint"
    return write_published_checkpoint(directory, num_hidden_layers=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory) -> tuple[Path, str]:
    """A head for this model, and what the command prints."""
    out = tmp_path_factory.mktemp("head")
    return out, train(checkpoint, out, "--bf16", "--vocabulary", "128", "--minutes", "0.15")


def test_the_command_trains_and_scores_a_head(trained):
    _, printed = trained
    losses = [float(each) for each in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < 0.9 * losses[0]
    assert 0 <= float(re.findall(r"agreement (\S+)", printed)[-1]) <= 1
    assert re.search(r"^128 draft tokens cover \d+\.\d+% of the answers' tokens$", printed, re.MULTILINE)
    for name in ("unseen, chat", "unseen, code", "unseen, summaries", "made", "unseen, all"):
        assert re.search(rf"^{name}, \d+ tokens: chain of 1 \d\.\d\d, ", printed, re.MULTILINE), name


@only_with_all_draws
def test_a_trained_head_drafts_what_the_model_writes(monotonous, tmp_path):
    printed = train(monotonous, tmp_path / "head")
    losses = [float(each) for each in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < 0.6 * losses[0]
    export(monotonous, tmp_path / "engine", draft=tmp_path / "head", **LIMITS)
    assert EngineConfig.load(tmp_path / "engine").draft.kind == "eagle"
    with (
        LLMInferenceRuntime(tmp_path / "engine", "cpu", drafting=None) as plain,
        LLMInferenceRuntime(tmp_path / "engine", "cpu") as drafting,
    ):
        for question in QUESTIONS:
            one = request(question, max_tokens=TOKENS)
            assert drafting.handle_request(one).token_ids == plain.handle_request(one).token_ids
        metrics = drafting.spec_decode_generation_metrics
    assert metrics.strategy == "eagle"
    assert metrics.tokens_per_verification > 2


def test_the_runtime_yields_the_tokens_of_the_score(checkpoint, trained, tmp_path):
    """States, positions and embeddings are the same in training and in the runtime."""
    out, _ = trained
    model, tokenizer = load_model(checkpoint, "cpu")
    head, layers = load_head(out)
    answers = answered(model, tokenizer, layers, list(QUESTIONS), TOKENS)
    with torch.no_grad():
        tokens, rounds = rounds_of(head, model.get_input_embeddings().weight, answers, CHAIN)
    assert tokens > 1.05 * rounds
    export(checkpoint, tmp_path / "engine", draft=out, **LIMITS)
    chain = SpecDecodeDraftingConfig(CHAIN.top_k, CHAIN.steps, CHAIN.rows, falls_back=False)
    with LLMInferenceRuntime(tmp_path / "engine", drafting=chain) as runtime:
        for row, question in enumerate(QUESTIONS):
            found = runtime.handle_request(request(question, max_tokens=TOKENS)).token_ids
            expected = answers.ids[row, answers.prompt[row] : answers.length[row]].tolist()
            assert list(found) == expected[: len(found)]
        metrics = runtime.spec_decode_generation_metrics
    assert metrics.tokens_per_verification == pytest.approx(tokens / rounds, rel=0.01)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_texts_are_those_of_transformers(tmp_path, model_type):
    """Texts longer than a sliding window, in a second batch of the writer."""
    directory = tmp_path / "checkpoint"
    write_published_checkpoint(directory, model_type, tie_word_embeddings=False)
    model, tokenizer = load_model(directory, "cpu")
    turns = Turns.of(tokenizer)
    length = 56
    writer = Writer(model, turns, 2, length)
    writer.write([None, None], torch.ones(2))
    asked = [tokenizer(text, add_special_tokens=False).input_ids for text in ("go", "turn to the left")]
    texts = writer.write(asked, torch.zeros(2))
    for ids, question, answers in zip(texts.ids, asked, texts.answers, strict=True):
        given = [*turns.start, *question, *turns.middle]
        assert ids[: len(given)].tolist() == given
        assert answers.int().argmax() == len(given) - 1
        likely = model(ids[None], use_cache=False).logits[0, len(given) - 1 : -1].argmax(-1)
        greedy = answers[len(given) - 1 : -1]  # where the token before belongs to an answer
        assert greedy.sum() > 4
        assert likely[greedy].equal(ids[len(given) :][greedy])


def test_answers_end_with_their_end_token(checkpoint):
    """Turns follow from the text alone, whoever wrote it."""
    model, tokenizer = load_model(checkpoint, "cpu")
    turns = Turns.of(tokenizer)
    asked = [tokenizer(text, add_special_tokens=False).input_ids for text in QUESTIONS]
    assert len(turns.middle) > 1
    torch.manual_seed(0)
    texts = Writer(model, turns, 16, 120).write([*asked * 4, *[None] * 4], torch.ones(16))
    ends = (texts.ids == turns.end_of_answer).sum(1)
    assert ends[:12].max() > ends[:12].min() > 0
    for ids, answers in zip(texts.ids.tolist(), texts.answers.tolist(), strict=True):
        state = False
        for place, (token, found) in enumerate(zip(ids, answers, strict=True)):
            if place >= len(turns.start):
                newest = ids[: place + 1][-len(turns.middle) :]
                state = token != turns.end_of_answer if state else newest == turns.middle
            assert found == state, place
    assert (texts.answers[:12].any(1)).all()


def test_a_hot_text_differs_and_a_cold_one_does_not(checkpoint):
    model, tokenizer = load_model(checkpoint, "cpu")
    turns = Turns.of(tokenizer)
    question = tokenizer("go", add_special_tokens=False).input_ids
    torch.manual_seed(0)
    texts = Writer(model, turns, 4, 60).write([question] * 4, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert texts.ids[0].equal(texts.ids[1])
    assert not texts.ids[2].equal(texts.ids[3])


@torch.no_grad()
def test_each_of_the_three_states_has_a_norm():
    generator = torch.Generator().manual_seed(0)
    dims = DraftDims(8, 16, 2, 1, 4, 1e-5, 32, 16, fc_norm=True)
    head, states = DraftHead(dims, torch.arange(16)), torch.randn(2, 3, 24, generator=generator)
    norms = [LlamaRMSNorm(8, eps=1e-5) for _ in range(3)]
    for norm, ours in zip(norms, head.fc_norm, strict=True):
        norm.weight.copy_(torch.rand(8, generator=generator))
        ours.weight.copy_(norm.weight)
    parts = [norm(part) for norm, part in zip(norms, states.split(8, -1), strict=True)]
    torch.testing.assert_close(head.fuse(states), torch.cat(parts, -1) @ head.fc.weight.T)


@torch.no_grad()
def test_a_lesson_asks_for_the_tokens_of_answers(checkpoint):
    """Step 0 of the first start predicts the token two places behind the first row."""
    model, _ = load_model(checkpoint, "cpu")
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 10:20] = True
    layers = state_layers(4, None)
    head = text_draft.new_head(
        text_draft.parse(["--checkpoint", "a", "--out", "b"]), model, layers, torch.arange(0, 302, 2)
    )
    lesson = lesson_of(model, head, layers, Texts(ids, answers), 5)
    out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(lesson.wanted, out.logits[:, 6:-1, ::2])
    torch.testing.assert_close(lesson.rows.states[..., :64], out.hidden_states[1][:, :-1])
    torch.testing.assert_close(lesson.rows.embeddings, out.hidden_states[0][:, 1:])
    even = out.logits[:, 6:-1].argmax(-1) % 2 == 0
    assert lesson.valid.equal(answers[:, 6:-1] & even)


def test_questions_are_none_of_the_unseen_ones():
    unseen = set(UNSEEN.read_text().splitlines())
    made = Questions(0).make(3000, ["Bees find flowers. They dance."])
    assert not unseen & set(made)
    assert {kind_of(question) for question in unseen} == {"chat", "code", "summaries"}
    assert sum("Bees" in question for question in made) == pytest.approx(750, rel=0.2)
    assert len(set(made)) > 1500


def test_passages_are_sentences_of_answers(checkpoint):
    _, tokenizer = load_model(checkpoint, "cpu")
    turns = Turns.of(tokenizer)
    words = "the robot drives to the red box. " * 6
    prompt, answer = turns.start + turns.middle, tokenizer(words, add_special_tokens=False).input_ids
    ids = torch.tensor(prompt + answer + [turns.end_of_answer] + answer)
    answers = (torch.arange(len(ids)) >= len(prompt) - 1) & (torch.arange(len(ids)) < len(prompt + answer))
    (passage,) = text_draft.passages_of(Texts(ids[None], answers[None]), turns, tokenizer, Random(0))
    assert passage == words.strip()
    assert (
        text_draft.passages_of(Texts(ids[None, :40], answers[None, :40]), turns, tokenizer, Random(0)) == []
    )


class Listener(Writer):
    """Keeps the questions that it is asked."""

    def write(self, questions, temperatures):
        self.asked = questions
        return super().write(questions, temperatures)


def test_a_questions_kind_is_independent_of_who_asks(checkpoint):
    model, tokenizer = load_model(checkpoint, "cpu")
    turns = Turns.of(tokenizer)
    writer = Listener(model, turns, 400, len(turns.start) + 2)
    text_draft.write_texts(writer, tokenizer, 1, 0.0, seed=0)
    given = [tokenizer.decode(ids) for ids in writer.asked if ids is not None]
    assert len(given) == pytest.approx(400 * (1 - text_draft.OWN_QUESTIONS), rel=0.2)
    assert sum(kind_of(question) == "code" for question in given) == pytest.approx(len(given) / 3, rel=0.3)


def test_no_head_is_saved_without_a_step():
    args = text_draft.parse(["--checkpoint", "a", "--out", "b", "--batch", "2"])
    head = DraftHead(DraftDims(8, 16, 2, 1, 4, 1e-5, 32, 16), torch.arange(16))
    texts = Texts(torch.zeros(4, 16, dtype=torch.int64), torch.ones(4, 16, dtype=torch.bool))
    with pytest.raises(SystemExit, match="no time is left for a step"):
        text_draft.train(args, head, texts, pytest.fail, 0.0, lambda: pytest.fail("saved"))


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "<s>{{ messages[1].content }}"])
def test_a_template_without_turns_is_refused(checkpoint, template):
    _, tokenizer = load_model(checkpoint, "cpu")
    tokenizer.chat_template = template
    with pytest.raises(SystemExit, match="chat template: expected text before and after the user's"):
        Turns.of(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--texts", "0"), "--texts: expected a whole number from 1, got 0"),
        (("--minutes", "0"), "--minutes: expected a number above 0, got 0"),
        (("--minutes", "long"), "--minutes: expected a number above 0, got long"),
        (("--layers", "3,2,1"), "--layers: expected three rising layers such as 2,15,27, got 3,2,1"),
        (("--layers", "1,x,2,3"), "--layers: expected three rising layers such as 2,15,27, got 1,x,2,3"),
        (("--score",), "--out head: expected a head (config.json and model.safetensors) to --score"),
        (("--tokens", "7"), "--tokens 7: expected more than --steps 6 and one"),
    ],
)
def test_bad_options_are_refused(capsys, arguments, words):
    with pytest.raises(SystemExit):
        text_draft.main(["--checkpoint", "model", "--out", "head", *arguments])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "--checkpoint /nowhere",
            "--checkpoint /nowhere: expected a directory with config.json, or a GGUF file",
        ),
        (
            "--minutes 0.0001 --texts 16 --tokens 40",
            "--minutes 0.0001: writing 16 texts has taken all of them",
        ),
        ("--texts 15 --batch 8 --tokens 40", "--texts 15: expected twice --batch 8 or more"),
        ("--layers 1,2,4", "--layers 4: the model has the layers 0 to 3"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(checkpoint, tmp_path, arguments, words):
    with pytest.raises(SystemExit, match=f"^{re.escape(words)}$"):
        text_draft.main(
            ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "head"), *arguments.split()]
        )
    assert not (tmp_path / "head").exists()
