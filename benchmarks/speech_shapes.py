# SPDX-License-Identifier: Apache-2.0
"""Sizes of Qwen3-ASR, and checkpoints of these sizes with random weights.

Source of the numbers: the models' public `config.json`. Checkpoints have the layout of transformers, in bf16
as the published ones. The module needs no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from benchmarks.model_shapes import QWEN3_0_6B, ModelShape, Shapes
from benchmarks.random_checkpoint import make_tokenizer, write_shards
from edgellm_ros.engine_directory.tokenizer_file import TRANSCRIPT_MARK

START, SOUND, END = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
WORDS = ("system", "user", "assistant", TRANSCRIPT_MARK)  # one token each, as in the published vocabulary
TEMPLATE = (  # the system turn is always there
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n<|im_start|>user\\n' -}}"
    "{%- for message in messages if message.content is not string -%}"
    "{%- for part in message.content if part.type == 'audio' -%}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}{%- endfor -%}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
FEATURES = {
    "feature_extractor_type": "Qwen3ASRFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": True,
    "n_window": 50,
    "min_length": 8000,
}
MAX_POSITIONS = 65536
PRECISION = "bf16"  # of the checkpoint


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of the audio encoder, named as in its configuration."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    downsample_hidden_size: int = 480
    num_mel_bins: int = 128

    def shards(self, output: int) -> Iterator[Shapes]:
        """Yield the tensors of each file; output: width of a row that is encoded."""
        wide, inner, channels = self.d_model, self.encoder_ffn_dim, self.downsample_hidden_size
        tower = "model.audio_tower"
        shapes: Shapes = {f"{tower}.conv_out.weight": (wide, channels * -(-self.num_mel_bins // 8))}
        for index, fan_in in ((1, 1), (2, channels), (3, channels)):
            shapes |= _affine(f"{tower}.conv2d{index}", (channels, fan_in, 3, 3))
        projector = "model.multi_modal_projector"
        shapes |= _affine(f"{tower}.ln_post", (wide,)) | _affine(f"{projector}.linear_1", (wide, wide))
        yield shapes | _affine(f"{projector}.linear_2", (output, wide))
        for index in range(self.encoder_layers):
            layer = f"{tower}.layers.{index}"
            shapes = _affine(f"{layer}.fc1", (inner, wide)) | _affine(f"{layer}.fc2", (wide, inner))
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes |= _affine(f"{layer}.self_attn.{name}", (wide, wide))
            for name in ("self_attn_layer_norm", "final_layer_norm"):
                shapes |= _affine(f"{layer}.{name}", (wide,))
            yield shapes


@dataclass(frozen=True)
class SpeechShape:
    """Sizes of a model for speech to text."""

    text: ModelShape
    audio: EncoderShape

    def shards(self) -> Iterator[Shapes]:
        """Yield the tensors of each file, by the names in transformers' layout."""
        yield from self.audio.shards(self.text.hidden_size)
        for shard in self.text.shards():
            yield {name.replace("model.", "model.language_model.", 1): size for name, size in shard.items()}

    @property
    def parameters(self) -> int:
        """Return the number of weights; a table that is used twice counts once."""
        return sum(prod(size) for shard in self.shards() for size in shard.values())


SPEECH_SHAPES = {
    "qwen3-asr-0.6b": SpeechShape(QWEN3_0_6B, EncoderShape(896, 18, 14, 3584)),
    "qwen3-asr-1.7b": SpeechShape(
        replace(QWEN3_0_6B, hidden_size=2048, intermediate_size=6144), EncoderShape(1024, 24, 16, 4096)
    ),
}


def parse_speech_shape(text: str) -> SpeechShape:
    """Parse a name of `SPEECH_SHAPES` with optional changes of sizes.

    Example: "qwen3-asr-0.6b,num_hidden_layers=2,encoder_layers=2". ValueError for an unknown name or key, or
    a value that is not a number.
    """
    name, *changes = text.split(",")
    if name not in SPEECH_SHAPES:
        raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(SPEECH_SHAPES)}")
    shape = SPEECH_SHAPES[name]
    sections = {
        part: [key for key, value in asdict(getattr(shape, part)).items() if type(value) is int]
        for part in ("text", "audio")
    }
    for change in changes:
        key, _, value = change.partition("=")
        part = next((part for part, keys in sections.items() if key in keys), None)
        if part is None or not value.isdecimal():
            known = ", ".join(key for keys in sections.values() for key in keys)
            raise ValueError(f"expected KEY=NUMBER with a key of {known}, got {change!r}")
        shape = replace(shape, **{part: replace(getattr(shape, part), **{key: int(value)})})
    return shape


def write_speech_checkpoint(directory: Path, shape: SpeechShape, seed: int = 0) -> Path:
    """Write the checkpoint unless the directory has it already; return the directory.

    No greedy answer stops by itself: the logit of the stop token is 0, which is never the largest.
    """
    config = speech_config(shape) | {"random": {"precision": PRECISION, "seed": seed}}
    config_file = directory / "config.json"
    if config_file.is_file() and json.loads(config_file.read_text()) == config:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for old in (config_file, *directory.glob("*.safetensors*")):
        old.unlink(missing_ok=True)
    ids = token_ids(shape)
    special = {name: token for name, token in ids.items() if name not in WORDS}
    tokenizer = make_tokenizer(shape.text.vocab_size, special, {name: ids[name] for name in WORDS})
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in WORDS])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    processor = {"processor_class": "Qwen3ASRProcessor", "feature_extractor": FEATURES}
    stop = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    for name, contents in (("processor_config.json", processor), ("generation_config.json", stop)):
        (directory / name).write_text(json.dumps(contents))
    write_shards(directory, list(shape.shards()), PRECISION, seed)
    config_file.write_text(json.dumps(config))  # last: an interrupted checkpoint has no config
    return directory


def token_ids(shape: SpeechShape) -> dict[str, int]:
    """Return the ids of the tokens in a prompt: the last ones before the stop token."""
    names = (START, SOUND, END, TURN, TURN_END, *WORDS)
    return {name: shape.text.vocab_size - 1 - len(names) + index for index, name in enumerate(names)}


def speech_config(shape: SpeechShape) -> dict[str, Any]:
    """Make `config.json`."""
    text, stop = asdict(shape.text), shape.text.vocab_size - 1
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_token_id": token_ids(shape)[SOUND],
        "timestamp_token_id": 0,
        "eos_token_id": [stop],
        "pad_token_id": stop,
        "tie_word_embeddings": shape.text.tie_word_embeddings,
        "audio_config": {
            **asdict(shape.audio),
            "model_type": "qwen3_asr_encoder",
            "activation_function": "gelu",
            "max_position_embeddings": 13,
            "n_window": 50,
            "n_window_infer": 800,
            "output_dim": shape.text.hidden_size,
            "scale_embedding": False,
        },
        "text_config": {
            **text,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": MAX_POSITIONS,
        },
    }


def _affine(module: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{module}.weight": shape, f"{module}.bias": shape[:1]}
