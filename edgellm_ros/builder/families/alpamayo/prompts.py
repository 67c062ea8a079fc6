# SPDX-License-Identifier: Apache-2.0
"""Tokens that Alpamayo adds to those of its Qwen3-VL, and its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import (
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    read_tokenizer,
    template_tokens,
)
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.files import SPECIAL_TOKENS_FILE

# In the order of their ids. R1 has other names for the tokens that 1.5 leaves unused.
_SPECIAL = (
    "prompt_start", "prompt_end", "image_start", "_padding_0", "image_end",
    "traj_history_start", "_padding_1", "traj_history_end", "cot_start", "cot_end", "_padding_2",
    "_padding_3", "traj_future_start", "_padding_4", "traj_future_end", "traj_history", "traj_future",
    "image_pad", "_padding_5", "_padding_6", "_padding_7", "_padding_8",
    "route_start", "route_pad", "route_end",
    "question_start", "question_end", "answer_start", "answer_end",
)  # fmt: skip
_OF_R1 = (
    "image_pre_tkn", "traj_history_pre_tkn", "meta_action_start", "meta_action_end", "traj_future_pre_tkn",
    "vectorized_wm", "vectorized_wm_start", "vectorized_wm_end", "vectorized_wm_pre_tkn",
)  # fmt: skip
SPECIAL_TOKENS = {
    "alpamayo1_5": _SPECIAL,
    "alpamayo_r1": tuple(
        _OF_R1[int(name.removeprefix("_padding_"))] if name.startswith("_padding_") else name
        for name in _SPECIAL
    ),
}
MAX_TRAJECTORY_TOKENS = 100_000
# What the published inference writes. A text of the user takes the place of the last sentence.
TEMPLATE = """
{%- macro write(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'trajectory_history' -%}
{{- '<|traj_history_start|><|traj_history|><|traj_history_end|>' -}}
{%- elif part.type == 'navigation' -%}{{- '<|route_start|>' + part.text + '<|route_end|>' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\n' -}}
{{- 'You are a driving assistant that generates safe and accurate actions.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + write(message.content) -}}
{%- if message.role == 'user' and loop.last and (not message.content or (message.content is not string
       and (message.content[-1].type != 'text' or not message.content[-1].text))) -%}
{{- 'output the chain-of-thought reasoning of the driving process, then output the future trajectory.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<|cot_start|>' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an Alpamayo."""

    tokenizer: Tokenizer  # with the tokens that Alpamayo adds
    template_tokens: dict[str, str]  # of the Qwen3-VL
    trajectory_tokens: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of tokens, which is that of rows of the embedding table."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def id(self, name: str) -> int:
        """Return the id of a special token, such as traj_history."""
        token = self.tokenizer.token_to_id(f"<|{name}|>")
        assert token is not None
        return token


def read_vocabulary(vlm: Path, config: ConfigSection) -> Vocabulary:
    """Read the tokenizer of the Qwen3-VL, and add the tokens of Alpamayo."""
    tokenizer, count = (
        read_tokenizer(vlm / TOKENIZER_FILE),
        config.size("traj_vocab_size", most=MAX_TRAJECTORY_TOKENS),
    )
    config.one_of("add_special_tokens", [True])
    names = [f"<i{number}>" for number in range(count)]
    if tokenizer.add_tokens(names) != count:
        raise ValueError(
            f"{vlm / TOKENIZER_FILE}: has trajectory tokens already, expected that of a Qwen3-VL"
        )
    special = SPECIAL_TOKENS[config.text("model_type")]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in special])
    first = tokenizer.token_to_id(names[0])
    assert first is not None
    return Vocabulary(tokenizer, template_tokens(vlm), tuple(range(first, first + count)))


def prompt_files(vocabulary: Vocabulary, where: str) -> dict[str, bytes]:
    """Return tokenizer, chat template and special tokens: file name -> contents."""
    tokens = vocabulary.template_tokens
    ChatTemplate.of(where, TEMPLATE, tokens)
    special = json.dumps(tokens, indent=2, ensure_ascii=False)
    return {
        TOKENIZER_FILE: vocabulary.tokenizer.to_str().encode(),
        TEMPLATE_FILE: TEMPLATE.encode(),
        SPECIAL_TOKENS_FILE: f"{special}\n".encode(),
    }
