# SPDX-License-Identifier: Apache-2.0
"""Export of Alpamayo in its published layout: what is read, and what is refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.families.alpamayo.expert import read_frequencies
from edgellm_ros.engine_directory.config import GenerationDefaults
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.alpamayo_checkpoint import CONFIG, write_alpamayo
from fixtures.reference_inputs import make_image
from fixtures.tiny_checkpoint import write_json

BASE_TOKENS = 266  # bytes and control tokens of the small Qwen3-VL
PROMPT = (
    "<|im_start|>system\nyou are a driving assistant that generates safe and accurate actions.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{image}<|vision_end|><|traj_history_start|>{history}"
    "<|traj_history_end|>{navigation}output the chain-of-thought reasoning of the driving process, then "
    "output the future trajectory.<|im_end|>\n<|im_start|>assistant\n<|cot_start|>"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_alpamayo(tmp_path_factory.mktemp("alpamayo") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint):
    export(checkpoint, checkpoint.with_name("engine"))
    return checkpoint.with_name("engine")


@pytest.fixture
def plan(checkpoint, tmp_path):
    """Plan the export of a copy with another configuration.

    A dict is merged with the object that it replaces.
    """

    def run(**changes):
        copy = tmp_path / "checkpoint"
        shutil.copytree(checkpoint, copy, dirs_exist_ok=True)
        merged = {
            key: {**CONFIG[key], **value} if isinstance(value, dict) and CONFIG.get(key) else value
            for key, value in changes.items()
        }
        write_json(copy / "config.json", {**CONFIG, **merged})
        return plan_export(copy, ExportOptions())

    return run


def test_the_vocabulary_is_that_of_the_model_code(checkpoint, plan):
    """Trajectory tokens come first; `<|image_pad|>` is there and gets no new id."""
    planned = plan()
    tokenizer = Tokenizer.from_str(planned.texts["tokenizer.json"].decode())
    ids = {
        name: tokenizer.token_to_id(name) for name in ("<i0>", "<i59>", "<|prompt_start|>", "<|traj_future|>")
    }
    assert ids == {
        "<i0>": BASE_TOKENS,
        "<i59>": BASE_TOKENS + 59,
        "<|prompt_start|>": BASE_TOKENS + 60,
        "<|traj_future|>": BASE_TOKENS + 76,
    }
    assert tokenizer.token_to_id("<|route_start|>") == BASE_TOKENS + 81
    assert planned.config.llm.vocab_size == BASE_TOKENS + 88
    action = planned.config.action
    assert action.history_token_id == BASE_TOKENS + 75
    assert action.future_start_token_id == BASE_TOKENS + 72
    assert action.trajectory_history.first_token_id == BASE_TOKENS + 20
    assert planned.config.generation == GenerationDefaults(temperature=0.6, top_p=0.98)
    assert (planned.config.vision.min_pixels, planned.config.vision.max_pixels) == (512, 4096)


def test_answers_have_no_trajectory_tokens(engine):
    """Nor have they placeholders of images and videos."""
    sampling = SamplingParams(max_tokens=60, temperature=5.0, top_p=1.0)
    with LLMInferenceRuntime(engine) as runtime:
        response = runtime.handle_request(LLMGenerationRequest(sampling=sampling))
        config = runtime.config
    assert config.llm.reduced_vocab_size == config.llm.vocab_size - CONFIG["traj_vocab_size"] - 2
    assert not [token for token in response.token_ids if BASE_TOKENS <= token < BASE_TOKENS + 60]


def test_the_prompt_is_that_of_the_published_inference(engine):
    history = np.array([[-0.3, 0.02, 0, 0.1], [-0.2, 0.01, 0, 0.1], [-0.1, 0.0, 0, 0.0], [0, 0, 0, 0]])
    request = LLMGenerationRequest(
        images=(make_image(48, 64),), history=history, sampling=SamplingParams(max_tokens=1)
    )
    with LLMInferenceRuntime(engine) as runtime:
        runtime.handle_request(request)
        ids = runtime.base_model_input_token_ids[0]
    text = Tokenizer.from_file(str(engine / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    steps = [(-0.3, 0.02, 0.1), (0.1, -0.01, 0), (0.1, -0.01, -0.1), (0.1, 0, 0)]
    bins = [
        round((value + most) / (2 * most) * 39)
        for step in steps
        for value, most in zip(step, (1, 1, 2), strict=True)
    ]
    tokens = "".join(f"<i{20 + each}>" for each in bins)
    assert text == PROMPT.format(image="<|image_pad|>" * 12, history=tokens, navigation="")


def test_a_text_of_the_user_takes_the_place_of_the_question(engine):
    with LLMInferenceRuntime(engine) as runtime:
        runtime.handle_request(LLMGenerationRequest("park", sampling=SamplingParams(max_tokens=1)))
        ids = runtime.base_model_input_token_ids[0]
    text = Tokenizer.from_file(str(engine / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert text.endswith("<|traj_history_end|>park<|im_end|>\n<|im_start|>assistant\n<|cot_start|>")


def test_frequencies_are_rounded_to_the_type_of_the_weights(plan):
    """The model code keeps them in bf16, unless `keep_same_dtype` is false."""
    encoder = ConfigSection(CONFIG["action_in_proj_cfg"], "config.json")
    rounded = read_frequencies(ConfigSection(CONFIG, "config.json"), encoder)
    exact = read_frequencies(ConfigSection({**CONFIG, "keep_same_dtype": False}, "config.json"), encoder)
    assert exact == pytest.approx(np.logspace(0, 2, 6), rel=1e-6)
    assert rounded == (1.0, 2.515625, 6.3125, 15.875, 39.75, 100.0)


def test_r1_takes_no_navigation(plan):
    assert plan().config.action.takes_navigation
    assert not plan(model_type="alpamayo_r1").config.action.takes_navigation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vlm_backend": "qwenvl2"}, "vlm_backend 'qwenvl2': supported: qwenvl3"),
        ({"add_special_tokens": False}, "add_special_tokens False: supported: True"),
        ({"expert_non_causal_attention": False}, "expert_non_causal_attention False: supported: True"),
        (
            {"action_space_cfg": {"_target_": "other.Space"}},
            "_target_ 'other.Space': supported: the class Uni",
        ),
        ({"action_space_cfg": {"jerk_std": 1.0}}, "jerk_std 1.0: a key that is not known; known: accel_mean"),
        ({"action_space_cfg": {"accel_std": 0.0}}, r"std must be positive, got \(0.0, 0.03\)"),
        ({"action_space_cfg": {"accel_bounds": [1.0]}}, r"accel_bounds \[1.0\]: expected the lowest and"),
        ({"diffusion_cfg": {"int_method": "heun"}}, "int_method 'heun': supported: euler"),
        ({"hist_traj_tokenizer_cfg": {"predict_yaw": True}}, "predict_yaw True: supported: False"),
        (
            {"hist_traj_tokenizer_cfg": {"num_bins": 41}},
            "num_bins 41: with the 20 of futures more than .* 60",
        ),
        ({"hist_traj_tokenizer_cfg": None}, "hist_traj_tokenizer_cfg None: expected an object"),
        ({"tokens_per_history_traj": 16}, "tokens_per_history_traj 16: expected a multiple of 3"),
        ({"expert_cfg": {"num_hidden_layers": 4}}, "num_hidden_layers 4: the language model, .*, has 3"),
        ({"expert_cfg": {"head_dim": 8}}, "head_dim 8: the language model, whose KV cache"),
        ({"expert_cfg": {"rope_theta": 5.0}}, "expert_cfg: rope_theta 5.0: supported: hidden_size, "),
        (
            {"expert_cfg": {"hidden_size": 40}},
            r"tensor 'action_in_proj.* has shape .* but by the config it is",
        ),
        (
            {"traj_vocab_size": 61},
            r"lm_head.weight' has shape \[354, 48\], but by the config it is \[355, 48\]",
        ),
        ({"action_in_proj_cfg": {"num_fourier_feats": 11}}, "num_fourier_feats 11: expected an even number"),
        ({"model_dtype": "int8"}, "model_dtype 'int8': supported: float32, float16, bfloat16"),
    ],
)
def test_what_would_be_computed_differently_is_refused(plan, changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_the_missing_files_of_the_language_model_are_named(checkpoint, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, copy)
    (copy / "vlm" / "tokenizer.json").unlink()
    message = r"vlm/tokenizer\.json not found: .* hf download nvidia/Cosmos-Reason2-8B config\.json .*/vlm$"
    with pytest.raises(FileNotFoundError, match=message):
        plan_export(copy, ExportOptions())
