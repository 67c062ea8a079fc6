# SPDX-License-Identifier: Apache-2.0
"""Prompts, positions and answers of conversations are those of transformers.

The conversations have images and sounds between the words.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, Part, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.reference_inputs import make_image, make_sound

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

TOLERANCE = 1e-3
SOUND, LOUDER = (Sound(make_sound(1.1, 16000, loudness), 16000) for loudness in (0.1, 0.8))


def one(thinker) -> ImagePart:
    trained = thinker.processor.size["shortest_edge"] == 71680
    return ImagePart(make_image(224, 320) if trained else make_image(48, 64))


def other(thinker) -> ImagePart:
    trained = thinker.processor.size["shortest_edge"] == 71680
    return ImagePart(make_image(320, 224) if trained else make_image(96, 33))


# Turns of user and assistant in alternation, each a list of words, images and sounds.
CONVERSATIONS = {
    "images in two turns": [[one, "what is this?"], ["a box"], [other, "and this?"]],
    "image after words": [["look:", one, "there"], ["yes"], ["go"]],
    "image and sounds between words": [["a", SOUND, "b", one, LOUDER, "c"], ["d"], [SOUND, "e"]],
    "images one after the other": [[one, other, one], ["ok"], ["which is first?"]],
}


@pytest.fixture(scope="module")
def runtime(checkpoint, tmp_path_factory, runtime_device):
    from edgellm_ros.builder import export

    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory, max_input_len=640, max_kv_cache_capacity=704)
    with LLMInferenceRuntime(directory, runtime_device) as runtime:
        yield runtime


@pytest.fixture(params=CONVERSATIONS)
def both(request, thinker):
    """The reference's prompt, and the same request for the runtime."""
    messages, theirs, images, sounds = [], [], [], []
    turns = CONVERSATIONS[request.param]
    for index, turn in enumerate(turns):
        role = "assistant" if index % 2 else "user"
        parts: list[Part] = []
        items: list[dict] = []
        for item in turn:
            if isinstance(item, str):
                parts.append(TextPart(item))
                items.append({"type": "text", "text": item})
            elif isinstance(item, Sound):
                parts.append(AudioPart(item))
                items.append({"type": "audio"})
                sounds.append(item.samples)
            else:
                parts.append(item(thinker))
                items.append({"type": "image"})
                images.append(parts[-1].image)
        if index == len(turns) - 1:  # our choice: the history follows the first images of the last message
            place = next((i for i, item in enumerate(items) if item["type"] != "image"), len(items))
            items.insert(place, {"type": "trajectory_history"})
        messages.append(Message(role, parts))
        theirs.append({"role": role, "content": items})
    prompt = thinker.conversation(theirs, images, sounds=sounds)
    sampling = SamplingParams(max_tokens=16)
    return prompt, LLMGenerationRequest(messages=messages, sampling=sampling, logprobs=8)


def test_prompt_and_positions_are_the_reference_s(thinker, runtime, both):
    prompt, request = both
    (sequence,) = runtime.pipeline.preparer.prepare([request], 0)
    positions, delta = thinker.positions(prompt)
    assert sequence.token_ids == prompt.input_ids[0].tolist()
    np.testing.assert_array_equal(sequence.positions, positions[:, 0])
    assert sequence.rope_delta == delta


def test_the_runtime_answers_as_the_reference(thinker, runtime, both):
    prompt, request = both
    answer = thinker.answer(prompt, request.sampling.max_tokens)
    expected = torch.log_softmax(answer.logits.double(), dim=-1).numpy()
    for _ in range(2):  # the second time with rows of the prefix cache
        response = runtime.handle_request(request)
        assert response.token_ids == answer.token_ids
        for entries, row in zip(response.logprobs, expected, strict=True):
            for token, value in entries:
                assert abs(value - row[token]) <= TOLERANCE
