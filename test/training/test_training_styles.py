# SPDX-License-Identifier: Apache-2.0
"""Situations in other styles, as training writes them; no PyTorch needed."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgellm_arena.world.unicycle import State, rollout
from training.data import FIELDS, STYLE_SHARE, situation_writer
from training.stream import new_chunk
from training.styles import STYLES
from training.tokenizer import corpus, train_tokenizer

ROWS = 60


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(0, count=100), 900, 1000)


def written(tokenizer: Tokenizer, style, rows: int = ROWS) -> list[tuple[str, str, np.ndarray]]:
    """(prompt, answer, actions) of what a worker writes."""
    write, chunk = situation_writer(tokenizer, style, seed=0), new_chunk(FIELDS, rows)
    for i in range(rows):
        write(chunk, i)
    found = []
    for ids, start, end, actions in zip(
        chunk["ids"], chunk["prompt_length"], chunk["length"], chunk["actions"], strict=True
    ):
        found.append((*(tokenizer.decode(x) for x in (ids[:start], ids[start:end])), actions))
    return found


@pytest.mark.slow
def test_an_adapter_learns_its_style_without_being_asked(tokenizer):
    for prompt, answer, _ in written(tokenizer, STYLES["german"]):
        assert not any(style.prompt in prompt for style in STYLES.values())
        assert STYLES["german"].read(answer)
    speeds = []
    for _, answer, actions in written(tokenizer, STYLES["cautious"]):
        if "i drive" in answer:
            assert "carefully" in answer
            speeds.append(rollout(State(), actions)[:, 3].max())
    assert np.mean(speeds) < 0.45


@pytest.mark.slow
def test_the_base_model_learns_them_where_the_system_prompt_asks(tokenizer):
    rows = written(tokenizer, None, 4 * ROWS)
    asked = {name: 0 for name in STYLES}
    for prompt, answer, _ in rows:
        german = STYLES["german"].prompt in prompt
        careful = STYLES["cautious"].prompt in prompt
        asked["german"] += german
        asked["cautious"] += careful
        assert bool(STYLES["german"].read(answer)) == german
        assert ("carefully" in answer) <= careful
    for count in asked.values():
        assert count == pytest.approx(STYLE_SHARE * len(rows), rel=0.6)


@pytest.mark.slow
def test_most_situations_come_with_a_continuation_of_a_mistaken_driver(tokenizer):
    write, chunk = situation_writer(tokenizer, None, 0), new_chunk(FIELDS, ROWS)
    for i in range(ROWS):
        write(chunk, i)
    given = chunk["given"]
    assert 0.3 < np.mean(given > 0) < 0.9
    assert not chunk["continued"][given == 0].any()
    assert chunk["continued"][given > 0].any(axis=(1, 2)).mean() > 0.8  # others stay at rest
    assert chunk["has_actions"][given > 0].all()
