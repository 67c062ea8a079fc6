# SPDX-License-Identifier: Apache-2.0
"""Reads the processors that LeRobot saves beside a policy.

A processor is a list of steps: one before the policy, one after it. The runtime computes the steps of
SUPPORTED itself. Any other step would change what the policy sees or what its actions mean, so it is refused.

Sources: LeRobot 0.4.4, 0.5.1 and 0.6.1, processor/, policies/smolvla/processor_smolvla.py, policies/pi0 and
policies/pi05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.policies.lerobot import KINDS, check_keys
from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.schema import is_file_name

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
RENAMER = "rename_observations_processor"
NEW_LINE, PI0_NEW_LINE = "smolvla_new_line_processor", "pi0_new_line_processor"
STATE_PROMPT = "pi05_prepare_state_tokenizer_processor_step"  # writes task and normalised state as a prompt
TOKENIZER, DEVICE = "tokenizer_processor", "device_processor"
NORMALIZER, UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
TO_BATCH = "to_batch_processor"
IMAGE_TO_FLOAT, IMAGENET = "xvla_image_to_float", "xvla_imagenet_normalize"
DOMAIN, TO_AXIS_ANGLE = "xvla_add_domain_id", "xvla_rotation_6d_to_axis_angle"
OLDER_NAMES = {"delta_actions_processor": RELATIVE}  # of LeRobot 0.5
EPSILON = 1e-8  # what the normalisers add to a standard deviation, or take for a range of 0

Check = Callable[[ConfigSection, ConfigSection], None]  # of a step's settings; the policy's config


@dataclass(frozen=True)
class Step:
    """One step of a processor."""

    name: str  # under which LeRobot 0.6 registers it, or the path of its class
    settings: ConfigSection
    state_file: Path | None  # its tensors


def read_steps(path: Path) -> list[Step]:
    """Read the steps of a processor; none if there is no such file.

    ValueError for a file of another form.
    """
    if not path.is_file():
        return []
    processor = read_section(path)
    entries = processor.data.get("steps")
    if not isinstance(entries, list):
        raise processor.fail("steps", "expected a list of objects")
    return [_read_step(path, number, entry) for number, entry in enumerate(entries)]


def check_steps(
    checkpoint: Path, config: ConfigSection, prompt: str = "", own: Mapping[str, Mapping[str, Check]] = {}
) -> dict[str, str]:
    """Raise ValueError for a processor step that the runtime does not compute.

    Returns renamed observations: the policy's name -> the robot's. prompt: the step that writes the prompt of
    this type of policy, or the tokenizer if the task is the prompt; "" for one without text. own: in place of
    SUPPORTED, the steps of this type by file and name. ValueError, which names file, step and setting, for a
    step that is unknown, in another place or with settings that the runtime does not have.
    """
    renamed: dict[str, str] = {}
    for file in (PREPROCESSOR, POSTPROCESSOR):
        path, known = checkpoint / file, own[file] if own else _supported(file, prompt)
        steps = read_steps(path)
        for number, step in enumerate(steps):
            if step.name not in known:
                raise ValueError(
                    f"{path}: steps[{number}] {quoted(step.name)}: not supported, and without it actions "
                    f"would be wrong; supported: {', '.join(known)}"
                )
            check_keys(step.settings, SETTINGS.get(step.name, ()))
            known[step.name](step.settings, config)
            if step.name == RENAMER:
                renamed |= renamed_observations(step.settings)
        names = [step.name for step in steps]
        _check_order(path, names)
        if TOKENIZER in names and prompt not in names:
            raise ValueError(f"{path}: no step {prompt}: a task that it has not written is not supported")
    return renamed


def _supported(file: str, prompt: str) -> dict[str, Check]:
    """Return the steps of a processor that the runtime computes for a type of policy."""
    others = {*PROMPTS, *([] if prompt else [TOKENIZER])} - {prompt}
    return {name: check for name, check in SUPPORTED[file].items() if name not in others}


def _check_order(path: Path, names: list[str]) -> None:
    """Raise ValueError if a step comes after one that needs its result."""
    for number, name in enumerate(names):
        before = names[:number]
        behind = {last for first, last in ORDER if first == name}
        wrong = next((each for each in before if each in behind or (each == name and name in ORDERED)), None)
        if wrong is not None:
            raise ValueError(
                f"{path}: steps[{number}] {name}: twice, or after {wrong}; supported is the order of LeRobot"
            )


def relative_actions(checkpoint: Path, size: int) -> tuple[bool, ...]:
    """Tell which of `size` values of an action are relative to the state.

    ValueError if the processor of actions does not undo what that of observations does, or if there are names
    for some of the values only, by which LeRobot would take others for excluded.
    """
    before, after = (
        next((step.settings for step in read_steps(checkpoint / file) if step.name == name), None)
        for file, name in ((PREPROCESSOR, RELATIVE), (POSTPROCESSOR, ABSOLUTE))
    )
    enabled = [settings is not None and settings.flag("enabled", False) for settings in (before, after)]
    if enabled[0] != enabled[1]:
        on, off = (RELATIVE, ABSOLUTE) if enabled[0] else (ABSOLUTE, RELATIVE)
        raise ValueError(f"{checkpoint}: {on} is enabled, {off} is not: one undoes the other")
    if before is None or not enabled[0]:
        return (False,) * size
    names = _texts(before, "action_names")
    if len(names) not in (0, size):
        raise before.fail("action_names", f"expected a name for each of {size} values")
    excluded = [token.lower() for token in _texts(before, "exclude_joints") if token]
    if not names:
        return (True,) * size
    return tuple(not any(token in name.lower() for token in excluded) for name in names)


def relative_enabled(checkpoint: Path) -> bool:
    """Tell whether the processor of observations takes actions relative to the state."""
    steps = read_steps(checkpoint / PREPROCESSOR)
    return any(step.name == RELATIVE and step.settings.flag("enabled", False) for step in steps)


@dataclass(frozen=True)
class Normaliser:
    """Settings of a normaliser (observations) or unnormaliser (actions)."""

    file: Path  # of the processor
    epsilon: float  # added to a standard deviation, or in place of a range of 0
    observations: frozenset[str] | None  # those that it normalises; None = all
    state_file: Path | None  # statistics: tensors <feature>.<statistic>

    def covers(self, feature: str) -> bool:
        """Tell whether the step changes a feature: all actions, some observations."""
        return self.observations is None or feature == "action" or feature in self.observations


def read_normaliser(checkpoint: Path, feature: str) -> Normaliser | None:
    """Read the step that normalises an observation or unnormalises "action".

    None if the checkpoint has no processors, as before LeRobot 0.4. ValueError for processors without the
    step, and for a checkpoint with one processor of two.
    """
    paths = [checkpoint / file for file in (PREPROCESSOR, POSTPROCESSOR)]
    missing = [path for path in paths if not path.is_file()]
    if len(missing) == len(paths):
        return None
    if missing:
        raise FileNotFoundError(f"{missing[0]} not found: LeRobot saves it with the other processor")
    path, name = (paths[1], UNNORMALIZER) if feature == "action" else (paths[0], NORMALIZER)
    step = next((each for each in read_steps(path) if each.name == name), None)
    if step is None:
        raise ValueError(f"{path}: no step {name}, but config.json normalises {feature}")
    settings, key = step.settings, "normalize_observation_keys"
    names = frozenset(_texts(settings, key)) if settings.has(key) else None
    return Normaliser(path, _epsilon(settings), names, step.state_file)


def _texts(settings: ConfigSection, key: str) -> list[str]:
    """Read a list of names, none if the key is missing."""
    names = settings.data[key] if settings.has(key) else []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise settings.fail(key, "expected a list of names")
    return names


def _read_step(path: Path, number: int, entry: object) -> Step:
    where = f"{path}: steps[{number}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} {quoted(entry)}: expected an object")
    section = ConfigSection(entry, where)
    if not section.has("registry_name") and not section.has("class"):
        raise ValueError(f"{where}: expected a registry_name or a class")
    name = section.text("registry_name" if section.has("registry_name") else "class")
    section = ConfigSection(entry, f"{where} {printable(name)}")
    check_keys(section, STEP_KEYS)
    settings = section.section("config") if section.has("config") else ConfigSection({}, section.where)
    file = section.text("state_file") if section.has("state_file") else None
    if file is not None and not is_file_name(file):
        raise ValueError(f"{section.where}: state_file {quoted(file)}: expected the name of a file beside it")
    if file is not None and not path.with_name(file).is_file():
        raise FileNotFoundError(f"{path.with_name(file)} not found, but {path.name} names it")
    return Step(OLDER_NAMES.get(name, name), settings, None if file is None else path.with_name(file))


def renamed_observations(settings: ConfigSection) -> dict[str, str]:
    """Read a rename map, turned round: the policy's name -> the robot's."""
    names = settings.section("rename_map") if settings.has("rename_map") else ConfigSection({}, "")
    sources: dict[str, str] = {}
    for source in names.data:
        target = names.text(source)
        if target in sources:
            raise names.fail(source, f"{quoted(sources[target])} gets this name too")
        sources[target] = source
    return sources


def _check_renames(settings: ConfigSection, config: ConfigSection) -> None:
    renamed_observations(settings)


def _check_tokenizer(settings: ConfigSection, config: ConfigSection) -> None:
    length = config.size("tokenizer_max_length", 48)
    settings.one_of("max_length", [length], default=length)
    settings.one_of("padding", ["longest", "max_length"], default="max_length")
    settings.one_of("padding_side", ["right"], default="right")
    settings.one_of("task_key", ["task"], default="task")
    if settings.has("tokenizer_name") and config.has("vlm_model_name"):
        expected = Path(config.text("vlm_model_name")).name
        if Path(settings.text("tokenizer_name")).name != expected:
            raise settings.fail("tokenizer_name", f"expected {quoted(expected)}, as vlm_model_name")


def _check_prompt(settings: ConfigSection, config: ConfigSection) -> None:
    settings.one_of("task_key", ["task"], default="task")
    length = config.size("max_state_dim", 32)
    settings.one_of("max_state_dim", [length], default=length)


def _check_normaliser(settings: ConfigSection, config: ConfigSection, section: str) -> None:
    """Raise ValueError if a normaliser differs from the policy's configuration.

    section: of the configuration, with the features that the step must know.
    """
    _epsilon(settings)
    ways, known = config.section("normalization_mapping").data, config.section(section)
    if settings.has("norm_map"):
        found = settings.section("norm_map")
        for each in KINDS:
            found.one_of(each, [ways.get(each, "IDENTITY")], default="IDENTITY")
    elif any(way != "IDENTITY" for way in ways.values()):
        raise ValueError(f"{settings.where}: key 'norm_map' is missing, but config.json normalises")
    if not settings.has("features"):
        return
    features = settings.section("features")
    for name in known.data:
        feature = known.section(name)
        kind = feature.text("type")
        normalised = ways.get(kind, "IDENTITY") != "IDENTITY"
        if normalised or name in features.data:
            features.section(name).one_of("type", [kind])  # LeRobot normalises by this one
        if normalised:
            features.section(name).one_of("shape", [feature.data.get("shape")])


def _epsilon(settings: ConfigSection) -> float:
    value = settings.number("eps", EPSILON)
    if not 0 < value < 1:
        raise settings.fail("eps", "expected more than 0 and less than 1")
    return value


def _check_relative(settings: ConfigSection, config: ConfigSection) -> None:
    settings.flag("enabled", default=False)
    _texts(settings, "exclude_joints")
    _texts(settings, "action_names")


def _check_device(settings: ConfigSection, config: ConfigSection) -> None:
    settings.one_of("float_dtype", [None, "float32"], default=None)


def _no_settings(settings: ConfigSection, config: ConfigSection) -> None:
    """Check a step that has no settings which change a result."""


PROMPTS = NEW_LINE, PI0_NEW_LINE, STATE_PROMPT
ORDER = (  # of two steps that depend on each other
    *((RENAMER, each) for each in (RELATIVE, NORMALIZER, *PROMPTS, TOKENIZER)),
    (RELATIVE, NORMALIZER),  # relative to values as they are
    *((each, TOKENIZER) for each in PROMPTS),
    (NORMALIZER, STATE_PROMPT),
    (UNNORMALIZER, ABSOLUTE),
    *((RENAMER, each) for each in (IMAGE_TO_FLOAT, IMAGENET)),  # both change images by their names
    (IMAGE_TO_FLOAT, IMAGENET),
    (UNNORMALIZER, TO_AXIS_ANGLE),
)
ORDERED = frozenset(name for pair in ORDER for name in pair)
STEP_KEYS = ("registry_name", "class", "config", "state_file")
SETTINGS: dict[str, tuple[str, ...]] = {  # of steps that have any
    RENAMER: ("rename_map",),
    TOKENIZER: ("tokenizer_name", "max_length", "task_key", "padding", "padding_side", "truncation"),
    STATE_PROMPT: ("max_state_dim", "task_key"),
    DEVICE: ("device", "float_dtype"),
    NORMALIZER: ("eps", "features", "norm_map", "normalize_observation_keys"),
    UNNORMALIZER: ("eps", "features", "norm_map", "normalize_observation_keys"),
    RELATIVE: ("enabled", "exclude_joints", "action_names"),
    ABSOLUTE: ("enabled",),
    IMAGE_TO_FLOAT: ("image_keys", "validate_range"),
    IMAGENET: ("image_keys",),
    DOMAIN: ("domain_id",),
    TO_AXIS_ANGLE: ("expected_action_dim",),
}
SUPPORTED: dict[str, dict[str, Check]] = {
    PREPROCESSOR: {
        RENAMER: _check_renames,
        TO_BATCH: _no_settings,
        NEW_LINE: _no_settings,
        PI0_NEW_LINE: _no_settings,
        STATE_PROMPT: _check_prompt,
        TOKENIZER: _check_tokenizer,
        DEVICE: _check_device,
        NORMALIZER: partial(_check_normaliser, section="input_features"),
        RELATIVE: _check_relative,
    },
    POSTPROCESSOR: {
        UNNORMALIZER: partial(_check_normaliser, section="output_features"),
        DEVICE: _check_device,
        ABSOLUTE: _check_relative,
    },
}
