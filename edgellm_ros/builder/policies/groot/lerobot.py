# SPDX-License-Identifier: Apache-2.0
"""Reads LeRobot's layout: its processors, and NVIDIA's tensors.

The processors have statistics of one embodiment: by keys of modalities (`groot_n1_7_action_decode_v1`), or of
whole vectors (`groot_action_unpack_unnormalize_v2`). The sizes of the model are those of the checkpoint that
it was trained from.

Source: LeRobot 0.6.1, policies/groot/processor_groot.py and modeling_groot.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.checkpoint.safetensors_file import FLOATS, read_header
from edgellm_ros.builder.policies.groot.cameras import read_crop_of_lerobot
from edgellm_ros.builder.policies.groot.embodiment import MOST_FRAMES, Embodiment
from edgellm_ros.builder.policies.groot.qwen import BACKBONES, LM_HEAD
from edgellm_ros.builder.policies.groot.source import Source
from edgellm_ros.builder.policies.groot.version import N1_7
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    COMMON_KEYS,
    IMAGES,
    MOST_STEPS,
    STATE,
    camera_names,
    check_features,
    check_keys,
    feature_size,
)
from edgellm_ros.builder.policies.peft import BASE
from edgellm_ros.builder.policies.processors import (
    ABSOLUTE,
    DEVICE,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE,
    RENAMER,
    SETTINGS,
    Step,
    read_steps,
    renamed_observations,
)
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.echo import quoted

MODEL = "_groot_model."  # before the names of all tensors
PACK, ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
DECODE, UNPACK = "groot_n1_7_action_decode_v1", "groot_action_unpack_unnormalize_v2"
SUPPORTED = {
    PREPROCESSOR: (RENAMER, "to_batch_processor", PACK, ENCODE, DEVICE),
    POSTPROCESSOR: (DECODE, UNPACK, DEVICE),
}
KEYS = COMMON_KEYS | {
    "action_decode_transform", "balance_dataset_weights", "balance_trajectory_weights", "base_model_path",
    "batch_size", "chunk_size", "dataloader_num_workers", "dataset_paths", "embodiment_tag", "image_size",
    "lora_alpha", "lora_dropout", "lora_full_model", "lora_rank", "max_action_dim", "max_state_dim",
    "max_steps", "model_params_fp32", "n_action_steps", "num_inference_timesteps", "optimizer_betas",
    "optimizer_eps", "optimizer_lr", "optimizer_weight_decay", "output_dir", "relative_exclude_joints",
    "report_to", "resume", "rtc_ramp_rate", "save_steps", "tokenizer_assets_repo", "tune_diffusion_model",
    "tune_llm", "tune_projector", "tune_top_llm_layers", "tune_visual", "tune_vlln", "use_bf16",
    "use_flash_attention", "use_relative_actions", "video_backend", "warmup_ratio",
}  # fmt: skip
OWN_SETTINGS = {
    PACK: (
        "action_horizon", "clip_outliers", "embodiment_mapping", "embodiment_tag", "formalize_language",
        "language_key", "max_action_dim", "max_state_dim", "modality_config", "normalize_min_max",
        "raw_stats", "state_dropout_prob", "state_horizon", "use_percentiles", "valid_action_horizon",
        "video_horizon", "video_modality_keys",
    ),
    ENCODE: (
        "crop_fraction", "device", "image_crop_size", "image_target_size", "letter_box_transform",
        "model_name", "shortest_image_edge", "use_albumentations",
    ),
    DECODE: (
        "action_decode_transform", "env_action_dim", "modality_config", "raw_stats", "use_percentiles",
        "use_relative_action",
    ),
    UNPACK: (
        "clip_normalized_action", "env_action_dim", "libero_gripper_action", "libero_gripper_binarize",
        "normalize_min_max",
    ),
}  # fmt: skip
SWITCHED_OFF = (RELATIVE, ABSOLUTE)  # may be there if they are not enabled
MOST_VALUES = 4096  # of a state or an action


def read_lerobot(checkpoint: Path, config: ConfigSection, weights: Weights, tag: str | None) -> Source:
    """Read a checkpoint; tag: of the embodiment, None: the one of the checkpoint."""
    config.one_of("n_obs_steps", [1], default=1)
    check_keys(config, KEYS)
    check_features(config)
    steps = _steps(checkpoint)
    pack, encode = (_step(checkpoint, steps, PREPROCESSOR, name) for name in (PACK, ENCODE))
    own = pack.settings.text("embodiment_tag")
    if tag not in (None, own):
        raise ValueError(f"{pack.settings.where}: --embodiment {quoted(tag)}: the checkpoint is for {own}")
    _check_pack(pack.settings)
    model = _base(checkpoint, config)
    for key in ("max_state_dim", "max_action_dim"):
        pack.settings.one_of(key, [model.size(key, N1_7.width)], default=N1_7.width)
    denoise = model if config.data.get("num_inference_timesteps") is None else config
    embodiment, named = _embodiment(
        checkpoint, config, steps, pack, model.size("action_horizon", N1_7.horizon)
    )
    return Source(
        version=N1_7,
        model=model,
        weights=_renamed_weights(weights),
        embodiment=embodiment,
        cameras=_cameras(config, steps, pack.settings),
        frames=pack.settings.size("video_horizon", 1, MOST_FRAMES),
        crop=read_crop_of_lerobot(encode.settings),
        plain_words=pack.settings.flag("formalize_language", True),
        denoise_steps=denoise.size("num_inference_timesteps", 4, MOST_STEPS),
        named=named,
    )


def _steps(checkpoint: Path) -> list[Step]:
    """Read the steps of both processors, and refuse those that are not supported."""
    found = []
    for file, known in SUPPORTED.items():
        path = checkpoint / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found: LeRobot saves it with the policy")
        for number, step in enumerate(read_steps(path)):
            if step.name in SWITCHED_OFF and not step.settings.flag("enabled", False):
                continue
            if step.name not in known:
                raise ValueError(
                    f"{path}: steps[{number}] {quoted(step.name)}: not supported, and without it actions "
                    f"would be wrong; supported: {', '.join(known)}"
                )
            check_keys(step.settings, (SETTINGS | OWN_SETTINGS).get(step.name, ()))
            if step.name == DEVICE:
                step.settings.one_of("float_dtype", [None, "float32"], default=None)
            found.append(step)
    return found


def _step(checkpoint: Path, steps: list[Step], file: str, *names: str) -> Step:
    """Return the one step that has one of these names."""
    found = [step for step in steps if step.name in names]
    if len(found) != 1:
        raise ValueError(f"{checkpoint / file}: expected one step {' or '.join(names)}, found {len(found)}")
    return found[0]


def _check_pack(settings: ConfigSection) -> None:
    settings.one_of("state_horizon", [1], default=1)
    settings.one_of("normalize_min_max", [True], default=True)
    settings.one_of("language_key", ["task"], default="task")


def _base(checkpoint: Path, config: ConfigSection) -> ConfigSection:
    """Read the configuration of the checkpoint that the policy was trained from."""
    name = config.text("base_model_path")
    folder = checkpoint / BASE if (checkpoint / BASE).is_dir() else Path(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder / 'config.json'} not found: a GR00T of LeRobot has the sizes of its base: "
            f"hf download {name} config.json --local-dir {checkpoint / BASE}"
        )
    base = read_section(folder / "config.json")
    base.one_of("model_type", [N1_7.model_type])
    return base


def _renamed_weights(weights: Weights) -> Weights:
    """Return the weights with the names of NVIDIA's layout.

    Of the embedding table and the LM head, which are one tensor, LeRobot saves one under either name.
    """
    names = {name.removeprefix(MODEL): name for name in weights}
    table = f"{BACKBONES[0]}.language_model.embed_tokens.weight"
    if table not in names and LM_HEAD in names:
        names[table] = names[LM_HEAD]
    return weights.renamed(names)


def _cameras(config: ConfigSection, steps: list[Step], pack: ConfigSection) -> tuple[str, ...]:
    """Read the cameras in the order of the model.

    The order is that of `video_modality_keys`, without those that the policy has no camera of, or
    alphabetical if none is there.
    """
    renamed = next((renamed_observations(each.settings) for each in steps if each.name == RENAMER), {})
    names = dict(zip(camera_names(config), camera_names(config, renamed), strict=True))
    keys = pack.data.get("video_modality_keys") or []
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise pack.fail("video_modality_keys", "expected a list of names, or null")
    ordered = []
    for key in keys:
        aliases = (key, "image2") if key == "wrist_image" else (key,)
        ordered += [each for each in aliases if each in names][:1]
    return tuple(names[each] for each in ordered or sorted(names, key=lambda name: f"{IMAGES}{name}"))


def _embodiment(
    checkpoint: Path, config: ConfigSection, steps: list[Step], pack: Step, horizon: int
) -> tuple[Embodiment, bool]:
    """Read the embodiment, and whether its vectors have no names of their own.

    horizon: actions that the model computes.
    """
    decode = _step(checkpoint, steps, POSTPROCESSOR, DECODE, UNPACK)
    settings, tag = pack.settings, pack.settings.text("embodiment_tag")
    mapping = settings.section("embodiment_mapping")
    if not mapping.has(tag):
        raise settings.fail("embodiment_tag", "expected one of embodiment_mapping")
    chunk = min(config.size("chunk_size", 40), horizon)
    if decode.name == DECODE:
        decode.settings.one_of("action_decode_transform", [None, "none"])
        modalities, statistics = (decode.settings.section(key) for key in ("modality_config", "raw_stats"))
        for own, other in (("modality_config", modalities), ("raw_stats", statistics)):
            if settings.section(own).data != other.data:
                raise ValueError(f"{decode.settings.where}: {own}: expected that of the step {PACK}")
        count = min(chunk, len(modalities.section("action").integers("delta_indices")))
        relative = decode.settings.flag("use_relative_action", False)
        percentiles = settings.flag("use_percentiles", False)
        decode.settings.one_of("use_percentiles", [percentiles], default=False)
    else:
        _check_unpack(decode.settings)
        modalities = ConfigSection(
            {kind: {"modality_keys": [kind]} for kind in ("state", "action")}, settings.where
        )
        statistics, count, relative, percentiles = _flat(config, pack, decode), chunk, False, False
    action = {**modalities.section("action").data, "delta_indices": [*range(count)]}
    number = mapping.integer(tag)
    if number < 0:
        raise mapping.fail(tag, "expected at least 0")
    embodiment = Embodiment(
        tag=tag,
        number=number,
        modalities=ConfigSection({**modalities.data, "action": action}, modalities.where),
        statistics=statistics,
        percentiles=percentiles,
        relative=relative,
        clips=settings.flag("clip_outliers", True),
        sines=False,
        exact=True,
    )
    return embodiment, decode.name == UNPACK


def _check_unpack(settings: ConfigSection) -> None:
    settings.one_of("normalize_min_max", [True], default=True)
    settings.one_of("clip_normalized_action", [True], default=False)
    settings.one_of("libero_gripper_action", [False], default=False)


def _flat(config: ConfigSection, pack: Step, decode: Step) -> ConfigSection:
    """Read the statistics of state and actions as whole vectors."""
    sizes = {
        "state": (pack, STATE, feature_size(config, "input_features", STATE, MOST_VALUES)),
        "action": (decode, ACTION, feature_size(config, "output_features", ACTION, MOST_VALUES)),
    }
    return ConfigSection({kind: {kind: _of_file(*each)} for kind, each in sizes.items()}, pack.settings.where)


def _of_file(step: Step, key: str, size: int) -> Mapping[str, Any]:
    """Read the range of a vector from the state file of a step."""
    if step.state_file is None:
        raise ValueError(f"{step.settings.where}: key 'state_file' is missing: no statistics of {key}")
    tensors, values = read_header(step.state_file), {}
    for name in ("min", "max"):
        tensor = tensors.get(f"{key}.{name}")
        if tensor is None or tensor.shape != (size,) or tensor.dtype not in FLOATS:
            found = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{step.state_file}: {key}.{name}: expected {size} numbers, found {found}")
        values[name] = tensor.read().tolist()
    return values
