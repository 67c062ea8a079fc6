# SPDX-License-Identifier: Apache-2.0
"""Adapters in the runtime: answers, mixed batches, switches, addition and removal."""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.adapters.lora import LoraAdapters
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.draws import draws
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, assert_same_answer, request
from fixtures.tiny_adapter import write_adapter

LONG = {"max_tokens": 30, "images": (IMAGE,)}


@pytest.fixture(scope="module")
def directories(tiny_checkpoint, tmp_path_factory):
    """Adapters of several ranks and modules; `b` has modules of two ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(root / "a", tiny_checkpoint, seed=1, r=3),
        "b": write_adapter(
            root / "b",
            tiny_checkpoint,
            seed=2,
            r=8,
            modules=("q_proj", "o_proj", "up_proj", "down_proj"),
            rank_pattern={"up_proj": 1},
            ranks={"up_proj": 1},
        ),
        "c": write_adapter(root / "c", tiny_checkpoint, seed=3, r=1, use_rslora=True),
    }


@pytest.fixture(scope="module")
def engine(tiny_lora_engine, words, trigger_index, tmp_path_factory):
    """The tiny engine with LoRA inputs; its base model triggers as `acting_engine`'s."""
    directory = tmp_path_factory.mktemp("acting_lora") / "engine"
    shutil.copytree(tiny_lora_engine, directory)
    data = json.loads((directory / "config.json").read_text())
    data["action"]["future_start_token_id"] = words[trigger_index]
    data["stop_token_ids"] = [*data["stop_token_ids"], words[trigger_index]]
    (directory / "config.json").write_text(json.dumps(data))
    return directory


@pytest.fixture(scope="module")
def loaded(engine, directories, runtime_device):
    """A runtime with the adapters a, b and c, the base model active.

    Tests do not change it.
    """
    with LLMInferenceRuntime(engine, runtime_device, lora_dirs=directories, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture
def fresh(engine, directories, runtime_device):
    """A runtime with the adapters a and b, which a test may change."""
    chosen = {name: directories[name] for name in "ab"}
    with LLMInferenceRuntime(engine, runtime_device, lora_dirs=chosen) as runtime:
        yield runtime


class TestAnswers:
    def test_each_adapter_changes_the_answer_and_is_reported(self, loaded):
        answers = {name: loaded.handle_request(request(lora=name, **LONG)) for name in ("", "a", "b", "c")}
        assert [answer.lora for answer in answers.values()] == ["", "a", "b", "c"]
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 4

    def test_the_base_model_has_the_bits_of_an_engine_without_lora_inputs(self, loaded, acting_runtime):
        one = request(action_samples=2, logprobs=5, **LONG)
        answer = loaded.handle_request(one)
        assert answer.actions is not None
        assert_same_answer(answer, acting_runtime.handle_request(one))

    def test_a_batch_of_base_a_and_b_equals_three_single_requests(self, loaded):
        requests = [request(lora=name, action_samples=2, logprobs=5, **LONG) for name in ("b", "", "a")]
        alone = [loaded.handle_request(one) for one in requests]
        for found, expected in zip(loaded.handle_request(requests), alone, strict=True):
            assert_same_answer(found, expected)
            assert found.lora == expected.lora

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(draws(2, 4)))
    def test_random_requests_with_random_adapters_have_the_same_bits_in_random_batches(self, loaded, seed):
        rng = np.random.default_rng(seed)
        requests = [
            request(
                ["go to the red box", "", "what do you see in front of you?", "stop"][rng.integers(4)],
                images=[(), (IMAGE,), (OTHER_IMAGE,)][rng.integers(3)],
                max_tokens=int(rng.integers(1, 40)),
                temperature=float(rng.choice([0.0, 0.8])),
                seed=int(rng.integers(1000)),
                logprobs=3,
                action_samples=1,
                lora=["", "a", "b", "c"][rng.integers(4)],
            )
            for _ in range(8)
        ]
        alone = [loaded.handle_request(one) for one in requests]
        for _ in range(5):
            chosen = rng.permutation(8)[: rng.integers(2, 5)]
            answers = loaded.handle_request([requests[index] for index in chosen])
            for index, answer in zip(chosen, answers, strict=True):
                assert_same_answer(answer, alone[index])

    @pytest.mark.slow
    @pytest.mark.only_on("cpu", reason="in half precision sums in another order give other tokens")
    def test_a_batch_in_half_precision_equals_single_requests(
        self, tiny_checkpoint, directories, tmp_path, runtime_device
    ):
        from edgellm_ros.builder import export

        export(tiny_checkpoint, tmp_path, precision="fp16", max_lora_rank=8)
        with LLMInferenceRuntime(tmp_path, runtime_device, lora_dirs=directories) as runtime:
            requests = [request(lora=name, logprobs=3, **LONG) for name in ("b", "", "a", "b")]
            alone = [runtime.handle_request(one) for one in requests]
            for found, expected in zip(runtime.handle_request(requests), alone, strict=True):
                assert_same_answer(found, expected)
            assert alone[0].token_ids != alone[1].token_ids

    @pytest.mark.only_on("cpu", reason="threads of the CPU")
    def test_answers_do_not_depend_on_the_number_of_threads(
        self, engine, directories, loaded, runtime_device
    ):
        one = request(lora="b", logprobs=5, **LONG)
        with LLMInferenceRuntime(engine, runtime_device, threads=1, lora_dirs=directories) as runtime:
            assert_same_answer(runtime.handle_request(one), loaded.handle_request(one))


class TestActive:
    def test_requests_without_adapter_name_use_the_active_adapter(self, fresh):
        expected = {name: fresh.handle_request(request(lora=name, **LONG)) for name in ("", "a", "b")}
        assert fresh.active_lora == ""
        for name in ("a", "b", ""):
            fresh.switch_lora_weights(name)
            assert fresh.active_lora == name
            answer = fresh.handle_request(request(**LONG))
            assert answer.lora == name
            assert_same_answer(answer, expected[name])

    def test_the_base_model_can_be_named_while_an_adapter_is_active(self, fresh):
        expected = fresh.handle_request(request(**LONG))
        fresh.switch_lora_weights("a")
        answer = fresh.handle_request(request(lora="base", **LONG))
        assert answer.lora == ""
        assert_same_answer(answer, expected)
        fresh.switch_lora_weights("base")
        assert fresh.active_lora == ""
        assert_same_answer(fresh.handle_request(request(**LONG)), expected)

    def test_a_failed_switch_leaves_the_old_adapter_active(self, fresh):
        fresh.switch_lora_weights("a")
        with pytest.raises(ValueError, match="unknown LoRA adapter 'z'; loaded: a, b"):
            fresh.switch_lora_weights("z")
        assert fresh.active_lora == "a"

    def test_a_switch_during_a_batch_applies_to_the_next(self, fresh):
        expected = fresh.handle_request(request(**LONG))

        def switch(progress):
            fresh.switch_lora_weights("a")

        assert_same_answer(fresh.handle_request(request(on_progress=switch, **LONG)), expected)
        assert fresh.handle_request(request(**LONG)).lora == "a"

    @pytest.mark.slow
    @pytest.mark.only_on("cpu", "cuda", "tensorrt", reason="the double's speed says nothing")
    def test_a_switch_costs_less_than_a_millisecond(self, fresh):
        """The cost of the call, plus the longer next request, which binds other addresses."""
        one = request(max_tokens=2)

        def seconds(names):
            switches, requests = [], []
            for name in names:
                start = time.perf_counter()
                fresh.switch_lora_weights(name)
                switched = time.perf_counter()
                fresh.handle_request(one)
                switches.append(switched - start)
                requests.append(time.perf_counter() - switched)
            return switches, requests

        seconds(["a", "b"] * 5)
        same, other = [], []
        for _ in range(10):  # alternating, so that other load affects both alike
            same += seconds(["a"] * 10)[1]
            switches, requests = seconds(["b", "a"] * 5)
            other += requests
        assert statistics.median(switches) < 1e-4
        assert statistics.median(other) - statistics.median(same) < 1e-3

    @pytest.mark.slow
    @pytest.mark.only_on("cpu", "cuda", "tensorrt", reason="the double's memory is not an engine's")
    def test_memory_does_not_grow_in_a_thousand_switches(self, fresh):
        def resident_bytes():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        def switch(times):
            for _ in range(times):
                for name in ("a", "b"):
                    fresh.switch_lora_weights(name)
                    fresh.handle_request(request(max_tokens=2))

        switch(50)
        growth = []
        for _ in range(5):  # a leak adds to every part; allocators and other threads add to some
            before = resident_bytes()
            switch(100)
            growth.append(resident_bytes() - before)
        assert min(growth) < 2**17, growth


class TestAddAndRemove:
    def test_a_map_of_names_to_files_gives_the_answers_of_directories(
        self, engine, directories, loaded, runtime_device
    ):
        """The map of the constructor, as TensorRT Edge-LLM's `loraWeightsMap`."""
        files = {name: directories[name] / "adapter_model.safetensors" for name in "ab"}
        with LLMInferenceRuntime(engine, runtime_device, lora_dirs=files, prefix_cache_bytes=0) as runtime:
            for name in files:
                expected = loaded.handle_request(request(lora=name))
                assert_same_answer(runtime.handle_request(request(lora=name)), expected)
            runtime.add_lora("late", directories["c"] / "adapter_model.safetensors")
            assert runtime.pipeline.loras.get("late").digest == loaded.pipeline.loras.get("c").digest

    def test_an_adapter_can_be_added_at_run_time(self, fresh, loaded, directories):
        with pytest.raises(ValueError, match="unknown LoRA adapter 'c'; loaded: a, b"):
            fresh.handle_request(request(lora="c"))
        fresh.add_lora("c", directories["c"])
        assert fresh.lora_names() == ["a", "b", "c"]
        one = request(lora="c", **LONG)
        assert_same_answer(fresh.handle_request(one), loaded.handle_request(one))

    @pytest.mark.only_on("cpu", reason="the calls are the same on every device")
    def test_adding_an_adapter_downloads_nothing_and_does_not_wait(self, engine, directories):
        class WriteOnlyDevice(CpuDevice):
            def download(self, source):
                raise AssertionError("read back")

            def synchronize(self):
                raise AssertionError("waited")

        bindings = EngineExecutor.open(engine / "llm" / "model.onnx", CpuDevice()).bindings.values()
        adapters = LoraAdapters(WriteOnlyDevice(), bindings, max_rank=8)
        assert len(adapters.add("a", directories["a"]).digest) == 64

    def test_an_adapter_that_was_removed_is_unknown(self, fresh, directories):
        fresh.remove_lora("a")
        assert fresh.lora_names() == ["b"]
        with pytest.raises(ValueError, match="unknown LoRA adapter 'a'; loaded: b"):
            fresh.handle_request(request(lora="a"))
        with pytest.raises(ValueError, match="unknown LoRA adapter 'a'"):
            fresh.remove_lora("a")
        fresh.add_lora("a", directories["a"])
        assert fresh.handle_request(request(lora="a")).lora == "a"

    def test_neither_the_active_adapter_nor_the_base_model_can_be_removed(self, fresh):
        fresh.switch_lora_weights("a")
        with pytest.raises(ValueError, match="adapter 'a' is active: switch to another before"):
            fresh.remove_lora("a")
        for name in ("", "base"):
            with pytest.raises(ValueError, match="base model cannot be removed"):
                fresh.remove_lora(name)
        with pytest.raises(ValueError, match="adapter 'a' is active"):
            fresh.remove_lora("b", "a")
        assert fresh.lora_names() == ["a", "b"]
        assert fresh.handle_request(request()).lora == "a"

    def test_a_batch_keeps_an_adapter_that_is_removed_meanwhile(self, fresh, directories):
        expected = fresh.handle_request(request(lora="a", **LONG))

        def remove(progress):
            if progress.stage == "decode" and progress.step == 2:
                fresh.remove_lora("a")
                fresh.add_lora("a", directories["b"])  # its memory may be used again

        answer = fresh.handle_request(request(lora="a", on_progress=remove, **LONG))
        assert_same_answer(answer, expected)
        assert fresh.handle_request(request(lora="a", **LONG)).token_ids != expected.token_ids

    def test_another_thread_can_add_an_adapter_during_a_batch(self, fresh, directories):
        added = threading.Event()

        def wait(progress):
            if progress.stage == "decode":
                assert added.wait(30)

        def add():
            fresh.add_lora("c", directories["c"])
            added.set()

        thread = threading.Thread(target=add)

        def begin(progress):
            if not thread.ident:
                thread.start()
            wait(progress)

        assert fresh.handle_request(request(on_progress=begin)).token_ids
        thread.join()
        assert "c" in fresh.lora_names()

    def test_a_broken_adapter_is_refused_and_the_active_one_stays(self, fresh, directories, tmp_path):
        fresh.switch_lora_weights("a")
        before = fresh.handle_request(request(**LONG))
        broken = shutil.copytree(directories["b"], tmp_path / "broken")
        weights = broken / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        with pytest.raises(ValueError, match=r"broken/adapter_model\.safetensors: damaged or cut short"):
            fresh.add_lora("c", broken)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            fresh.add_lora("c", tmp_path / "nowhere")
        assert (fresh.lora_names(), fresh.active_lora) == (["a", "b"], "a")
        assert_same_answer(fresh.handle_request(request(**LONG)), before)

    def test_a_second_adapter_of_the_same_name_is_refused(self, fresh, directories):
        with pytest.raises(ValueError, match="adapter 'a' is loaded already, remove it first"):
            fresh.add_lora("a", directories["b"])

    @pytest.mark.parametrize("name", ["", "a/b", "../a", " a", "a\n", "ä"])
    def test_a_name_that_cannot_be_in_a_path_is_refused(self, fresh, directories, name):
        with pytest.raises(ValueError, match="an adapter's name must consist of letters, digits"):
            fresh.add_lora(name, directories["a"])

    def test_the_name_of_the_base_model_is_refused(self, fresh, directories):
        with pytest.raises(ValueError, match="'base' is the name of the base model"):
            fresh.add_lora("base", directories["a"])

    def test_weights_beyond_half_precision_are_refused(
        self, tiny_checkpoint, directories, tmp_path, runtime_device
    ):
        from edgellm_ros.builder import export

        export(tiny_checkpoint, tmp_path / "engine", precision="fp16", max_lora_rank=8)
        large = shutil.copytree(directories["a"], tmp_path / "large")
        tensors = load_file(large / "adapter_model.safetensors")
        key = next(key for key in tensors if "1.mlp.up_proj.lora_B" in key)
        tensors[key] *= np.float32(1e6)
        save_file(tensors, large / "adapter_model.safetensors")
        message = r"lora_B of model\.layers\.1\.mlp\.up_proj exceeds the range of float16"
        with (
            LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime,
            pytest.raises(ValueError, match=message),
        ):
            runtime.add_lora("large", large)

    def test_using_a_closed_runtime_is_an_error(self, tiny_lora_engine, directories, runtime_device):
        runtime = LLMInferenceRuntime(tiny_lora_engine, runtime_device)
        runtime.close()
        for call in (
            lambda: runtime.add_lora("a", directories["a"]),
            lambda: runtime.remove_lora("a"),
            lambda: runtime.switch_lora_weights("a"),
            lambda: runtime.lora_names(),
            lambda: runtime.active_lora,
        ):
            with pytest.raises(EngineError, match="closed"):
                call()


class TestEngineDirectory:
    def test_adapters_in_the_engine_directory_are_loaded(
        self, tiny_lora_engine, directories, tmp_path, runtime_device
    ):
        engine = shutil.copytree(tiny_lora_engine, tmp_path / "engine")
        for name in "ab":
            shutil.copytree(directories[name], engine / "lora" / name)
        (engine / "lora" / "notes.txt").write_text("not an adapter")
        (engine / "lora" / ".hidden").mkdir()
        assert EngineConfig.load(engine)
        with LLMInferenceRuntime(engine, runtime_device) as runtime:
            assert runtime.lora_names() == ["a", "b"]
        with LLMInferenceRuntime(engine, runtime_device, lora_dirs={}) as runtime:
            assert runtime.lora_names() == []

    def test_an_adapter_that_is_one_file_is_loaded(
        self, tiny_lora_engine, directories, tmp_path, runtime_device
    ):
        engine = shutil.copytree(tiny_lora_engine, tmp_path / "engine")
        (engine / "lora").mkdir()
        metadata = {"lora_adapter_metadata": (directories["b"] / "adapter_config.json").read_text()}
        tensors = load_file(directories["b"] / "adapter_model.safetensors")
        save_file(tensors, engine / "lora" / "one.safetensors", metadata)
        with LLMInferenceRuntime(engine, runtime_device) as runtime:
            assert runtime.lora_names() == ["one"]
            runtime.add_lora("b", directories["b"])
            one, b = (runtime.handle_request(request(lora=name)) for name in ("one", "b"))
        assert (one.lora, b.lora) == ("one", "b")
        assert one.token_ids == b.token_ids

    def test_a_file_and_a_directory_of_one_name_are_refused(
        self, tiny_lora_engine, directories, tmp_path, runtime_device
    ):
        engine = shutil.copytree(tiny_lora_engine, tmp_path / "engine")
        shutil.copytree(directories["a"], engine / "lora" / "a")
        shutil.copyfile(directories["a"] / "adapter_model.safetensors", engine / "lora" / "a.safetensors")
        with pytest.raises(ValueError, match=r"a\.safetensors: .*lora/a is an adapter of this name too"):
            LLMInferenceRuntime(engine, runtime_device)

    def test_a_broken_adapter_is_named_at_loading(
        self, tiny_lora_engine, directories, tmp_path, runtime_device
    ):
        engine = shutil.copytree(tiny_lora_engine, tmp_path / "engine")
        shutil.copytree(directories["a"], engine / "lora" / "a")
        (engine / "lora" / "a" / "adapter_config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"lora/a/adapter_config\.json not found"):
            LLMInferenceRuntime(engine, runtime_device)

    def test_an_engine_without_lora_inputs_says_how_to_get_them(self, runtime, directories):
        with pytest.raises(
            ValueError, match="this engine has no LoRA inputs, export it with --max-lora-rank"
        ):
            runtime.add_lora("a", directories["a"])
        assert runtime.lora_names() == []
        assert runtime.active_lora == ""


class TestDigest:
    def test_the_digest_depends_on_contents_not_names(self, fresh, directories):
        loras = fresh.pipeline.loras
        loras.add("copy", directories["a"])
        digests = {name: loras.get(name).digest for name in ("", "a", "b", "copy")}
        assert digests["a"] == digests["copy"]
        assert len({digests[""], digests["a"], digests["b"]}) == 3
        assert digests[""] == ""
        assert len(digests["a"]) == 64

    def test_the_digest_covers_the_scaling(self, fresh, tiny_checkpoint, tmp_path, directories):
        other = shutil.copytree(directories["a"], tmp_path / "other")
        config = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
        fresh.add_lora("other", other)
        assert fresh.pipeline.loras.get("other").digest != fresh.pipeline.loras.get("a").digest
