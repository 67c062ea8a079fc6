# SPDX-License-Identifier: Apache-2.0
"""A checkpoint goes on learning with another tokenizer: it keeps what it knew."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from training.checkpoint import (  # noqa: E402
    load_thinker,
    move_rows,
    new_thinker,
    save_checkpoint,
    thinker_config,
)
from training.expert import ExpertDims, FlowExpert  # noqa: E402
from training.spec import ACTION_SPACE  # noqa: E402
from training.tokenizer import train_tokenizer  # noqa: E402

ENGLISH = ["i see a red box", "go to the red box"] * 9
SPACE = {**ACTION_SPACE, "mean": [0.0, 0.0], "std": [1.0, 1.0]}


@pytest.fixture(scope="module")
def old():
    return train_tokenizer(ENGLISH, 262, 4)


@pytest.fixture(scope="module")
def new():
    return train_tokenizer([*ENGLISH, *["ich sehe"] * 50], 272, 4)


def test_a_token_that_both_know_keeps_its_row(old, new):
    weight = torch.randn(old.get_vocab_size(), 8)
    moved = move_rows(weight, old, new)
    known = set(old.get_vocab()) & set(new.get_vocab())
    assert "<|im_end|>" in known
    assert len(known) > 256
    for token in known:
        assert torch.equal(moved[new.token_to_id(token)], weight[old.token_to_id(token)]), token


def test_a_new_token_begins_as_the_mean_of_its_pieces(old, new):
    weight = torch.randn(old.get_vocab_size(), 8)
    token = max(set(new.get_vocab()) - set(old.get_vocab()), key=len)
    pieces = old.encode(new.decode([new.token_to_id(token)])).ids
    assert len(pieces) > 1
    torch.testing.assert_close(move_rows(weight, old, new)[new.token_to_id(token)], weight[pieces].mean(0))


@torch.no_grad()
def test_a_sentence_of_known_tokens_gets_the_same_logits(old, new, tmp_path):
    torch.manual_seed(0)
    save_checkpoint(tmp_path, new_thinker(thinker_config(old)), FlowExpert(ExpertDims()), old, SPACE)
    thinker, moved = (load_thinker(tmp_path, thinker_config(words), words).eval() for words in (old, new))
    ids, known = old.encode(ENGLISH[0]).ids, sorted(set(old.get_vocab()) & set(new.get_vocab()))
    tokens = [old.id_to_token(i) for i in ids]
    assert set(tokens) <= set(known)
    before = thinker(input_ids=torch.tensor([ids])).logits[0]
    after = moved(input_ids=torch.tensor([[new.token_to_id(t) for t in tokens]])).logits[0]
    columns = [[tokenizer.token_to_id(t) for t in known] for tokenizer in (old, new)]
    torch.testing.assert_close(after[:, columns[1]], before[:, columns[0]], atol=1e-4, rtol=0)
