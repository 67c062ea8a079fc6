# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoint on disk: a dense Qwen3-Omni thinker and an action expert."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

from training.expert import ExpertDims, FlowExpert
from training.hearing import WordHead, scale_convolutions
from training.policy import Policy
from training.spec import HISTORY
from training.tokenizer import PAD

IMAGE_MEAN_STD = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
SHARD_BYTES = 15_000_000
FEATURE_EXTRACTOR = {  # as published with Qwen3-Omni
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "dither": 0.0,
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif item.type == 'trajectory_history' -%}<|traj_history_start|><|traj_history|><|traj_history_end|>
{%- elif item.type == 'text' -%}{{ item.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def thinker_config(tokenizer: Tokenizer) -> Qwen3OmniMoeThinkerConfig:
    """Return the thinker's configuration; training/README.md explains the sizes."""
    token = tokenizer.token_to_id
    return Qwen3OmniMoeThinkerConfig(
        architectures=["Qwen3OmniMoeThinkerForConditionalGeneration"],
        text_config={
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "pad_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
        },
        vision_config={
            "depth": 6,
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_heads": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 256,
            "num_position_embeddings": 576,
            "deepstack_visual_indexes": [1, 3],
            "hidden_act": "gelu_pytorch_tanh",
        },
        audio_config={
            "d_model": 256,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 640,
            "downsample_hidden_size": 48,
            "output_dim": 256,
            "num_mel_bins": 128,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        audio_token_id=token("<|audio_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        audio_start_token_id=token("<|audio_start|>"),
        audio_end_token_id=token("<|audio_end|>"),
        user_token_id=token("<|im_start|>"),
        tie_word_embeddings=False,
    )


def expert_config(tokenizer: Tokenizer, dims: ExpertDims, action_space: dict) -> dict:
    """Return action_expert/config.json: sizes, action space and trajectory tokens."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    keys += ("head_dim", "rms_norm_eps", "time_embedding_dim", "time_min_period", "time_max_period")
    keys += ("rtc_max_delay",)
    return {
        "architectures": ["FlowMatchingExpert"],
        "model_type": "edgellm_flow_expert",
        **{key: getattr(dims, key) for key in keys},
        "rope_theta": 10000.0,
        "num_denoise_steps": 10,
        "action_space": action_space,
        "trajectory_history": {**HISTORY, "first_token_id": tokenizer.token_to_id("<|traj_0|>")},
        "history_token_id": tokenizer.token_to_id("<|traj_history|>"),
        "future_start_token_id": tokenizer.token_to_id("<|traj_future_start|>"),
    }


def round_to_saved(module: torch.nn.Module) -> None:
    """Give parameters the values that a checkpoint, in float16, has of them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()


def new_thinker(config: Qwen3OmniMoeThinkerConfig) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """Make a thinker with random weights."""
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    scale_convolutions(thinker.model.audio_tower)
    return thinker


def write_json(path: Path, value: dict) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_checkpoint(
    directory: Path,
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    expert: FlowExpert,
    tokenizer: Tokenizer,
    action_space: dict,
) -> None:
    """Write the checkpoint in float16, for transformers and the exporter."""
    directory.mkdir(parents=True, exist_ok=True)
    thinker.to(torch.float16).save_pretrained(directory, max_shard_size=SHARD_BYTES)
    token = tokenizer.token_to_id
    stops = [token("<|im_end|>"), token("<|traj_future_start|>")]
    write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": stops, "pad_token_id": token("<|endoftext|>")},
    )
    mean, std = IMAGE_MEAN_STD
    write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "rescale_factor": 1 / 255,
            "image_mean": mean,
            "image_std": std,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "resample": 3,
            "size": {"shortest_edge": 224 * 320, "longest_edge": 224 * 320},
            **FEATURE_EXTRACTOR,
        },
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    save_expert(directory / "action_expert", expert, expert_config(tokenizer, expert.dims, action_space))


def save_expert(directory: Path, expert: FlowExpert, config: dict) -> None:
    """Write an action expert in float16."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    state = expert.state_dict().items()
    weights = {name: value.detach().to(torch.float16).contiguous().cpu() for name, value in state}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_expert(directory: Path, dtype: torch.dtype = torch.float32) -> FlowExpert:
    """Load the action expert of a checkpoint."""
    config = json.loads((directory / "action_expert" / "config.json").read_text())
    dims = ExpertDims(**{name: config[name] for name in ExpertDims.__dataclass_fields__ if name in config})
    expert = FlowExpert(dims)
    expert.load_state_dict(load_file(directory / "action_expert" / "model.safetensors"))
    return expert.to(dtype).eval()


def load_policy(directory: Path, tokenizer: Tokenizer) -> Policy:
    """Load a whole checkpoint; the word head is not saved and gets random weights."""
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    space = json.loads((directory / "action_expert" / "config.json").read_text())["action_space"]
    words = WordHead(thinker.config.audio_config.output_dim, tokenizer.token_to_id(PAD))
    mean, std = (torch.tensor(space[name]) for name in ("mean", "std"))
    return Policy(thinker, load_expert(directory), words, mean, std)
