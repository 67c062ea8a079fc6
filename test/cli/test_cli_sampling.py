# SPDX-License-Identifier: Apache-2.0
"""Sampling options, and the checkpoint's defaults where there are none."""

from __future__ import annotations

from fixtures.sampled_answers import PROMPT, SAMPLED, TOKENS


def test_generate_samples_as_the_checkpoint_says(edgellm, sampling_engine):
    def tokens(*options: object) -> list[int]:
        command = ("generate", sampling_engine, "--prompt", PROMPT, "--max-tokens", TOKENS, "--seed", 3)
        return edgellm(*command, "--json", *options).json["token_ids"]

    options = [part for name, value in SAMPLED.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert tokens() == tokens(*options)
    assert tokens() != tokens("--temperature", 0)
