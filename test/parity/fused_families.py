# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of every dense family for the fused kernels, and their logits.

The sizes are those that the kernels take, and the logits are those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from qwen_vl_reference import save_random_weights
from safetensors.torch import load_file, save_file
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint
from fixtures.reference_inputs import make_image, make_sound
from fixtures.tiny_checkpoint import make_tokenizer, write_json, write_tiny_checkpoint

# Families of the same kernels have the same sizes here, so that these are compiled once.
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "vocab_size": 312,  # the tokenizers have up to 306 tokens
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN2 = {**SIZES, "head_dim": 64}
QWEN3 = {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
OTHERS = {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
QWEN3_5 = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 312,
    "tie_word_embeddings": False,
}
NEMOTRON_H = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "hybrid_override_pattern": "M-M*-M",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 80,  # as Nemotron Nano has it: not a multiple of 32
    "n_groups": 2,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "use_bias": False,
    "vocab_size": 312,
}
IMAGE, SOUND = make_image(48, 64), Sound(make_sound(1.3, 16000), 16000)
UNSAID = ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>", "<|audio_start|>")


@dataclass(frozen=True)
class Family:
    """A dense family.

    write: writes a checkpoint to a new directory; model: class of transformers.
    """

    write: Callable[[Path], Any]
    model: str
    sees: bool = False
    hears: bool = False

    def request(self, prompt: str, **options: Any) -> LLMGenerationRequest:
        """Make a request with an image and a sound, if the family takes them."""
        images, audio = (IMAGE,) if self.sees else (), (SOUND,) if self.hears else ()
        return LLMGenerationRequest(prompt, images=images, audio=audio, **options)


def write_vision_model(write: Callable[[Path], Any], model: str, text: dict, directory: Path) -> None:
    """Write one of Qwen's models that see, with other sizes of the text model."""
    write(directory)
    config = json.loads((directory / "config.json").read_text())
    pad = config["text_config"]["pad_token_id"]
    # transformers would write ids of Qwen's own vocabulary
    config["text_config"] |= {"bos_token_id": pad, "eos_token_id": pad, **text}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    if "audio_config" in config:
        config["audio_config"]["output_dim"] = text["hidden_size"]
    pairs = text["head_dim"] // 2
    config["text_config"]["rope_parameters"]["mrope_section"] = [pairs - 2 * (pairs // 3), *[pairs // 3] * 2]
    write_json(directory / "config.json", config)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    save_random_weights(getattr(transformers, model), directory, seed=0)
    silence(directory)


def write_internvl(text: dict, directory: Path) -> None:
    """Write an InternVL checkpoint."""
    write_internvl_checkpoint(directory, text=text)
    silence(directory)


def write_hybrid(write: Callable[..., Path], sizes: dict, directory: Path) -> None:
    """Write a hybrid whose weights are all of fp16.

    Those that stay in fp32 in an engine are rounded here too.
    """
    write(directory, **sizes)
    silence(directory)
    for path in directory.glob("*.safetensors"):
        tensors = {name: tensor.half().float() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def silence(directory: Path) -> None:
    """Let no answer have placeholders of images and sounds.

    transformers would look for what they stand for.
    """
    tokenizer = make_tokenizer()
    ids = [tokenizer.token_to_id(name) for name in UNSAID]
    ids += range(tokenizer.get_vocab_size(), SIZES["vocab_size"])  # added tokens, and the padding
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        tensors["lm_head.weight"][ids] = 0
        save_file(tensors, path, metadata={"format": "pt"})


def text_family(model_type: str, sizes: dict) -> Family:
    """Return a family of models that only read."""
    write = partial(write_decoder_checkpoint, model_type=model_type, **sizes)
    return Family(write, "AutoModelForCausalLM")


def vision_family(write: Callable[[Path], Any], model: str, text: dict, **options: Any) -> Family:
    """Return a family of Qwen's models that see."""
    return Family(partial(write_vision_model, write, model, text), model, sees=True, **options)


OMNI, INTERNVL = "Qwen3OmniMoeThinkerForConditionalGeneration", "InternVLForConditionalGeneration"
write_thinker = partial(write_tiny_checkpoint, action_expert=False, shards=1, videos=True)
FAMILIES = {
    "qwen2": text_family("qwen2", QWEN2),  # windows
    "qwen3": text_family("qwen3", QWEN3),  # windows
    "llama": text_family("llama", {**SIZES, **OTHERS, "tie_word_embeddings": True}),
    "mistral": text_family("mistral", {**SIZES, **OTHERS}),  # a window in every layer
    "qwen2_5_vl": vision_family(write_qwen2_5_vl_checkpoint, "Qwen2_5_VLForConditionalGeneration", QWEN2),
    "qwen3_vl": vision_family(write_qwen3_vl_checkpoint, "Qwen3VLForConditionalGeneration", QWEN3),
    "qwen3_omni": vision_family(write_thinker, OMNI, QWEN3, hears=True),
    "qwen3_5": Family(partial(write_hybrid, write_qwen3_5_checkpoint, QWEN3_5), "Qwen3_5ForCausalLM"),
    "nemotron_h": Family(
        partial(write_hybrid, write_nemotron_h_checkpoint, NEMOTRON_H), "NemotronHForCausalLM"
    ),
    "internvl-qwen2": Family(partial(write_internvl, QWEN2), INTERNVL, sees=True),
    "internvl-qwen3": Family(partial(write_internvl, {**QWEN3, "model_type": "qwen3"}), INTERNVL, sees=True),
}


def load_half(family: Family, checkpoint: Path) -> Any:
    """Load transformers' model in fp32 with the weights of an engine in fp16."""
    loaded, info = getattr(transformers, family.model).from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for parameter in loaded.parameters():
        parameter.data = parameter.data.half().float()
    return loaded.eval().requires_grad_(False)


def logits_after(
    family: Family, checkpoint: Path, model: Any, prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """Compute the logits [tokens,V] that each token of an answer is chosen from.

    The answer is one to `Family.request`.
    """
    ids = torch.tensor([prompt + answer])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.model == INTERNVL:
        processor = GotOcr2ImageProcessorPil.from_pretrained(checkpoint)
        inputs["pixel_values"] = processor(IMAGE, crop_to_patches=True, return_tensors="pt")["pixel_values"]
    elif family.sees:
        processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        inputs |= processor(IMAGE, return_tensors="pt")
        if not family.hears:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    if family.hears:
        extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
        heard = extractor(
            SOUND.samples, sampling_rate=16000, padding=True, truncation=False, return_tensors="pt"
        )
        inputs["input_features"] = heard["input_features"]
        inputs["feature_attention_mask"] = torch.ones(1, heard["input_features"].shape[2], dtype=torch.long)
    with torch.no_grad():
        return model(**inputs).logits[0, len(prompt) - 1 : -1].double()
