# SPDX-License-Identifier: Apache-2.0
"""A speech-to-text checkpoint on disk, in the layout that transformers publishes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ASRForConditionalGeneration

from edgellm_ros.builder.families.qwen3_asr.config import MIN_SAMPLES, TRANSFORMERS
from training.checkpoint import FEATURE_EXTRACTOR, write_json
from training.tokenizer import PAD

# The system turn is always there; texts of the user are left out.
CHAT_TEMPLATE = """\
{%- set ns = namespace(context='', sounds='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' and message.content is string -%}
{%- set ns.context = ns.context + message.content -%}
{%- endif -%}
{%- if message.content is not string -%}
{%- for item in message.content -%}
{%- if item.type == 'text' and message.role == 'system' -%}{%- set ns.context = ns.context + item.text -%}
{%- elif item.type == 'audio' -%}
{%- set ns.sounds = ns.sounds + '<|audio_start|><|audio_pad|><|audio_end|>' -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>system\\n' + ns.context + '<|im_end|>\\n<|im_start|>user\\n' + ns.sounds + '<|im_end|>\\n' }}
{%- for message in messages if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for item in message.content if item.type == 'text' -%}{{ item.text }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def save_speech(directory: Path, model: Qwen3ASRForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write a checkpoint in float16, for transformers and the exporter.

    The model is float16 afterwards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.float16).save_pretrained(directory)
    stops = [tokenizer.token_to_id(PAD), tokenizer.token_to_id("<|im_end|>")]
    write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": stops, "pad_token_id": stops[0]},
    )
    extractor = {
        **FEATURE_EXTRACTOR,
        "feature_extractor_type": TRANSFORMERS.extractor,
        "n_window": model.config.audio_config.n_window,
        "min_length": MIN_SAMPLES,
    }
    write_json(
        directory / "processor_config.json",
        {"processor_class": "Qwen3ASRProcessor", "feature_extractor": extractor},
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": PAD,
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_speech(directory: Path) -> tuple[Qwen3ASRForConditionalGeneration, Tokenizer]:
    """Load a checkpoint in float32 with its tokenizer."""
    model = Qwen3ASRForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))
