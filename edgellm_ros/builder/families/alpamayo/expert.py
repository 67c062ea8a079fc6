# SPDX-License-Identifier: Apache-2.0
"""Reads and checks what the configuration of an Alpamayo says of its expert.

Objects such as `action_space_cfg` name a class of the model code, which is compared with the one that the
runtime computes and never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_ros.builder.action.expert_config import FourierArchitecture, check_expert
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.text_model import read_norm
from edgellm_ros.builder.families.alpamayo.prompts import Vocabulary
from edgellm_ros.diffusion.config import ActionSpaceConfig, TrajectoryHistoryConfig
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

TARGET = "_target_"
MOST_STEPS = 1000  # of Euler
HISTORY_DT = 0.1  # seconds between points, in the published inference
HISTORY_AXES = ("x", "y", "z")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Keys that change nothing that is computed here.
OF_FITS = tuple(f"{name}_{kind}" for name in ("theta", "v", "a", "kappa") for kind in ("lambda", "ridge"))
OF_EXPERT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "hidden_act", "attention_bias",
)  # fmt: skip
UNUSED_OF_EXPERT = (
    "_attn_implementation", "attn_implementation", "attention_dropout", "dtype", "torch_dtype", "use_cache",
    "vocab_size", "max_position_embeddings", "initializer_range", "model_type", "tie_word_embeddings",
)  # fmt: skip


def read_expert(
    config: ConfigSection, text: ConfigSection, llm: LanguageModelConfig, vocabulary: Vocabulary
) -> FourierArchitecture:
    """Read the expert.

    text: the language model's section, whose values hold where `expert_cfg` has none.
    ValueError, naming file, key and value, for anything that would be computed differently.
    """
    config.one_of("expert_non_causal_attention", [True], default=True)
    shape = _read_shape(config, text)
    space, encoder = (
        _read_space(config),
        _class(config, "action_in_proj_cfg", "PerWaypointActionInProjV2", IN_PROJ),
    )
    flow = _class(config, "diffusion_cfg", "FlowMatching", FLOW)
    flow.one_of("int_method", ["euler"], default="euler")
    _class(config, "action_out_proj_cfg", "Linear", ("bias",)).one_of("bias", [True], default=True)
    layers = shape.size("num_hidden_layers")
    expert = config.make(
        FourierArchitecture,
        hidden_size=shape.size("hidden_size"),
        intermediate_size=shape.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=shape.size("num_attention_heads"),
        num_key_value_heads=shape.size("num_key_value_heads"),
        head_dim=shape.size("head_dim", llm.head_dim),
        rms_norm_eps=read_norm(shape).epsilon,
        rope_theta=llm.rope.theta,
        num_denoise_steps=flow.size("num_inference_steps", 10, MOST_STEPS),
        action_space=space,
        trajectory_history=_read_history(config, vocabulary),
        history_token_id=vocabulary.id("traj_history"),
        future_start_token_id=vocabulary.id("traj_future_start"),
        rtc_max_delay=0,
        kv_layers=tuple(range(layers)),
        frequencies=read_frequencies(config, encoder),
        encoder_size=encoder.size("hidden_size", 1024),
        encoder_layers=encoder.size("num_enc_layers", 4, most=64),
        navigation=config.text("model_type") == "alpamayo1_5",
    )
    if layers > llm.num_hidden_layers:
        reason = f"the language model, whose KV caches the expert's layers read, has {llm.num_hidden_layers}"
        raise shape.fail("num_hidden_layers", reason)
    check_expert(config.where, expert, llm)
    return expert


FLOW = (
    "int_method",
    "num_inference_steps",
    "inference_guidance_weight",
    "use_classifier_free_guidance",
    "x_dims",
)
IN_PROJ = "hidden_size", "num_enc_layers", "max_freq", "num_fourier_feats"


def _class(config: ConfigSection, key: str, name: str, known: tuple[str, ...]) -> ConfigSection:
    """Read the object at `key`.

    ValueError unless it names the class `name` and has known keys only.
    """
    section = config.section(key)
    if section.text(TARGET).rpartition(".")[2] != name:
        raise section.fail(TARGET, f"supported: the class {name}")
    keys = (each for each in section.data if each not in known and not each.startswith("_"))  # of Hydra
    other = next(keys, None)
    if other is not None:
        raise section.fail(other, f"a key that is not known; known: {', '.join(known)}")
    return section


def _read_shape(config: ConfigSection, text: ConfigSection) -> ConfigSection:
    """Read the expert's section: the language model's with the keys of `expert_cfg`."""
    own: Mapping[str, Any] = config.section("expert_cfg").data if config.given("expert_cfg") else {}
    for key, value in own.items():
        if key not in (*OF_EXPERT, *UNUSED_OF_EXPERT) and value != text.data.get(key):
            raise config.section("expert_cfg").fail(key, f"supported: {', '.join(OF_EXPERT)}")
    where = f"{config.where}: expert_cfg"
    shape = ConfigSection({**text.data, **own}, where)
    shape.one_of("hidden_act", ["silu"], default="silu")
    shape.one_of("attention_bias", [False], default=False)
    return shape


def _read_space(config: ConfigSection) -> ActionSpaceConfig:
    names = "accel", "curvature"
    known = *(f"{name}_{kind}" for name in names for kind in ("mean", "std", "bounds")), "dt", "n_waypoints"
    section = _class(config, "action_space_cfg", "UnicycleAccelCurvatureActionSpace", (*known, *OF_FITS))
    limits = []
    for name, default in (("accel", (-9.8, 9.8)), ("curvature", (-0.2, 0.2))):
        key = f"{name}_bounds"
        limits.append(section.numbers(key) if section.has(key) else default)
        if len(limits[-1]) != 2:
            raise section.fail(key, "expected the lowest and the highest value")
    return section.make(
        ActionSpaceConfig,
        type="unicycle",
        names=("acceleration", "curvature"),
        units=("m/s^2", "1/m"),
        dt=section.number("dt", 0.1),
        horizon=section.size("n_waypoints", 64, most=4096),
        mean=tuple(section.number(f"{name}_mean", 0.0) for name in names),
        std=tuple(section.number(f"{name}_std", 1.0) for name in names),
        low=tuple(low for low, _ in limits),
        high=tuple(high for _, high in limits),
    )


def _read_history(config: ConfigSection, vocabulary: Vocabulary) -> TrajectoryHistoryConfig:
    """Read how past positions become tokens.

    The ids of a history follow those of future trajectories.
    """
    known = (
        "ego_xyz_min",
        "ego_xyz_max",
        "ego_yaw_min",
        "ego_yaw_max",
        "num_bins",
        "predict_yaw",
        "load_weights",
    )
    section = _class(config, "hist_traj_tokenizer_cfg", "DeltaTrajectoryTokenizer", known)
    section.one_of("predict_yaw", [False], default=False)
    future = 0
    if config.given("traj_tokenizer_cfg"):
        future = config.section("traj_tokenizer_cfg").size("num_bins", 1000)
    tokens, bins = config.size("tokens_per_history_traj"), section.size("num_bins", 1000)
    if tokens % len(HISTORY_AXES):
        raise config.fail("tokens_per_history_traj", "expected a multiple of 3: x, y and z of each point")
    if future + bins > len(vocabulary.trajectory_tokens):
        count = len(vocabulary.trajectory_tokens)
        raise section.fail("num_bins", f"with the {future} of futures more than traj_vocab_size {count}")
    return section.make(
        TrajectoryHistoryConfig,
        num_points=tokens // len(HISTORY_AXES),
        dt=HISTORY_DT,
        axes=HISTORY_AXES,
        low=section.numbers("ego_xyz_min") if section.has("ego_xyz_min") else (-4.0, -4.0, -10.0),
        high=section.numbers("ego_xyz_max") if section.has("ego_xyz_max") else (4.0, 4.0, 10.0),
        num_tokens=bins,
        first_token_id=vocabulary.trajectory_tokens[0] + future,
        single_precision=True,
    )


def read_frequencies(config: ConfigSection, encoder: ConfigSection) -> tuple[float, ...]:
    """Compute the frequencies of the features.

    The model code keeps them in the type of the weights, unless `keep_same_dtype` is false.
    """
    count, most = encoder.size("num_fourier_feats", 20, most=4096), encoder.number("max_freq", 100.0)
    if count % 2:
        raise encoder.fail("num_fourier_feats", "expected an even number")
    if most < 1:
        raise encoder.fail("max_freq", "expected at least 1")
    dtype = np.float32
    if config.flag("keep_same_dtype", True):
        dtype = DTYPES[config.one_of("model_dtype", list(DTYPES), default="bfloat16")]
    return tuple(np.logspace(0, np.log10(most), count // 2).astype(np.float32).astype(dtype).tolist())
