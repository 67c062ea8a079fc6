# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding from the command line."""

import json

import pytest

from edgellm_ros.cli.bench import round_seconds
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.refusal import assert_refused
from fixtures.requests_for_tests import request

PROMPT = ("--prompt", "abc abc abc", "--max-tokens", 20)


def test_drafting_gives_the_same_answer_and_says_what_it_saved(edgellm, tiny_engine):
    plain = edgellm("generate", tiny_engine, *PROMPT, "--json").json
    told = edgellm("generate", tiny_engine, *PROMPT, "--json", "--drafting", "lookup", "--draft-steps", 5)
    assert told.code == 0
    assert told.json["token_ids"] == plain["token_ids"]
    assert 1 <= told.json["tokens_per_verification"] <= 6
    assert "tokens_per_verification" not in plain


def test_people_who_ask_are_told_what_drafting_saved(edgellm, tiny_engine):
    drafted = *PROMPT, "--drafting", "lookup"
    assert "drafted" not in edgellm("generate", tiny_engine, *drafted).err
    told = edgellm("generate", tiny_engine, *drafted, "--verbose")
    assert "[drafted by lookup: " in told.err
    assert "runs of the model verified drafts and gave" in told.err
    plain = edgellm("generate", tiny_engine, *PROMPT, "--drafting", "off", "--verbose")
    assert "[not drafted: one token per run of the model]" in plain.err


def test_files_of_requests_are_answered_with_drafting(edgellm, tiny_engine, tmp_path):
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps([{"prompt": "abc abc abc"}, {"prompt": "stop"}]))
    arguments = ("--requests", requests, "--out", tmp_path / "answers.json", "--max-tokens", 12, "--json")
    told = edgellm("generate", tiny_engine, *arguments, "--drafting", "lookup")
    assert told.json["tokens_per_verification"] >= 1
    drafted = json.loads((tmp_path / "answers.json").read_text())
    edgellm("generate", tiny_engine, *arguments)
    plain = json.loads((tmp_path / "answers.json").read_text())
    assert [one["token_ids"] for one in drafted] == [one["token_ids"] for one in plain]


def test_bench_reports_the_tokens_per_verification(edgellm, tiny_engine):
    options = ("--runs", 1, "--warmup", 0, "--max-tokens", 8, "--drafting", "lookup")
    told = edgellm("bench", tiny_engine, *options)
    assert told.json["drafting"] == "lookup"
    assert told.json["tokens_per_verification"] >= 1


def test_bench_measures_the_parts_of_rounds(tiny_engine):
    drafting = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
    with LLMInferenceRuntime(tiny_engine, drafting=drafting) as runtime:
        parts = round_seconds(runtime, request("abc abc abc", max_tokens=20))
    assert parts is not None
    assert set(parts) == {"draft", "verify", "accept"}
    assert min(parts.values()) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--drafting", "eagle"), "this engine has no draft head"),
        (
            ("--draft-steps", "3", "--drafting", "off"),
            "--draft-steps needs --drafting auto, eagle, mtp, dflash, lookup",
        ),
        (("--draft-steps", "3"), "drafting_step is for drafting, and this engine has no draft head"),
        (("--drafting", "lookup", "--draft-top-k", "3"), "--draft-top-k is for --drafting eagle and mtp"),
        (("--drafting", "eagle", "--draft-top-k", "0"), "at least 1"),
        (("--drafting", "lookup", "--draft-steps", "80", "--verify-tree-size", "80"), "at most 61 tokens"),
        (("--drafting", "guess"), "guess"),
    ],
)
def test_bad_options_are_refused(edgellm, tiny_engine, arguments, words):
    assert_refused(edgellm("generate", tiny_engine, *PROMPT, *arguments), words)
