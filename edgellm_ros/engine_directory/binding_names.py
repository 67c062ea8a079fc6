# SPDX-License-Identifier: Apache-2.0
"""Names of the graphs' inputs and outputs, shared by builder and runtime.

docs/engine_directory.md has a table of shapes and meanings. Names of LoRA inputs are in `lora_inputs.py`.
"""

from __future__ import annotations

# llm/model.onnx
INPUTS_EMBEDS = "inputs_embeds"
ROPE_COS = "rope_cos"  # of the vision tower and the action expert too
ROPE_SIN = "rope_sin"
KV_WRITE_INDEX = "kv_write_index"
ATTENTION_MASK = "attention_mask"  # of the audio encoder too
LAST_TOKEN_IDS = "last_token_ids"
VALID_TOKENS = "valid_tokens"  # of models with recurrent layers
LM_HEAD = "lm_head.weight"
LOGITS = "logits"
# llm/model.cuda.onnx
POSITION_IDS = "position_ids"
KV_LENGTH = "kv_length"  # of the action expert too
EMBEDDING = "embedding"
# llm/verify.onnx
FUSED_HIDDEN_STATES = "fused_hidden_states"
# Of the fused kernels [layers,4 products,B,3]: address of A, address of B, rank of each sequence's adapter.
LORA_TABLE = "lora_table"
# draft/model.onnx
HIDDEN_STATES = "hidden_states"
NEXT_HIDDEN_STATES = "next_hidden_states"
VISIBLE_ROWS = "visible_rows"  # of block drafters
# visual/model.onnx
PIXEL_VALUES = "pixel_values"
POS_EMBED_INDEX = "pos_embed_index"
POS_EMBED_WEIGHT = "pos_embed_weight"
POS_EMBED_SHARES = "pos_embed_shares"
WINDOW_INDEX = "window_index"
WINDOW_MASK = "window_mask"
PATCH_INDEX = "patch_index"
IMAGE_EMBEDS = "image_embeds"
# audio/model.onnx
INPUT_FEATURES = "input_features"
TOKEN_INDEX = "token_index"
POSITION_INDEX = "position_index"  # of encoders whose tokens attend within windows
FRAME_MASK = "frame_mask"  # of encoders whose tokens attend within chunks
AUDIO_EMBEDS = "audio_embeds"
# prefix/model.onnx of a policy, which has IMAGE_EMBEDS too
MODULATION = "modulation"  # of a pi0.5: scales, shifts and gates of all norms
LAST_PREFIX_ROW = "last_prefix_row"  # of a policy's prefix, counted from 0
LAST_ACTION_ROW = "last_action_row"  # of prefix and actions together
TOKEN_IDS = "token_ids"
STATE = "state"
ROW_ORDER = "row_order"  # of images and tokens in the prompt
ROW_PLACES = "row_places"
STATE_FEATURES = "state_features"  # an output, and an input of the action engine
CONDITION = "condition"  # of Diffusion Policy and X-VLA, an input of their action engines
# action/model.onnx
TRAJECTORY = "trajectory"
TIME = "time"
CACHE_ROWS = "cache_rows"
VELOCITY = "velocity"
PREDICTION = "prediction"  # of Diffusion Policy and X-VLA, in place of a velocity
ACTIONS = "actions"  # of a policy without a flow


def camera_image(camera: int) -> str:
    """Return the name of a camera's image; cameras count from 0.

    The image is an input of a policy without a vision tower.
    """
    return f"camera_image_{camera}"


def key_cache(layer: int) -> str:
    """Return the name of a layer's key cache, an input; layers count from 0."""
    return f"key_cache_{layer}"


def value_cache(layer: int) -> str:
    """Return the name of a layer's value cache, an input."""
    return f"value_cache_{layer}"


def present_key(layer: int) -> str:
    """Return the name of the output that is bound to the memory of `key_cache(layer)`."""
    return f"present_key_{layer}"


def present_value(layer: int) -> str:
    """Return the name of the output bound to the memory of `value_cache(layer)`."""
    return f"present_value_{layer}"


def context_key(layer: int) -> str:
    """Return the name of a policy's keys of the prefix.

    The keys are an output of `prefix` and an input of `action`.
    """
    return f"context_key_{layer}"


def context_value(layer: int) -> str:
    """Return the name of a policy's values of the prefix."""
    return f"context_value_{layer}"


def present_context(name: str) -> str:
    """Return the name of the output bound to the memory of a policy's context.

    name: of keys or values of the prefix. `action` writes its own rows behind them.
    """
    return f"present_{name}"


def conv_state(layer: int) -> str:
    """Return the name of an input, the convolution's state.

    Recurrent layers count from 0.
    """
    return f"conv_state_{layer}"


def recurrent_state(layer: int) -> str:
    """Return the name of an input: the state of a recurrent layer, counted from 0."""
    return f"recurrent_state_{layer}"


def present_conv_state(layer: int) -> str:
    """Return the name of the output with the convolution's state after the run."""
    return f"present_conv_state_{layer}"


def present_recurrent_state(layer: int) -> str:
    """Return the name of the output with the state of a recurrent layer after the run."""
    return f"present_recurrent_state_{layer}"


def chain_value(kind: str, layer: int) -> str:
    """Return the name of an output of `llm/verify.onnx` of a hybrid.

    kind: see `chain_widths`.
    """
    return f"chain_{kind}_{layer}"


def deepstack_embeds(index: int) -> str:
    """Return the name of a deepstack feature.

    The feature is an output of the vision tower and an input of the language model.
    """
    return f"deepstack_embeds_{index}"


def hidden_states(layer: int) -> str:
    """Return the name of the output with a layer's hidden states; layers count from 1."""
    return f"hidden_states_{layer}"
