# SPDX-License-Identifier: Apache-2.0
"""A small grammar of commands and questions to the robot.

Each command has many wordings. A sentence is a template with a noun phrase, between an optional address and
an optional courtesy. The split "test" gets a fixed share of the combinations of template, address and
courtesy, and of template and noun phrase. These combinations never occur in training.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from numpy.random import Generator

from edgellm_arena.world.scene import COLORS, SHAPES

KINDS = ("go", "where", "describe", "stop")
SPLITS = ("train", "test")
_TEST_SHARE = 0.15

TEMPLATES: dict[str, tuple[str, ...]] = {
    "go": (
        "go to the {x}",
        "drive to the {x}",
        "move to the {x}",
        "head for the {x}",
        "go over to the {x}",
        "drive over to the {x}",
        "drive up to the {x}",
        "head over to the {x}",
        "make your way to the {x}",
        "find your way to the {x}",
        "take me to the {x}",
        "bring yourself to the {x}",
        "approach the {x}",
        "get to the {x}",
        "travel to the {x}",
        "roll to the {x}",
        "stop in front of the {x}",
        "park in front of the {x}",
        "go and stand in front of the {x}",
        "drive until you are at the {x}",
        "i need you at the {x}",
        "i want you to go to the {x}",
        "i would like you to drive to the {x}",
        "could you go to the {x}",
        "could you head for the {x}",
        "can you drive to the {x}",
        "would you move to the {x}",
        "your goal is the {x}",
        "your target is the {x}",
        "next stop is the {x}",
        "let us go to the {x}",
        "see the {x}? go there",
    ),
    "where": (
        "where is the {x}",
        "where do you see the {x}",
        "where can i find the {x}",
        "where would you say the {x} is",
        "do you see the {x}",
        "can you see the {x}",
        "can you find the {x}",
        "tell me where the {x} is",
        "locate the {x}",
        "on which side is the {x}",
        "how far away is the {x}",
        "point out the {x}",
    ),
    "describe": (
        "what do you see",
        "what can you see",
        "what is there",
        "what is in front of you",
        "what is around you",
        "what do you see in front of you",
        "describe the scene",
        "describe what you see",
        "tell me what you see",
        "look around and tell me what you see",
        "which things do you see",
        "list the things you see",
        "give me a description of the room",
        "report what you see",
    ),
    "stop": (
        "stop",
        "stop now",
        "stop right there",
        "stop moving",
        "stop driving",
        "halt",
        "hold it",
        "hold on",
        "stand still",
        "stay where you are",
        "stay there",
        "wait",
        "do not move",
        "freeze",
        "brake",
        "come to a stop",
    ),
}
_ADDRESSES = ("", "", "", "", "robot, ", "hey robot, ", "ok robot, ", "hello robot, ", "now ", "robot: ")
_COURTESIES = ("", "", "", "please ", "{}, please", "{} please", "{} now", "{}, thank you")
_SHAPE_WORDS = {
    "box": ("box", "box", "box", "cube", "crate"),
    "ball": ("ball", "ball", "ball", "sphere"),
    "cone": ("cone",),
    "cylinder": ("cylinder", "cylinder", "cylinder", "can", "drum"),
}
_COLOR_WORDS = {c: (c,) for c in COLORS} | {"purple": ("purple", "purple", "purple", "violet")}


@dataclass(frozen=True)
class Command:
    """One sentence and its meaning."""

    text: str
    kind: str  # one of KINDS
    color: str | None = None  # of the named solid; None if left out
    shape: str | None = None  # of the named solid; None if the command names none


def sample_command(
    rng: Generator, kind: str, color: str | None = None, shape: str | None = None, split: str = "train"
) -> Command:
    """Sample a wording of a command from a split.

    The kinds go and where need a shape. With color None the sentence names no colour. ValueError for an
    unknown kind, split, colour or shape, or a shape that does not fit the kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, got {split!r}")
    if (kind in ("go", "where")) != (shape is not None):
        raise ValueError(
            f"kind {kind!r} does not take shape {shape!r}: go and where need a shape, other kinds have none"
        )
    if shape is not None and (shape not in SHAPES or color not in (None, *COLORS)):
        things = f"color of {', '.join(COLORS)} and shape of {', '.join(SHAPES)}"
        raise ValueError(f"expected {things}, got {color} {shape}")
    while True:
        template = _pick(rng, TEMPLATES[kind])
        address, courtesy = _pick(rng, _ADDRESSES), _pick(rng, _COURTESIES)
        noun = ""
        if shape is not None:
            words = [_pick(rng, _COLOR_WORDS[color])] if color else []
            noun = " ".join([*words, _pick(rng, _SHAPE_WORDS[shape])])
        if split == command_split(template, address, courtesy, noun):
            return Command(_say(rng, template.format(x=noun), address, courtesy), kind, color, shape)


def command_split(template: str, address: str, courtesy: str, noun: str) -> str:
    """Return the split of a combination; punctuation has no influence."""
    framed = _share(_words(_frame(template, address, courtesy)))
    named = _share(f"{template}|{noun}") if noun else 1.0
    return "test" if framed < _TEST_SHARE or named < _TEST_SHARE else "train"


def vocabulary() -> set[str]:
    """Return every word of the grammar, without punctuation."""
    text = [*(t for group in TEMPLATES.values() for t in group), *_ADDRESSES, *_COURTESIES]
    text += [w for words in (*_SHAPE_WORDS.values(), *_COLOR_WORDS.values()) for w in words]
    words = " ".join(text).replace("{x}", " ").replace("{}", " ")
    return {word.strip(".,:?!") for word in words.split()} - {""}


def _say(rng: Generator, text: str, address: str, courtesy: str) -> str:
    """Join the parts, with or without capitals and punctuation.

    This imitates typed text and text from speech recognition.
    """
    question = text.startswith(
        ("what", "where", "which", "how", "could", "can", "would", "do you", "on which")
    )
    text = _frame(text, address, courtesy)
    style = rng.random()
    if style < 0.4:
        text += "?" if question else "."
    elif style < 0.5:
        text += "!" if not question else "?"
    if style < 0.25:
        text = text[0].upper() + text[1:]
    elif style > 0.9:
        text = text.replace(",", "").replace(":", "")
    return text


def _frame(text: str, address: str, courtesy: str) -> str:
    return address + (courtesy.replace("{}", text) if "{}" in courtesy else courtesy + text)


def _words(text: str) -> str:
    """Remove punctuation from a text."""
    return " ".join(word.strip(".,:?!") for word in text.split())


def _pick(rng: Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _share(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32
