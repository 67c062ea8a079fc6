# SPDX-License-Identifier: Apache-2.0
"""The decoding benchmark from random weights to its last line, with a small model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from statistics import median

import numpy as np
import pytest

from benchmarks import decode, random_checkpoint
from benchmarks.decode_paths import GENERATE, IN_PROCESS, LOOP, NO_GRAPHS
from benchmarks.decode_runs import bytes_per_step, make_requests, observe_steps
from benchmarks.decode_runs import decode as decode_requests
from benchmarks.model_shapes import SHAPES, parse_shape
from benchmarks.published_models import MODELS, PublishedModel
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine.device import CpuDevice, HostCopy
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime

SMALL = (
    "qwen3-0.6b,hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=16,vocab_size=300"
)
CONTEXT, TOKENS = 20, 10


def options(*more: str, shape: str = SMALL) -> list[str]:
    given = {"--shape": shape, "--precision": "fp32", "--context": CONTEXT, "--tokens": TOKENS, "--runs": 2}
    return [str(part) for pair in given.items() for part in pair] + list(more)


@pytest.fixture(scope="module")
def result(device_arguments) -> dict:
    return decode.main(options("--batch", "1,3", "--no-transformers", *device_arguments))


@pytest.mark.slow
def test_the_last_line_is_the_result_as_json(capsys):
    returned = decode.main(options("--no-transformers"))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"benchmark": "decode", **returned}


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True])
def test_the_paths_that_users_take_are_compared_with_the_loop(real, capsys, device_arguments):
    """The command line answers in its own process; without graphs only a GPU differs."""
    arguments = ["--checkpoint", str(ARENA_CHECKPOINT)] if real else []
    found = decode.main([*options("--paths", *device_arguments), *arguments])
    ours = [IN_PROCESS, GENERATE] + ([NO_GRAPHS] if found["device"] != "cpu" else [])
    assert list(found["paths"]) == [LOOP, *ours]
    assert found["same_tokens"] is True
    loop_ms = found["paths"][LOOP]["token_ms"]
    for name in ours:
        path = found["paths"][name]
        assert path["times_loop"] == pytest.approx(path["token_ms"] / loop_ms)
        assert 0.05 < path["times_loop"] < 20  # other work on the machine, but the same unit and tokens
        assert path["first_ms"] > 0
    differences = [abs(found["paths"][name]["times_loop"] - 1) for name in (IN_PROCESS, GENERATE)]
    assert found["largest_difference"] == max(differences)
    changes = found["changed_from_defaults"]
    assert (changes["prefix_cache_bytes"], changes["max_batch_size"]) == (0, 1)
    told = capsys.readouterr().err
    assert "changed from the defaults: prefix_cache_bytes=0, max_batch_size=1" in told
    assert f"{GENERATE:<52}" in told


@pytest.mark.slow
def test_every_batch_size_has_its_figures(result):
    assert [figures["batch"] for figures in result["batches"]] == [1, 3]
    for figures in result["batches"]:
        for name in ("prefill_ms", "decode_ms", "wall_ms", "step_ms"):
            assert 0 < figures[name]["median"] <= figures[name]["p90"]
        assert figures["tokens_per_s"] == pytest.approx(
            1e3 * figures["batch"] / figures["decode_ms"]["median"]
        )
        assert figures["share_of_copy_bandwidth"] == pytest.approx(
            sum(figures["bytes_per_step"].values())
            / (figures["decode_ms"]["median"] * 1e-3)
            / result["copy_bandwidth_bytes_per_s"]
        )
        # on the host the step is its own work, elsewhere less than that
        host_us = figures["host_us_per_step"]
        queue_us = figures["queue_us_per_step"]
        if result["device"] == "cpu":
            assert host_us is queue_us is None
        else:
            assert 0 < queue_us < host_us < 1e3 * figures["step_ms"]["p90"]


@pytest.mark.slow
def test_the_time_from_outside_is_the_time_that_the_runtime_tells(result):
    for figures in result["batches"]:
        ratio = figures["wall_ms"]["median"] / figures["decode_ms"]["median"]
        assert 0.9 < ratio < 4  # outside, steps of a millisecond wait for the processor of a busy machine too


@pytest.mark.slow
def test_weights_and_cache_are_those_of_the_shape_and_what_they_exceed_is_told(result):
    memory, shape = result["memory_bytes"], parse_shape(SMALL)
    assert memory["weights"] == 4 * shape.parameters
    assert memory["kv_cache"] == 4 * 3 * (CONTEXT + TOKENS) * 2 * 2 * 2 * 16
    needed = memory["weights"] + memory["kv_cache"]
    assert result["memory_overhead"] == pytest.approx(memory["in_use"] / needed - 1)
    assert memory["peak"] >= memory["in_use"]


@pytest.mark.slow
def test_the_bytes_of_a_step_are_those_of_rounded_weights(monkeypatch):
    monkeypatch.setattr(decode, "copy_bandwidth", lambda device: 1e9)
    found = decode.main(options("--quantize", "int4", "--group-size", "32"))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96  # q, k and v; o; gate, up and down
    scales, norms = layer / 32 * 4, 4 * (2 * 64 + 2 * 16)
    expected = 2 * (layer / 2 + scales + norms) + 4 * 64 + 4 * 300 * 64
    assert found["batches"][0]["bytes_per_step"]["weights"] == pytest.approx(expected, rel=1e-2)
    assert found["memory_bytes"]["weights"] == pytest.approx(expected, rel=1e-2)
    assert found["transformers"] is None


@pytest.mark.parametrize(
    ("name", "billions", "read"),
    [
        ("qwen2.5-0.5b", 0.494, 0.494),
        ("qwen2.5-1.5b", 1.544, 1.544),
        ("qwen2.5-3b", 3.086, 3.086),
        ("qwen2.5-7b", 7.616, 7.071),
        ("llama-3.2-1b", 1.236, 1.236),
        ("llama-3.2-3b", 3.213, 3.213),
        ("llama-3.1-8b", 8.030, 7.505),
        ("smollm2-135m", 0.1345, 0.1345),
        ("smollm2-1.7b", 1.711, 1.711),
        ("qwen3-0.6b", 0.596, 0.596),
        ("qwen3-1.7b", 1.721, 1.721),
        ("qwen3-4b", 4.022, 4.022),
        ("qwen3-8b", 8.191, 7.568),  # its table of embeddings is not the last matrix
    ],
)
def test_built_in_shapes_have_as_many_weights_as_the_models(name, billions, read):
    shape = SHAPES[name]
    assert shape.parameters == pytest.approx(billions * 1e9, rel=1e-3)
    assert shape.parameters_per_step == pytest.approx(read * 1e9, rel=1e-3)


def test_a_step_reads_the_weights_once_and_every_sequence_s_rows():
    shape = SHAPES["qwen3-1.7b"]
    per_token = 2 * 28 * 8 * 128 * 2  # keys and values of 28 layers, 8 heads, fp16
    moved = bytes_per_step(shape, "fp16", batch=8, context=500, tokens=3)  # steps over 501 and 502 rows
    assert moved == {"weights": 2 * shape.parameters, "kv_cache": round(8 * 501.5 * per_token), "state": 0}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_matrices_keep_the_size_of_what_passes_and_only_the_stop_token_s_row_is_zero(tmp_path, precision):
    shape = parse_shape(SMALL)
    weights = Weights(write_checkpoint(tmp_path, shape, precision))
    table = weights.read("model.embed_tokens.weight").astype(np.float32)
    assert not table[-1].any()
    for matrix in (table[:-1], weights.read("model.layers.1.mlp.down_proj.weight").astype(np.float32)):
        assert matrix.all()
        assert matrix.mean() == pytest.approx(0, abs=0.05 * float(matrix.std()))
        assert 0.7 < matrix.std() * matrix.shape[1] ** 0.5 < 1.42
        assert len(np.unique(matrix)) > 100


def test_a_checkpoint_is_made_again_only_for_other_weights(tmp_path):
    shape = parse_shape(SMALL)

    def written(seed: int) -> tuple[int, np.ndarray]:
        write_checkpoint(tmp_path, shape, "fp32", seed)
        stamp = (tmp_path / "config.json").stat().st_mtime_ns
        return stamp, Weights(tmp_path).read("model.layers.0.mlp.up_proj.weight")

    (first, weights), (again, _), (later, others) = written(0), written(0), written(1)
    assert first == again < later
    assert not np.array_equal(weights, others)


def test_prompts_have_as_many_tokens_as_asked_for_and_answers_never_stop(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", parse_shape(SMALL), "fp32")
    export(
        tmp_path / "checkpoint",
        tmp_path / "engine",
        precision="fp32",
        max_batch_size=2,
        max_input_len=CONTEXT,
        max_kv_cache_capacity=CONTEXT + 100,
    )
    with LLMInferenceRuntime(tmp_path / "engine", prefix_cache_bytes=0) as runtime:
        responses = decode_requests(runtime, make_requests(2, CONTEXT, 100))
    assert [response.prompt_tokens for response in responses] == [CONTEXT, CONTEXT]
    assert [response.finish_reason for response in responses] == ["length", "length"]
    assert responses[0].token_ids != responses[1].token_ids


def test_an_answer_that_ends_early_is_an_error(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", parse_shape(SMALL), "fp32")
    export(
        tmp_path / "checkpoint",
        tmp_path / "engine",
        precision="fp32",
        max_batch_size=1,
        max_input_len=CONTEXT,
        max_kv_cache_capacity=CONTEXT + 5,
    )
    with (
        LLMInferenceRuntime(tmp_path / "engine", prefix_cache_bytes=0) as runtime,
        pytest.raises(RuntimeError, match="ended after 5 of 9 tokens"),
    ):
        decode_requests(runtime, make_requests(1, CONTEXT, 9))


class SlowDevice(CpuDevice):
    """Tokens arrive 20 ms after they were asked for; to ask takes 5 ms."""

    def copy_to_host(self, source: Tensor) -> HostCopy:
        time.sleep(0.005)
        reading = super().copy_to_host(source)

        class Slow:
            def wait(self) -> np.ndarray:
                time.sleep(0.02)
                return reading.wait()

        return Slow()


def test_waiting_for_tokens_is_no_time_of_the_host(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", parse_shape(SMALL), "fp32")
    export(
        tmp_path / "checkpoint",
        tmp_path / "engine",
        precision="fp32",
        max_batch_size=2,
        max_input_len=CONTEXT,
        max_kv_cache_capacity=CONTEXT + TOKENS,
    )
    device = SlowDevice()
    with LLMInferenceRuntime(tmp_path / "engine", device=device, prefix_cache_bytes=0) as runtime:
        times = observe_steps(runtime, device, make_requests(2, CONTEXT, TOKENS))
    assert len(times.interval_s) == len(times.host_s) == len(times.queue_s) == TOKENS - 1
    assert median(times.interval_s) >= 0.025
    assert 0.005 < median(times.queue_s) < median(times.host_s) < 0.015
    assert device.copy_to_host.__func__ is SlowDevice.copy_to_host  # nothing is left in its way


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen9"], "unknown shape 'qwen9'"),
        (["--shape", "qwen3-4b,layers=2"], "'layers=2'"),
        (["--batch", "1,0"], "at least 1"),
        (["--profile"], "--device cuda"),
        (["--checkpoint", "somewhere"], "--checkpoint needs --paths"),
        (["--frame", "64x48"], "a shape with a vision tower"),
        (["--shape", "qwen3-vl-2b,layers=2"], "'layers=2'"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        decode.main(arguments)
    assert message in capsys.readouterr().err


def small_model(published: str, tied: int) -> str:
    return f"{SMALL.replace('qwen3-0.6b', published)},tie_word_embeddings={tied}"


def assert_same_tokens(figures: list[dict]) -> None:
    (one,) = figures
    assert one["same_tokens"] == TOKENS
    assert one["decode_ms"] > 0


@pytest.mark.parity
@pytest.mark.parametrize("tied", [1, 0])
@pytest.mark.parametrize("published", ["qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b", "smollm2-135m"])
def test_transformers_draws_the_same_tokens(published, tied):
    pytest.importorskip("transformers")
    result = decode.main(options("--batch", "2", "--no-compile", shape=small_model(published, tied)))
    assert_same_tokens(result["transformers"]["eager"])


@pytest.mark.parity
def test_compiled_transformers_draws_the_same_tokens():
    pytest.importorskip("transformers")
    result = decode.main(options("--batch", "2", shape=small_model("qwen2.5-0.5b", 0)))
    assert_same_tokens(result["transformers"]["compiled"])


TINY = "hidden_size=128,num_attention_heads=4,num_key_value_heads=2,intermediate_size=96"
TINY_QWEN_TOWER = "vision.hidden_size=64,vision.num_heads=4,vision.intermediate_size=96"
FEW_TOKENS = 768
TINY_MODELS = {
    "qwen3-vl-2b": f"num_hidden_layers=3,{TINY},vision.depth=18,{TINY_QWEN_TOWER},vision.out_hidden_size=128",
    "internvl3-2b": f"num_hidden_layers=2,{TINY},vision.num_hidden_layers=1,vision.num_attention_heads=4,"
    "vision.hidden_size=64,vision.intermediate_size=96",
    "qwen3.5-0.8b": f"num_hidden_layers=4,{TINY},vision.depth=2,{TINY_QWEN_TOWER},vision.out_hidden_size=128,"
    "linear_num_key_heads=2,linear_num_value_heads=2,linear_key_head_dim=32,linear_value_head_dim=32",
    "nemotron-nano-4b": f"{TINY},mamba_num_heads=8,mamba_head_dim=16,ssm_state_size=32",
}


def smaller(model: PublishedModel) -> PublishedModel:
    """Return the model with FEW_TOKENS, among them those of its image.

    A hybrid has its layers up to the one after the first attention.
    """
    fewer = model.vocab_size - FEW_TOKENS
    config = {
        key: value - fewer if key.endswith("_token_id") else value for key, value in model.config.items()
    }
    if pattern := config.get("hybrid_override_pattern"):
        layers = pattern[: pattern.index("*") + 2]
        config |= {"hybrid_override_pattern": layers, "num_hidden_layers": len(layers)}
    return replace(model, config=config).with_changes({"vocab_size": FEW_TOKENS})


@pytest.mark.parity
@pytest.mark.parametrize("name", TINY_MODELS)
def test_transformers_draws_the_same_tokens_of_published_models(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, name, smaller(MODELS[name]))
    frame = [] if name.startswith("nemotron") else ["--frame", "96x64"]
    result = decode.main(options("--no-compile", *frame, shape=f"{name},{TINY_MODELS[name]}"))
    (ours,), (theirs,) = result["batches"], result["transformers"]["eager"]
    assert theirs["same_tokens"] == TOKENS
    assert result["prompt_tokens"] > CONTEXT or not frame
    for stage in ("vision", "prefill", "decode") if frame else ("prefill", "decode"):
        assert ours[f"{stage}_ms"]["median"] > 0 < theirs[f"{stage}_ms"]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "billions", "read"),
    [
        ("qwen3-vl-2b", 2.128, 1.721),
        ("qwen3-vl-4b", 4.438, 4.022),
        ("qwen3-vl-8b", 8.767, 7.568),
        ("qwen2.5-vl-3b", 3.755, 3.086),
        ("qwen2.5-vl-7b", 8.292, 7.071),
        ("internvl3-1b", 0.938, 0.494),
        ("internvl3-2b", 2.089, 1.543),
        ("internvl3-8b", 7.944, 7.069),
        ("qwen3.5-0.8b", 0.853, 0.752),
        ("nemotron-nano-4b", 3.974, 3.563),
        ("nemotron-nano-9b", 8.888, 8.301),
    ],
)
def test_published_models_have_as_many_weights_as_they_are_named_for(name, billions, read):
    pytest.importorskip("transformers")
    model = MODELS[name]
    assert model.parameters == pytest.approx(billions * 1e9, rel=1e-3)
    assert model.parameters_per_step == pytest.approx(read * 1e9, rel=1e-3)


@pytest.mark.parity
@pytest.mark.parametrize("name", SHAPES)
def test_tensors_of_a_shape_are_those_of_the_model_class(name):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    shape = SHAPES[name]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**asdict(shape))
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    assert {key: size for shard in shape.shards() for key, size in shard.items()} == expected


def test_a_shape_that_no_family_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(random_checkpoint, "families", list)
    with pytest.raises(ValueError, match="no family of the builder reads the model type 'llama'"):
        write_checkpoint(tmp_path, SHAPES["llama-3.2-1b"], "fp16")
    assert not list(tmp_path.iterdir())
