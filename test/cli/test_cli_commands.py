# SPDX-License-Identifier: Apache-2.0
"""What the subcommands answer when all is well."""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgellm_ros.cli import make_parser
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.random_head import base_config, write_random_head
from fixtures.tiny_adapter import write_adapter

REQUEST = ["--prompt", "go to the red box", "--max-tokens", 8]


def without_times(answer: dict) -> dict:
    return {key: value for key, value in answer.items() if key != "metrics"}


def test_generate_prints_the_text_on_standard_output_and_the_rest_elsewhere(edgellm, tiny_engine, image):
    told = edgellm("generate", tiny_engine, "--image", image, *REQUEST)
    known = edgellm("generate", tiny_engine, "--image", image, *REQUEST, "--json").json
    assert told.code == 0
    assert told.out == known["text"] + "\n"
    assert f"{known['prompt_tokens']} prompt tokens" in told.err


def test_generate_json_has_the_whole_answer(edgellm, tiny_engine, image):
    answer = edgellm("generate", tiny_engine, "--image", image, *REQUEST, "--json").json
    assert set(answer) == {
        "text", "token_ids", "finish_reason", "prompt_tokens", "steps", "actions", "paths", "noise_seed",
        "lora", "metrics",
    }  # fmt: skip
    assert len(answer["token_ids"]) == 8
    assert answer["steps"] == 7
    assert answer["finish_reason"] == "length"
    assert {"vision_s", "prefill_s", "decode_s", "action_s", "total_s", "first_token_s"} <= set(
        answer["metrics"]
    )


def test_an_engine_with_extras_answers(edgellm, tiny_checkpoint, tmp_path):
    path = tmp_path / "map.safetensors"
    save_file({"vocab_map": np.array([258, 269, *range(10, 60)])}, path)
    extras = ["--vocab-map", path, "--hidden-states", "3,1", "--lm-head-input"]
    assert edgellm("export", tiny_checkpoint, tmp_path / "engine", *extras).code == 0
    answer = edgellm("generate", tmp_path / "engine", *REQUEST, "--json").json
    assert set(answer["token_ids"]) <= {258, 269, *range(10, 60)}
    shown = edgellm("inspect", tmp_path / "engine").out
    assert "vocabulary 302, 52 to answer with" in shown
    assert "hidden_states_1..3" in shown
    assert "lm_head.weight" in shown


@pytest.mark.slow
def test_adapters_of_the_checkpoint_go_with_the_engine(edgellm, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    for name, rank in (("polite", 3), ("german", 6)):
        write_adapter(checkpoint / "lora" / name, checkpoint, seed=rank, r=rank)
    engine = tmp_path / "engine"
    assert edgellm("export", checkpoint, engine).code == 0
    report = edgellm("inspect", engine, "--json").json
    assert report["config"]["builder"]["max_lora_rank"] == 6
    assert [(adapter["name"], adapter["rank"], adapter["modules"]) for adapter in report["adapters"]] == [
        ("german", 6, 21),
        ("polite", 3, 21),
    ]
    assert "up to rank 6; german (rank 6), polite (rank 3)" in edgellm("inspect", engine).out
    answers = {
        name: edgellm("generate", engine, *REQUEST, "--json", "--lora", name).json
        for name in ("", "base", "german", "polite", f"mine={checkpoint / 'lora' / 'german'}")
    }
    assert [answer["lora"] for answer in answers.values()] == ["", "", "german", "polite", "mine"]
    german, mine = (
        answers["german"]["token_ids"],
        answers[f"mine={checkpoint / 'lora' / 'german'}"]["token_ids"],
    )
    assert german == mine
    assert german != answers["polite"]["token_ids"] != answers[""]["token_ids"]

    assert edgellm("export", checkpoint, tmp_path / "without", "--max-lora-rank", 0).code == 0
    assert not (tmp_path / "without" / "lora").exists()
    assert edgellm("inspect", tmp_path / "without", "--json").json["adapters"] == []


def test_the_same_request_gives_the_same_answer(edgellm, tiny_engine, image):
    arguments = [
        "generate",
        tiny_engine,
        "--image",
        image,
        *REQUEST,
        "--temperature",
        1,
        "--seed",
        7,
        "--json",
    ]
    first, second = edgellm(*arguments).json, edgellm(*arguments).json
    other = edgellm(*arguments, "--seed", 8).json
    assert without_times(first) == without_times(second)
    assert first["token_ids"] != other["token_ids"]


def test_logprobs_are_given_when_asked_for(edgellm, tiny_engine):
    answer = edgellm("generate", tiny_engine, *REQUEST, "--logprobs", 3, "--json").json
    for token, likeliest in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert likeliest[0][0] == token  # greedy
        values = [value for _, value in likeliest]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1


def test_stream_prints_the_text_as_it_comes(edgellm, tiny_engine):
    whole = edgellm("generate", tiny_engine, *REQUEST)
    streamed = edgellm("generate", tiny_engine, *REQUEST, "--stream")
    assert streamed.out == whole.out
    beside_json = edgellm("generate", tiny_engine, *REQUEST, "--stream", "--json")
    assert beside_json.out.count("\n") == 1
    assert beside_json.err == whole.out


@pytest.mark.parametrize("suffix", [".json", ".npy", ".csv"])
def test_history_changes_what_the_model_is_told(edgellm, tiny_engine, tmp_path, suffix):
    poses = [[-0.3, 0.0, 0.0], [-0.2, 0.0, 0.0], [-0.1, 0.0, 0.0], [0.0, 0.0, 0.0]]
    path = tmp_path / f"poses{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(poses))
    elif suffix == ".npy":
        np.save(path, np.array(poses))
    else:
        path.write_text("\n".join(",".join(map(str, pose)) for pose in poses))
    arguments = ["generate", tiny_engine, *REQUEST, "--logprobs", 1, "--json"]
    standing, driving = edgellm(*arguments).json, edgellm(*arguments, "--history", path).json
    assert standing["prompt_tokens"] == driving["prompt_tokens"]
    assert standing["logprobs"] != driving["logprobs"]


@pytest.mark.slow
def test_a_command_to_the_arena_model_gives_words_and_trajectories(edgellm, arena_engine, tmp_path):
    from edgellm_arena.episodes.episode import World, make_episode

    world = World(make_episode(11))
    path = tmp_path / "frame.npy.png"
    import cv2

    cv2.imwrite(str(path), world.camera()[:, :, ::-1])
    arguments = ["generate", arena_engine, "--image", path, "--prompt", world.episode.command.text, "--json"]
    arguments += ["--drafting", "off"]  # drafting pauses by the clock, so two runs may take different steps
    one = edgellm(*arguments).json
    assert one["finish_reason"] == "stop"
    assert np.shape(one["actions"]) == (1, 40, 2)
    assert np.shape(one["paths"]) == (1, 41, 4)
    assert without_times(edgellm(*arguments).json) == without_times(one)
    several = edgellm(*arguments, "--action-samples", 3, "--noise-seed", 5, "--denoise-steps", 4).json
    assert several["noise_seed"] == 5
    assert several["token_ids"] == one["token_ids"]
    assert np.shape(several["actions"]) == (3, 40, 2)
    assert edgellm(*arguments, "--action-samples", 0).json["actions"] is None


def test_inspect_shows_config_bindings_and_memory(edgellm, tiny_engine):
    shown = edgellm("inspect", tiny_engine, "--verify")
    assert shown.code == 0
    assert "inputs_embeds" in shown.out
    assert "KV cache" in shown.out
    report = edgellm("inspect", tiny_engine, "--json").json
    assert report["config"]["llm"]["hidden_size"] == 48
    assert [part["name"] for part in report["parts"]] == ["llm", "visual", "audio", "action"]


def test_export_writes_an_engine_directory(edgellm, tiny_checkpoint, tmp_path):
    run = edgellm("export", tiny_checkpoint, tmp_path / "engine", "--max-batch-size", 2, "--json")
    assert run.code == 0
    assert "llm/model.onnx" in run.json["files"]
    assert edgellm("inspect", tmp_path / "engine", "--json").json["config"]["builder"]["max_batch_size"] == 2


@pytest.mark.slow
def test_a_checked_export_shows_what_the_export_then_writes(edgellm, tiny_checkpoint, tmp_path):
    arguments = ("export", tiny_checkpoint, tmp_path / "engine", "--max-batch-size", 2)
    shown = edgellm(*arguments, "--check")
    assert shown.code == 0
    assert "KV cache of a sequence" in shown.out
    checked = edgellm(*arguments, "--check", "--json").json
    assert not (tmp_path / "engine").exists()
    assert checked["files"] == edgellm(*arguments, "--json").json["files"]
    assert checked["memory"] == edgellm("inspect", tmp_path / "engine", "--json").json["memory"]


@pytest.fixture(scope="module")
def checkpoint_and_head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    checkpoint = write_decoder_checkpoint(folder / "checkpoint", "llama")
    return checkpoint, write_random_head(folder / "head", base_config(checkpoint))


def test_export_takes_a_draft_head_and_inspect_shows_it(edgellm, checkpoint_and_head, tmp_path):
    checkpoint, head = checkpoint_and_head
    limits = ("--max-draft-tree-size", 24, "--max-verify-tree-size", 16)
    arguments = ("export", checkpoint, tmp_path / "engine", "--draft", head, *limits)
    assert "draft head" in edgellm(*arguments, "--check").out
    assert edgellm(*arguments).code == 0
    draft = edgellm("inspect", tmp_path / "engine", "--json").json["config"]["draft"]
    assert (draft["max_draft_tree_size"], draft["max_verify_tree_size"]) == (24, 16)


def test_export_leaves_the_checkpoint_s_draft_head_out_on_request(edgellm, checkpoint_and_head, tmp_path):
    checkpoint, head = checkpoint_and_head
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    shutil.copytree(head, tmp_path / "checkpoint" / "draft")
    arguments = ("export", tmp_path / "checkpoint", "--check", "--json")
    assert "draft/model.onnx" in edgellm(*arguments).json["files"]
    assert "draft/model.onnx" not in edgellm(*arguments, "--no-draft").json["files"]
    assert edgellm(*arguments, "--no-draft", "--draft", head).code == 2


@pytest.mark.slow
def test_bench_ends_with_its_figures_as_json(edgellm, tiny_engine):
    run = edgellm("bench", tiny_engine, "--runs", 3, "--warmup", 1, "--max-tokens", 5)
    assert run.code == 0
    result = run.json
    assert result["stages"]["total_s"]["median"] > 0
    assert result["tokens_per_s"] > 0
    assert result["share_of_memory_limit"] > 0
    assert set(result["decode_bytes"]) == {"weights", "kv_cache", "states"}
    assert result["decode_bytes"]["weights"] == (tiny_engine / "llm" / "model.onnx.data").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("generate", *REQUEST), ("chat",), ("bench", "--runs", 1, "--warmup", 0, "--max-tokens", 2)],
    ids=lambda command: command[0],
)
def test_decode_steps_are_recorded_unless_an_option_says_no(edgellm, tiny_engine, monkeypatch, command):
    recorded = []
    monkeypatch.setattr(
        LLMInferenceRuntime, "capture_decoding_cuda_graph", lambda runtime: recorded.append("yes")
    )
    name, *options = command
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert edgellm(name, tiny_engine, *options).code == 0
    assert len(recorded) == 1
    assert edgellm(name, tiny_engine, *options, "--no-cuda-graphs").code == 0
    assert len(recorded) == 1


def test_every_option_has_a_help_text():
    def check(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for subparser in action.choices.values():
                    check(subparser)
            else:
                assert action.help, f"{parser.prog} {action.dest}"

    check(make_parser())


def test_help_needs_neither_ros_nor_the_engines():
    code = (
        "import sys; sys.argv = ['edgellm', '--help']\n"
        "from edgellm_ros.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'cv2', 'onnxruntime', 'onnx_ir', 'rclpy', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "edgellm_ros", "fly"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.startswith("edgellm: error:")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pipes of Linux")
def test_a_reader_that_leaves_is_no_error_of_ours(tiny_engine):
    command = f"{sys.executable} -m edgellm_ros inspect {tiny_engine} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr
