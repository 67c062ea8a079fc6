# SPDX-License-Identifier: Apache-2.0
"""Hearing against transformers: features, rows, logits and greedy tokens.

Features are within 1e-4, rows and logits within 1e-3, and greedy tokens are equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.reference_inputs import make_image, make_sound

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import soxr  # noqa: E402
from engine_graphs import Encoders, LanguageModel  # noqa: E402
from thinker_reference import Prompt, ThinkerReference  # noqa: E402
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.audio.processor import AudioProcessor  # noqa: E402
from edgellm_ros.multimodal.audio.runner import AudioRunner  # noqa: E402
from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.tiny_checkpoint import write_tiny_checkpoint  # noqa: E402
from fixtures.whisper_features import WHISPER  # noqa: E402

FEATURES_TOLERANCE = 1e-4
TOLERANCE = 1e-3
SIZES = {
    "tiny": {},
    "small": {
        "d_model": 192,
        "encoder_layers": 4,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 768,
        "downsample_hidden_size": 48,
        "n_window_infer": 800,
    },
}


@pytest.fixture(scope="module", params=[*SIZES, "trained"])
def checkpoint(request, tmp_path_factory):
    if request.param != "trained":
        return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), audio=SIZES[request.param])
    trained = request.getfixturevalue("trained_checkpoint")
    if "feature_extractor_type" not in (trained / "preprocessor_config.json").read_text():
        pytest.skip(f"{trained} has no audio encoder")
    return trained


@pytest.fixture(scope="module")
def thinker(checkpoint) -> ThinkerReference:
    return ThinkerReference(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture(scope="module")
def runtime(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


def sound(seconds: float) -> np.ndarray:
    return make_sound(seconds, 16000)


@pytest.mark.parametrize("loudness", [1e-4, 0.03, 1.0, 3.0])
@pytest.mark.parametrize("sample_rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("seconds", [0.013, 0.5, 1.0, 2.347, 11.0])
def test_features_are_those_of_the_extractor(seconds, sample_rate, loudness):
    samples = make_sound(seconds, sample_rate, loudness)
    found = AudioProcessor(WHISPER).process(Sound(samples, sample_rate))
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    resampled = soxr.resample(samples, sample_rate, 16000)
    expected = extractor(resampled, sampling_rate=16000, padding=True, truncation=False)["input_features"][0]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=FEATURES_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["silence", "clipped noise", "click", "tone", "16 bit"])
def test_features_of_odd_sounds_are_those_of_the_extractor(kind):
    time = np.arange(24000) / 16000
    samples = {
        "silence": np.zeros(24000),
        "clipped noise": np.clip(np.random.default_rng(0).normal(0, 5, 24000), -1, 1),
        "click": np.eye(1, 24000, 9000)[0],
        "tone": np.sin(2 * np.pi * 440 * time),
        "16 bit": np.round(np.sin(2 * np.pi * 120 * time) * 99) / 32768,
    }[kind].astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    expected = extractor(samples, sampling_rate=16000, padding=True, truncation=False)["input_features"][0]
    found = AudioProcessor(WHISPER).process(Sound(samples, 16000))
    np.testing.assert_allclose(found, expected, atol=FEATURES_TOLERANCE, rtol=0)


LENGTHS = [0.013, 0.15, 0.995, 1.0, 1.01, 3.3, 8.0, 8.03, 12.5]


@pytest.mark.parametrize("seconds", LENGTHS)
def test_the_graph_alone_makes_the_reference_s_rows_of_its_inputs(thinker, engine, seconds):
    prompt = thinker.prompt("", sounds=[sound(seconds)])
    found = Encoders(engine).audio(thinker, prompt)
    np.testing.assert_allclose(found, thinker.audio(prompt), atol=TOLERANCE, rtol=0)


def test_the_graph_also_takes_several_sounds_as_the_reference_packs_them(thinker, engine):
    prompt = thinker.prompt("", sounds=[sound(1.3), sound(0.4), sound(9.1)])
    found = Encoders(engine).audio(thinker, prompt)
    np.testing.assert_allclose(found, thinker.audio(prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("seconds", LENGTHS)
def test_the_runner_makes_the_reference_s_rows_of_a_sound(thinker, engine, seconds, pads):
    device, config = CpuDevice(), EngineConfig.load(engine)
    executor = EngineExecutor.open(engine / "audio" / "model.onnx", device)
    runner = AudioRunner(executor, config.audio, device, config.builder.max_input_len, pads)
    expected = thinker.audio(thinker.prompt("", sounds=[sound(seconds)])).numpy()
    one = Sound(sound(seconds), 16000)
    rows = device.empty((runner.num_tokens(one), config.llm.hidden_size), np.float32)
    runner.encode(one, rows)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(device.download(rows), expected, atol=TOLERANCE, rtol=0)


def make_runner(engine):
    device, config = CpuDevice(), EngineConfig.load(engine)
    executor = EngineExecutor.open(engine / "audio" / "model.onnx", device)
    return AudioRunner(executor, config.audio, device, config.builder.max_input_len), config, device


def processed_together(thinker, sounds):
    """Return the mask of the features of several sounds, and the rows of the sounds.

    The checkpoint's own processor and encoder make them of all sounds together.
    """
    arguments = {"padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
    made = thinker.extractor(sounds, sampling_rate=16000, **arguments)
    features, mask = made["input_features"], made["attention_mask"]
    return mask, thinker.audio(Prompt(None, None, None, features, mask)).numpy()


@pytest.mark.parametrize("lengths", [(0.9, 2.0), (1.1, 4.2), (0.4, 0.7)])
def test_rows_of_a_sound_do_not_depend_on_other_sounds_of_the_prompt(thinker, engine, lengths):
    """Every sound has the rows that the reference makes of that sound alone.

    To encode each sound alone is a choice of multimodal/audio/runner.py. The reference pads the sounds of a
    prompt to the longest. Its own rows of the shorter one then differ from what it makes of that sound alone,
    which is seen here; those of the longest do not.
    """
    runner, config, device = make_runner(engine)
    sounds = [sound(seconds) for seconds in lengths]
    _, together = processed_together(thinker, sounds)
    start = 0
    for samples in sounds:
        _, alone = processed_together(thinker, [samples])
        rows = device.empty((runner.num_tokens(Sound(samples, 16000)), config.llm.hidden_size), np.float32)
        runner.encode(Sound(samples, 16000), rows)
        np.testing.assert_allclose(device.download(rows), alone, atol=TOLERANCE, rtol=0)
        changed = np.abs(together[start : start + len(alone)] - alone).max()
        assert (changed > TOLERANCE) == (samples is sounds[0])
        start += len(alone)


def test_the_number_of_rows_of_a_sound_does_not_depend_on_other_sounds_either(thinker, engine):
    """6401 samples are 40 frames, 5 rows.

    Beside a longer sound the reference counts 41 frames, 6 rows.
    """
    runner, *_ = make_runner(engine)
    sounds = [sound(1.0)[:6401], sound(3.0)]
    counts = omni._get_feat_extract_output_lengths
    assert [runner.num_tokens(Sound(samples, 16000)) for samples in sounds] == [5, 39]
    alone = [processed_together(thinker, [samples])[0].sum(-1) for samples in sounds]
    assert [int(counts(frames, 50)) for frames in alone] == [5, 39]
    together, _ = processed_together(thinker, sounds)
    assert counts(together.sum(-1), 50).tolist() == [6, 39]


@pytest.fixture(scope="module")
def image(thinker) -> np.ndarray:
    pixels = thinker.processor.size["shortest_edge"]
    return make_image(224, 320) if pixels == 71680 else make_image(48, 64)


PROMPTS = {  # text, whether there is an image, seconds of each sound
    "spoken": ("", True, [2.2]),
    "spoken and typed": ("go there", True, [3.7]),
    "without image": ("what do you hear?", False, [0.6]),
    "two sounds": ("and now?", True, [1.1, 4.2]),
}


@pytest.fixture(params=PROMPTS)
def both(request, thinker, image):
    """The reference's prompt, and the same request for the runtime."""
    text, has_image, lengths = PROMPTS[request.param]
    sounds = [sound(seconds) for seconds in lengths]
    prompt = thinker.prompt(text, "You drive a robot.", image if has_image else None, sounds=sounds)
    return prompt, LLMGenerationRequest(
        text,
        system_prompt="You drive a robot.",
        images=(image,) if has_image else (),
        audio=tuple(Sound(samples, 16000) for samples in sounds),
        sampling=SamplingParams(max_tokens=24),
        logprobs=8,
    )


def test_prompt_and_positions_are_the_reference_s(thinker, runtime, both):
    prompt, request = both
    (sequence,) = runtime.pipeline.preparer.prepare([request], 0)
    positions, delta = thinker.positions(prompt)
    assert sequence.token_ids == prompt.input_ids[0].tolist()
    np.testing.assert_array_equal(sequence.positions, positions[:, 0])
    assert sequence.rope_delta == delta


def test_prefill_logits_match_at_every_position(thinker, engine, both):
    prompt, _ = both
    wanted = range(prompt.input_ids.shape[1])
    found = LanguageModel(engine).prefill(thinker, Encoders(engine), prompt, wanted)
    np.testing.assert_allclose(found, thinker.prefill_logits(prompt), atol=TOLERANCE, rtol=0)


def test_the_runtime_answers_as_the_reference(thinker, runtime, both):
    prompt, request = both
    answer = thinker.answer(prompt, request.sampling.max_tokens)
    response = runtime.handle_request(request)
    assert response.token_ids == answer.token_ids
    expected = torch.log_softmax(answer.logits.double(), dim=-1).numpy()
    for entries, row in zip(response.logprobs, expected, strict=True):
        for token, value in entries:
            assert abs(value - row[token]) <= TOLERANCE
