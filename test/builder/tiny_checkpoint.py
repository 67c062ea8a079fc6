# SPDX-License-Identifier: Apache-2.0
"""A whole checkpoint in Hugging Face format with random weights, small enough for unit tests; needs no
PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|audio_start|>",
    "<|audio_pad|>",
    "<|audio_end|>",
    "<|video_pad|>",
    "<|traj_history_start|>",
    "<|traj_history|>",
    "<|traj_history_end|>",
    "<|traj_future_start|>",
]
NUM_TRAJECTORY_TOKENS = 32
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for item in m.content %}"
    "{% if item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif item.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif item.type == 'trajectory_history' %}<|traj_history_start|><|traj_history|><|traj_history_end|>"
    "{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_checkpoint(
    directory: Path,
    seed: int = 0,
    action_expert: bool = True,
    shards: int = 2,
    audio: dict | None = None,
    audio_weights: bool = True,
) -> Path:
    """Write the checkpoint and return its directory. The same seed gives the same weights.

    `audio`: what the audio tower's config has instead of the tiny sizes. Without `audio_weights` there is a
    config of the audio tower and nothing else of it, as in checkpoints that cannot hear.
    """
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = thinker_config(tokenizer)
    config["audio_config"] |= audio or {}
    ids = {name: tokenizer.token_to_id(name) for name in CONTROL_TOKENS}
    write_json(directory / "config.json", config)
    processor = preprocessor_config(config) | (feature_extractor_config(config) if audio_weights else {})
    write_json(directory / "preprocessor_config.json", processor)
    stop = [ids["<|im_end|>"], ids["<|traj_future_start|>"]]
    write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": stop})
    tensors = random_tensors(thinker_shapes(config), rng)
    expert_config = action_expert_config(config, tokenizer)
    expert_tensors = random_tensors(expert_shapes(expert_config), rng)
    if audio_weights:
        tensors |= random_tensors(audio_shapes(config), rng)
    _write_shards(directory, tensors, shards)
    if action_expert:
        expert = directory / "action_expert"
        expert.mkdir(exist_ok=True)
        write_json(expert / "config.json", expert_config)
        save_file(expert_tensors, expert / "model.safetensors")
    return directory


def make_tokenizer() -> Tokenizer:
    """Bytes as tokens, then the control tokens and the trajectory bins."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = CONTROL_TOKENS + [f"<|traj_{i}|>" for i in range(NUM_TRAJECTORY_TOKENS)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def thinker_config(tokenizer: Tokenizer) -> dict:
    return {
        "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
        "model_type": "qwen3_omni_moe_thinker",
        "tie_word_embeddings": False,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "audio_token_id": tokenizer.token_to_id("<|audio_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "audio_start_token_id": tokenizer.token_to_id("<|audio_start|>"),
        "audio_end_token_id": tokenizer.token_to_id("<|audio_end|>"),
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "num_experts": 0,
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 48,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "encoder_layers": 2,
            "encoder_attention_heads": 3,
            "encoder_ffn_dim": 40,
            "d_model": 24,
            "downsample_hidden_size": 4,
            "output_dim": 48,
            "num_mel_bins": 128,
            "n_window": 50,
            "n_window_infer": 200,
        },
    }


def preprocessor_config(config: dict, pixels: int = 64 * 48) -> dict:
    vision = config["vision_config"]
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "resample": 3,
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
    }


def feature_extractor_config(config: dict) -> dict:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["audio_config"]["num_mel_bins"],
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
    }


def action_expert_config(config: dict, tokenizer: Tokenizer) -> dict:
    text = config["text_config"]
    return {
        "architectures": ["FlowMatchingExpert"],
        "model_type": "edgellm_flow_expert",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": text["num_hidden_layers"],
        "num_attention_heads": 4,
        "num_key_value_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "rms_norm_eps": 1e-6,
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "time_embedding_dim": 16,
        "time_min_period": 0.004,
        "time_max_period": 4.0,
        "num_denoise_steps": 4,
        "action_space": {
            "type": "unicycle",
            "names": ["acceleration", "curvature"],
            "units": ["m/s^2", "1/m"],
            "dt": 0.1,
            "horizon": 6,
            "mean": [0.0, 0.1],
            "std": [0.5, 1.0],
            "low": [-1.5, -2.5],
            "high": [1.0, 2.5],
        },
        "trajectory_history": {
            "num_points": 4,
            "dt": 0.1,
            "axes": ["x", "y"],
            "low": [-1.0, -1.0],
            "high": [1.0, 1.0],
            "num_tokens": NUM_TRAJECTORY_TOKENS,
            "first_token_id": tokenizer.token_to_id("<|traj_0|>"),
        },
        "history_token_id": tokenizer.token_to_id("<|traj_history|>"),
        "future_start_token_id": tokenizer.token_to_id("<|traj_future_start|>"),
    }


def thinker_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of the text model and the vision tower."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, inner, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (text["vocab_size"], hidden),
    }
    for i in range(text["num_hidden_layers"]):
        layer = _decoder_layer(hidden, inner, q, kv, size)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    wide, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = wide * vision["spatial_merge_size"] ** 2
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    shapes["visual.pos_embed.weight"] = (vision["num_position_embeddings"], wide)
    shapes |= _affine("visual.patch_embed.proj", (wide, *patch))
    for i in range(vision["depth"]):
        block = f"visual.blocks.{i}"
        shapes |= _affine(f"{block}.norm1", (wide,)) | _affine(f"{block}.norm2", (wide,))
        shapes |= _affine(f"{block}.attn.qkv", (3 * wide, wide)) | _affine(f"{block}.attn.proj", (wide, wide))
        shapes |= _affine(f"{block}.mlp.linear_fc1", (inner, wide)) | _affine(
            f"{block}.mlp.linear_fc2", (wide, inner)
        )
    mergers = {"visual.merger": wide}
    mergers |= {f"visual.merger_list.{i}": merged for i in range(len(vision["deepstack_visual_indexes"]))}
    for module, normed in mergers.items():
        shapes |= _affine(f"{module}.ln_q", (normed,)) | _affine(f"{module}.mlp.0", (merged, merged))
        shapes |= _affine(f"{module}.mlp.2", (vision["out_hidden_size"], merged))
    return shapes


def audio_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of the audio tower."""
    audio = config["audio_config"]
    wide, inner, channels = audio["d_model"], audio["encoder_ffn_dim"], audio["downsample_hidden_size"]
    tower = "audio_tower"
    shapes = {f"{tower}.conv_out.weight": (wide, channels * -(-audio["num_mel_bins"] // 8))}
    for i, fan_in in ((1, 1), (2, channels), (3, channels)):
        shapes |= _affine(f"{tower}.conv2d{i}", (channels, fan_in, 3, 3))
    for i in range(audio["encoder_layers"]):
        layer = f"{tower}.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _affine(f"{layer}.self_attn.{name}", (wide, wide))
        shapes |= _affine(f"{layer}.self_attn_layer_norm", (wide,))
        shapes |= _affine(f"{layer}.final_layer_norm", (wide,))
        shapes |= _affine(f"{layer}.fc1", (inner, wide)) | _affine(f"{layer}.fc2", (wide, inner))
    shapes |= _affine(f"{tower}.ln_post", (wide,)) | _affine(f"{tower}.proj1", (wide, wide))
    return shapes | _affine(f"{tower}.proj2", (audio["output_dim"], wide))


def expert_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of the action expert."""
    hidden, size, actions = config["hidden_size"], config["head_dim"], len(config["action_space"]["names"])
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = _affine("in_proj", (hidden, actions)) | _affine("out_proj", (actions, hidden))
    shapes |= _affine("time_mlp.0", (hidden, config["time_embedding_dim"])) | _affine(
        "time_mlp.2", (hidden, hidden)
    )
    shapes["norm.weight"] = (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = _decoder_layer(hidden, config["intermediate_size"], q, kv, size)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """fp16. Matrices keep the size of what passes through them, scales are near 1, biases near 0."""
    tensors = {}
    for name, shape in sorted(shapes.items()):
        values = rng.standard_normal(shape)
        if len(shape) > 1:
            values *= 1.0 if "embed" in name and len(shape) == 2 else np.prod(shape[1:]) ** -0.5
        else:
            values = 1 + 0.2 * values if name.endswith("weight") else 0.1 * values
        tensors[name] = values.astype(np.float16)
    return tensors


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2))


def _affine(module: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": shape, f"{module}.bias": shape[:1]}


def _decoder_layer(hidden: int, inner: int, q: int, kv: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _write_shards(directory: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
