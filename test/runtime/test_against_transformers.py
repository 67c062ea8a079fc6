# SPDX-License-Identifier: Apache-2.0
"""Answers against transformers: prompt, image, tokens, log-probabilities."""

import numpy as np
import pytest

from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, request

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def image_processor(tiny_checkpoint):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(tiny_checkpoint)


@pytest.mark.parametrize(
    ("prompt", "images", "system"),
    [
        ("Go to the red box!", (), ""),
        ("what do you see?", (IMAGE,), ""),
        ("stop", (IMAGE, OTHER_IMAGE), "be brief"),
        ("", (OTHER_IMAGE,), ""),
    ],
)
def test_greedy_answers_equal(
    runtime, reference, tokenizer, image_processor, tiny_checkpoint, prompt, images, system
):
    template = (tiny_checkpoint / "chat_template.jinja").read_text()
    content = [
        *({"type": "image"} for _ in images),
        {"type": "trajectory_history"},
        {"type": "text", "text": prompt},
    ]
    messages = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    still = "<|traj_16|>" * 8  # four points, two axes, the middle one of 32 bins: round(15.5)
    text = text.replace("<|traj_history|>", still)
    inputs = {}
    if images:
        inputs = image_processor(list(images), return_tensors="pt")
        for _, height, width in inputs["image_grid_thw"].tolist():
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (height * width // 4), 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    expected = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        max_new_tokens=20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected_ids = expected.sequences[0, ids.shape[1] :].tolist()

    answer = runtime.handle_request(
        request(prompt, images=images, system_prompt=system, max_tokens=20, logprobs=5)
    )
    assert answer.prompt_tokens == ids.shape[1]
    assert answer.token_ids == expected_ids
    for entries, logits in zip(answer.logprobs, expected.logits, strict=True):
        reference_values = logits[0].log_softmax(-1)
        token_ids, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, reference_values[list(token_ids)].numpy(), atol=1e-3)
