# SPDX-License-Identifier: Apache-2.0
"""The benchmark of speculative decoding, with a model that is small."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from benchmarks import speculation
from benchmarks.decode_runs import make_requests
from benchmarks.forced_acceptance import path_with_siblings, rounds
from benchmarks.kernel_profile import Event
from benchmarks.model_shapes import SHAPES, parse_shape
from benchmarks.random_head import head_config, head_shapes, write_head
from benchmarks.speculation_runs import Contender, parse_setting, stages_of
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from fixtures.random_head import base_config, write_random_head

SMALL = (
    "qwen3-0.6b,hidden_size=64,intermediate_size=96,num_hidden_layers=3,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=16,vocab_size=300"
)
CONTEXT, TOKENS = 20, 13


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def printed(device_arguments, directory) -> tuple[dict, str]:
    given = {
        "--shape": SMALL,
        "--precision": "fp32",
        "--context": CONTEXT,
        "--tokens": TOKENS,
        "--runs": 2,
        "--batch": "1,2",
        "--settings": "chain3,tree2/2/5,lookup2",
        "--acceptance": "1,2.4,4",
        "--directory": directory,
    }
    with redirect_stdout(StringIO()) as output:
        options = [str(part) for pair in given.items() for part in pair]
        found = speculation.main([*options, *device_arguments])
    return found, output.getvalue()


@pytest.fixture(scope="module")
def settings(printed) -> list[dict]:
    return [figures for batch in printed[0]["batches"] for figures in batch["settings"]]


@pytest.mark.slow
def test_the_last_line_is_the_result_as_json(printed):
    result, output = printed
    assert json.loads(output.splitlines()[-1]) == {"benchmark": "speculation", **result}


@pytest.mark.slow
def test_a_verification_yields_as_many_tokens_as_were_forced(settings):
    forced = [(figures["setting"], figures["forced_tokens_per_verification"]) for figures in settings]
    each = [("chain3", 1), ("chain3", 2.4), ("chain3", 4)]
    each += [(name, rate) for name in ("tree2/2/5", "lookup2") for rate in (1, 2.4)]
    assert forced == 2 * each
    for figures in settings:
        assert figures["acceptance"] == "forced"
        assert figures["tokens_per_verification"] == figures["forced_tokens_per_verification"]
        assert figures["vanilla_steps"] == 0


@pytest.mark.slow
def test_forced_tokens_are_those_that_the_sampler_chooses_by_itself(settings):
    for figures in settings:
        assert figures["own_tokens"] == 1
        assert figures["same_answers"] == figures["answers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["chain3", "tree2/2/5", "lookup2"])
def test_forced_tokens_are_taken_where_the_sampler_chooses_others(setting, printed, directory, device):
    contender = Contender(setting, directory / "engine", device, parse_setting(setting), forces=True)
    requests, answer = make_requests(1, CONTEXT, TOKENS), [7 * i % 250 for i in range(TOKENS)]
    contender.kernels.force([CONTEXT], [answer], rate=2)
    with contender.runtime:
        run = contender.run([requests])
    assert run.token_ids[0][1:] == answer[1:]  # the first token is of the prefill
    assert run.verified_tokens == 2 * run.verified_trees == TOKENS - 1


@pytest.mark.slow
def test_a_setting_that_fails_is_left_out_of_the_comparison(tiny_checkpoint, tmp_path, device_arguments):
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    prompts = tmp_path / "prompts"
    prompts.write_text("stop")
    settings = "tree41/1/3,lookup2"  # the head has a vocabulary of 40
    options = ["--checkpoint", tiny_checkpoint, "--head", head, "--prompts", prompts, "--settings", settings]
    result = speculation.main([*map(str, options), "--runs", "1", "--tokens", "4", *device_arguments])
    assert "drafting_top_k 41 exceeds" in result["errors"]["tree41/1/3"]
    assert [figures["setting"] for figures in result["batches"][0]["settings"]] == ["lookup2"]


@pytest.mark.slow
def test_a_block_drafter_has_one_level_and_the_forced_acceptance(tmp_path, device_arguments):
    options = ["--shape", SMALL, "--precision", "fp32", "--context", CONTEXT, "--tokens", TOKENS, "--runs", 1]
    options += ["--settings", "dflash4", "--acceptance", 2.4, "--directory", tmp_path]
    result = speculation.main([*map(str, options), *device_arguments])
    ((figures,),) = (batch["settings"] for batch in result["batches"])
    assert figures["tokens_per_verification"] == 2.4
    assert figures["own_tokens"] == 1
    assert len(figures["stages_ms_synchronised_no_graphs"]["draft_levels"]) == 1


@pytest.mark.slow
def test_ratios_follow_from_the_times(printed):
    for batch in printed[0]["batches"]:
        off = batch["off"]
        for figures in batch["settings"]:
            assert figures["times_vanilla"] == pytest.approx(off["token_ms"] / figures["token_ms"])
            assert figures["pays_from"] == pytest.approx(figures["round_ms"] / off["step_ms"])


@pytest.mark.slow
def test_each_level_of_a_draft_is_a_stage(settings):
    stages = {figures["setting"]: figures["stages_ms_synchronised_no_graphs"] for figures in settings}
    assert {name: len(found["draft_levels"]) for name, found in stages.items()} == {
        "chain3": 3,
        "tree2/2/5": 2,
        "lookup2": 0,
    }
    for found in stages.values():
        assert all(found[stage] > 0 for stage in ("tree", "verify", "accept"))
        assert all(each > 0 for each in found["draft_levels"])


@pytest.mark.slow
def test_a_checkpoint_and_its_head_have_their_real_acceptance(tiny_checkpoint, tmp_path, device_arguments):
    head = write_random_head(tmp_path / "head", base_config(tiny_checkpoint))
    prompts = tmp_path / "prompts"
    prompts.write_text("go to the red box\n\nstop\n")
    options = ["--checkpoint", tiny_checkpoint, "--head", head, "--prompts", prompts, "--settings", "chain2"]
    result = speculation.main([*map(str, options), "--runs", "1", "--tokens", "6", *device_arguments])
    ((figures,),) = (batch["settings"] for batch in result["batches"])
    assert (result["acceptance"], figures["acceptance"]) == ("real", "real")
    assert figures["same_answers"] == figures["answers"] == 2
    assert 1 <= figures["tokens_per_verification"] <= 3


@pytest.mark.slow
def test_scenes_are_different_commands_with_a_frame_and_a_history():
    requests = speculation.scene_requests(5, tokens=6)
    assert len({request.prompt for request in requests}) > 1
    assert len({request.images[0].tobytes() for request in requests}) == 5
    assert all(request.history is not None and request.sampling.max_tokens == 6 for request in requests)


@pytest.mark.parametrize(
    ("tokens", "rate", "counts"),
    [(5, 1, [1] * 5), (10, 2.5, [2, 3, 2, 3]), (7, 3, [3, 3, 1]), (2, 4, [2])],
)
def test_verifications_yield_the_rate_on_average(tokens, rate, counts):
    assert rounds(tokens, rate, most=4) == counts


@pytest.mark.parametrize("rate", [0.5, 4.1])
def test_a_rate_that_a_verification_cannot_yield_is_refused(rate):
    with pytest.raises(ValueError, match="expected 1 to 4"):
        rounds(10, rate, most=4)


def test_stages_are_the_times_between_their_kernels():
    copy = "Memcpy DtoH (Device -> Pinned)"
    names = ["gemm", "add_candidates", "gemm", "add_candidates", "select_tree", "gemm", "sample_path", copy]
    starts = [2, 4, 6, 8, 10, 12, 20, 30]
    rounds = [Event(copy, 0, 1)]
    for first in (0, 30):
        rounds += [Event(name, first + at, first + at + 1) for name, at in zip(names, starts, strict=True)]
    stages = stages_of(rounds)
    assert stages["draft_levels"] == pytest.approx([4e-3, 4e-3])
    assert (stages["tree"], stages["verify"]) == pytest.approx((2e-3, 9e-3))
    assert stages["accept"] == pytest.approx(11e-3)


def test_a_forced_tree_has_the_path_first_and_then_siblings_of_its_nodes():
    parents, depths = path_with_siblings(6, 3)
    assert parents.tolist() == [-1, 0, 1, 2, 0, 1]
    assert depths.tolist() == [0, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chain3", SpecDecodeDraftingConfig(1, 3, 4, falls_back=False)),
        ("tree8/4/16", SpecDecodeDraftingConfig(8, 4, 16, falls_back=False)),
        ("lookup7", SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)),
    ],
)
def test_a_setting_is_read_from_its_name(text, expected):
    assert parse_setting(text) == expected


def test_a_random_head_has_the_size_of_a_published_one():
    config = head_config(SHAPES["qwen3-1.7b"])
    shapes = head_shapes(config, {"hidden_size": 2048}, config["draft_vocab_size"])
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(137e6, rel=0.05)


def test_a_random_head_is_written_again_only_for_other_weights(tmp_path):
    shape = parse_shape(SMALL)

    def written(seed: int) -> bytes:
        return (write_head(tmp_path, shape, "fp32", seed) / "model.safetensors").read_bytes()

    first, stamp = written(0), (tmp_path / "config.json").stat().st_mtime_ns
    assert written(0) == first
    assert (tmp_path / "config.json").stat().st_mtime_ns == stamp
    assert written(1) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "bush3"], "expected chainN, mtpN, dflashN, treeK/N/M or lookupN"),
        (["--acceptance", "0.5"], "expected a number from 1"),
        (["--head", "somewhere"], "need --checkpoint"),
        (["--profile"], "--device cuda"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        speculation.main(arguments)
    assert message in capsys.readouterr().err
