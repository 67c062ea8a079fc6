# SPDX-License-Identifier: Apache-2.0
"""Conversations with videos: checkpoints, prompts and answers.

Prompts and answers are by transformers and by the runtime.

transformers' video processors resize and normalise with torchvision, whose wheels do not run beside a PyTorch
for CPUs. Here they resize with Pillow, as the runtime does, and that differs by up to 2 of a pixel's 256
values; everything else is transformers' own code.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from greedy_answers import TOKENS, check_greedy_answer
from PIL import Image
from qwen_vl_reference import Exported
from transformers import image_processing_backends
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from edgellm_ros.multimodal.video import Video
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart, VideoPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.pixel_values import group_pixel_values
from fixtures.reference_inputs import make_image
from fixtures.tiny_checkpoint import write_json

COMPARED_ANSWERS = 2  # of a batch; an answer by transformers takes a second
FILE_FPS = 10.0  # of the file that the frames are said to come from

# Its module imports torchvision, and uses it in the methods of TorchvisionBackend that are replaced below.
_NAMES = ["torchvision"]
for _part in ("transforms", "v2", "functional"):
    _NAMES.append(f"{_NAMES[-1]}.{_part}")
with mock.patch.dict(sys.modules, {name: types.ModuleType(name) for name in _NAMES}):
    for _parent, _child in itertools.pairwise(_NAMES):
        setattr(sys.modules[_parent], _child.rpartition(".")[2], sys.modules[_child])
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

CLASSES = {
    "qwen3_vl": (transformers.Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3_5": (transformers.Qwen3VLProcessor, Qwen3VLVideoProcessor),
}


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **others: Any) -> torch.Tensor:
    frames = image.flatten(0, -4).permute(0, 2, 3, 1).numpy()
    target = (size.width, size.height)
    resized = np.stack([np.asarray(Image.fromarray(frame).resize(target, resample)) for frame in frames])
    return torch.from_numpy(resized).permute(0, 3, 1, 2).unflatten(0, image.shape[:-3])


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **others: Any) -> torch.Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let transformers' video processors resize with Pillow."""
    with (
        mock.patch.object(image_processing_backends.TorchvisionBackend, "resize", _resize),
        mock.patch.object(image_processing_backends.TorchvisionBackend, "normalize", _normalize),
    ):
        yield


def write_video_processor(directory: Path, seed: int) -> None:
    """Write a video processor with random limits, in one of the forms of checkpoints.

    The form without a file of its own is that of Qwen2.5-VL: the image processor's file serves both.
    """
    rng = np.random.default_rng(100 + seed)
    config = json.loads((directory / "config.json").read_text())
    tower, family = config["vision_config"], config["model_type"]
    area = (tower["patch_size"] * tower["spatial_merge_size"]) ** 2
    path = directory / "processor_config.json"
    if path.is_file():
        processors = json.loads(path.read_text())
    else:
        processors = {"image_processor": json.loads((directory / "preprocessor_config.json").read_text())}
    keys = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    video = {key: processors["image_processor"][key] for key in keys}
    video["video_processor_type"] = CLASSES[family][1].__name__
    frames = 1 if family == "qwen2_5_vl" else 8  # the limits of Qwen3-VL are of all frames together
    low, high = int(rng.integers(2, 6)), int(rng.integers(6, 12))
    video["size"] = {"shortest_edge": low * area * frames, "longest_edge": high * area * frames}
    if seed % 3 == 1:
        video |= {"cap_pixels_per_frame": True, "max_video_tokens": int(rng.integers(3, 60))}
    if seed % 4 == 2 and family == "qwen2_5_vl":
        del video["size"]
        video |= {"min_pixels": low * area, "max_pixels": high * area}
    if path.is_file():
        write_json(path, {**processors, "video_processor": video})
    elif seed % 4 or family != "qwen2_5_vl":
        write_json(directory / "video_preprocessor_config.json", video)


def make_processor(checkpoint: Path) -> Any:
    """Make transformers' processor of a checkpoint."""
    whole, _ = CLASSES[json.loads((checkpoint / "config.json").read_text())["model_type"]]
    settings, _ = Qwen2VLVideoProcessor.get_video_processor_dict(checkpoint)
    # AutoVideoProcessor's choice: without a type, the class of the image processor's name.
    name = settings.get("video_processor_type", "Qwen2VLVideoProcessor")
    video = next(each for _, each in CLASSES.values() if each.__name__ == name)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    template = (checkpoint / "chat_template.jinja").read_text()
    with mock.patch.object(whole, "check_argument_for_proper_class"):  # which looks for torchvision
        return whole(
            image_processor=Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
            tokenizer=tokenizer,
            video_processor=video.from_pretrained(checkpoint),
            chat_template=template,
        )


def make_video(seed: int, frames: int, height: int, width: int) -> tuple[Video, VideoMetadata]:
    """Make frames from random places of a file of FILE_FPS."""
    rng = np.random.default_rng(seed)
    indices = np.cumsum(rng.integers(1, 9, frames)).tolist()
    metadata = VideoMetadata(indices[-1] + int(rng.integers(1, 9)), fps=FILE_FPS, frames_indices=indices)
    still = make_image(height, width)
    pictures = [np.roll(still, int(rng.integers(height * width)), (0, 1)) for _ in indices]
    times = [index / FILE_FPS for index in indices]
    return Video(pictures, times, fps=metadata.sampled_fps), metadata


def reference_inputs(processor: Any, request: LLMGenerationRequest, metadata: list[VideoMetadata]) -> Any:
    """Return the model's inputs that transformers' processor makes of a conversation."""
    names = {TextPart: "text", ImagePart: "image", VideoPart: "video"}
    conversation = [
        {
            "role": message.role,
            "content": [
                {"type": names[type(part)], "text": getattr(part, "text", "")} for part in message.parts
            ],
        }
        for message in request.messages
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    given = {"images": list(request.prompt_images)} if request.prompt_images else {}
    if request.prompt_videos:
        copies = [VideoMetadata(**dict(each)) for each in metadata]  # the processor changes frames_indices
        for copy in copies:
            copy.frames_indices = list(copy.frames_indices)
        given["videos"] = [np.stack(video.frames) for video in request.prompt_videos]
        given["videos_kwargs"] = {
            "video_metadata": copies,
            "do_sample_frames": False,
            "do_convert_rgb": False,  # a function of torchvision
        }
    with without_torchvision():
        return processor(text=[text], return_tensors="pt", **given)


def check_videos(exported: Exported, device: Any) -> None:
    """Check a batch of conversations.

    Prompts, pixels and positions of all are compared, and greedy tokens and log-probabilities of the first
    COMPARED_ANSWERS.
    """
    processor, cases = make_processor(exported.checkpoint), make_cases(seed=1)
    with LLMInferenceRuntime(exported.engine, device) as runtime:
        found = runtime.handle_request([request for request, _ in cases])
        sequences = runtime.pipeline.prepare([request for request, _ in cases], 0)
        videos = runtime.pipeline.vision.videos
        for index, (request, metadata) in enumerate(cases):
            sequence = sequences[index]
            inputs = reference_inputs(processor, request, metadata)
            assert sequence.token_ids == inputs["input_ids"][0].tolist()
            pixels = [
                group_pixel_values(videos, video, group)
                for video, layout in zip(request.prompt_videos, sequence.videos, strict=True)
                for group in range(layout.grid.groups)
            ]
            if pixels:
                np.testing.assert_array_equal(np.concatenate(pixels), inputs["pixel_values_videos"].numpy())
            check_positions(exported.model, inputs, sequence.positions, sequence.rope_delta)
            if index < COMPARED_ANSWERS:
                check_greedy_answer(found[index], exported.model, inputs)


def check_positions(model: Any, inputs: Any, positions: np.ndarray, delta: int) -> None:
    """Check positions against those of the model's `get_rope_index`."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    given = {name: inputs[name] for name in names if name in inputs}
    expected, expected_delta = model.model.get_rope_index(**given)
    np.testing.assert_array_equal(positions, expected[:, 0])
    assert delta == int(expected_delta)


def make_cases(seed: int) -> list[tuple[LLMGenerationRequest, list[VideoMetadata]]]:
    """Make a batch of conversations with videos.

    There are an odd number of frames, videos beside images, and several turns.
    """
    rng = np.random.default_rng(seed)
    sizes = [(48, 64), (131, 33), (20, 150), (7, 90)]
    videos = [make_video(10 * seed + i, int(rng.integers(2, 6)), *sizes[i]) for i in range(4)]
    image = ImagePart(make_image(50, 40))
    (odd, odd_data), *others = [make_video(seed, 3, 40, 70), *videos]
    parts = [VideoPart(video) for video, _ in others]
    question = TextPart("go there")
    conversations = [
        ([Message("user", [VideoPart(odd), question])], [odd_data]),
        (
            [
                Message("user", [parts[0], image, TextPart("then"), parts[1]]),
                Message("assistant", "ok"),
                Message("user", [image, question]),
            ],
            [others[0][1], others[1][1]],
        ),
        ([Message("user", [image, question])], []),
        ([Message("user", [parts[2], parts[3]])], [others[2][1], others[3][1]]),
    ]
    sampling = SamplingParams(max_tokens=TOKENS)
    return [
        (LLMGenerationRequest(messages=messages, sampling=sampling, logprobs=5), metadata)
        for messages, metadata in conversations
    ]


def processor_arguments(processor: Any, request: LLMGenerationRequest) -> dict[str, Any]:
    """Return arguments of transformers' processor for a conversation.

    Images, sounds, and videos of one rate are taken.
    """
    kinds = {TextPart: "text", ImagePart: "image", VideoPart: "video", AudioPart: "audio"}
    conversation = [
        {
            "role": message.role,
            "content": [
                {"type": kinds[type(part)], "text": getattr(part, "text", "")} for part in message.parts
            ],
        }
        for message in request.messages
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    images, videos, sounds = request.prompt_images, request.prompt_videos, request.prompt_audio
    given: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
    if images:
        given["images"] = list(images)
    if videos:
        given["videos"] = [np.stack(video.frames) for video in videos]
        given["videos_kwargs"] = {
            "fps": videos[0].fps,
            "do_sample_frames": False,
            "do_convert_rgb": False,  # a function of torchvision
        }
    if sounds:
        given["audio"] = [sound.samples for sound in sounds]
    return given
