# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request; imports nothing heavy.

The fields of SamplingParams are also options of commands (cli/requests/request_options.py), keys of requests
in files (cli/requests/request_files.py) and, those of SAMPLED, parameters of the node
(ros/node/settings/parameters.py). CONTRIBUTING.md says what a new one needs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgellm_ros.echo import quoted
from edgellm_ros.option import Option, option, options
from edgellm_ros.runtime.grammar.json_schemas import schema_text
from edgellm_ros.sequence_checks import check_texts

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import GenerationDefaults
    from edgellm_ros.runtime.grammar.library import Grammar

SAMPLING, GRAMMAR = "sampling", "grammar of the answer"  # groups of `--help`


@dataclass(frozen=True, kw_only=True)
class Sampled(Option):
    """Option of a sampling rule: None = the checkpoint's default, if it has one."""

    title: str  # begins the description of the node's parameter
    off: float  # value without effect: the default of a checkpoint that has none
    without: str = "off"  # sampling with this value
    group: str = SAMPLING


@dataclass(frozen=True)
class SamplingParams:
    """Rules for the sampling of tokens, for the text and for the end of an answer.

    The same seed gives the same tokens. At most one of `json_schema`, `regex` and `choices` is given. None is
    the checkpoint's default, of generation_config.json: greedy, unless it has do_sample. ValueError names the
    parameter, its range and the value.
    """

    # Kernels compute with float32: outside these bounds values become 0, infinite or denormal on some devices
    temperature: float | None = option(
        None,
        "sampling temperature; 0 takes the likeliest token",
        Sampled,
        title="Sampling temperature",
        metavar="T",
        least=1e-6,
        most=1e6,
        or_zero=True,
        off=0.0,
        without="greedy",
    )
    top_k: int | None = option(
        None,
        "keep the K likeliest tokens; 0 keeps all",
        Sampled,
        title="Top-k sampling",
        metavar="K",
        least=0,
        most=2**31 - 1,
        off=0,
    )
    top_p: float | None = option(
        None,
        "keep the smallest set of likeliest tokens with probability P",
        Sampled,
        title="Top-p (nucleus) sampling",
        metavar="P",
        least=1e-30,
        most=1.0,
        off=1.0,
    )
    min_p: float | None = option(
        None,
        "drop tokens below P times the likeliest (default: 0, off)",
        Sampled,
        title="Min-p sampling",
        metavar="P",
        least=0.0,
        most=1.0,
        off=0.0,
    )
    repetition_penalty: float | None = option(
        None,
        "above 1: make repeated tokens less likely",
        Sampled,
        title="Repetition penalty",
        metavar="R",
        least=1e-6,
        most=1e6,
        off=1.0,
    )
    max_tokens: int = option(
        96, "longest answer in tokens (default: %(default)s)", group=SAMPLING, least=1, most=2**31 - 1
    )
    # strings that are not part of the text
    stop: tuple[str, ...] = option(
        (),
        "end the answer before this text; repeat for several",
        group=SAMPLING,
        metavar="TEXT",
        repeated=True,
    )
    seed: int = option(
        0, "seed of the token sampler (default: %(default)s)", group=SAMPLING, least=0, most=2**64 - 1
    )
    # kept as text; True = of any schema, "" = off
    json_schema: str | bool | Mapping[str, Any] = option(
        "",
        "answer with JSON of this JSON schema: a file, or {...}",
        group=GRAMMAR,
        metavar="FILE|TEXT",
        exclusive=True,
    )
    regex: str = option(  # "" = off
        "", "answer with text that matches as a whole", group=GRAMMAR, metavar="REGEX", exclusive=True
    )
    choices: tuple[str, ...] = option(  # empty = off
        (), "answer with one of these", group=GRAMMAR, metavar="A,B", exclusive=True
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("stop", "choices"):
            object.__setattr__(self, name, check_texts(name, getattr(self, name)))
        if not isinstance(self.regex, str):
            raise ValueError(f"regex must be a string, got {quoted(self.regex)}")
        if self.json_schema != "":
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        self.grammar  # noqa: B018 - checks

    def _check_numbers(self) -> None:
        for field, how in options(SamplingParams):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                how.check(field.name, value)

    @cached_property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None = any text."""
        from edgellm_ros.runtime.grammar.grammar import make_grammar

        return make_grammar(str(self.json_schema), self.regex, self.choices)

    def resolved(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return these parameters with the checkpoint's defaults in place of None.

        ValueError names a default of the checkpoint that is out of range.
        """
        absent = [name for name in SAMPLED if getattr(self, name) is None]
        if not absent:
            return self
        resolved = copy.copy(self)  # with the grammar, which is not made again
        for name in absent:
            object.__setattr__(resolved, name, getattr(defaults, name, SAMPLED[name].off))
        try:
            resolved._check_numbers()
        except ValueError as error:
            raise ValueError(f"generation_config.json of the checkpoint: {error}") from None
        return resolved


SAMPLED = {field.name: how for field, how in options(SamplingParams) if isinstance(how, Sampled)}
