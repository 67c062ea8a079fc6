# SPDX-License-Identifier: Apache-2.0
"""Train an MTP head for a checkpoint, on texts that the model writes itself.

The head is one of the model's own layers. Its input at token p is the model's state of token p after the last
norm and the embedding of token p + 1, and it predicts token p + 2; deeper levels take the head's own states.
The loss compares with the model's logits. Prompts are written by the model too: it continues the chat
template's empty turn of a user, and answers.

The head is added to the checkpoint in the layout that Qwen3.5 is published with: `mtp.safetensors`, and its
tensors in `model.safetensors.index.json`. `edgellm export` then finds it.

Examples
--------
    python -m training.mtp --checkpoint SmolLM2-135M-Instruct --minutes 5

"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgellm_ros.builder.weights.weights import add_file
from training.own_texts import Texts, Turns, Writer, above_zero, check_family, in_bf16, load_model

HEAD_FILE = "mtp.safetensors"
LEVEL_WEIGHT = 0.8  # of a level's loss, relative to the level before


class Head(nn.Module):
    """The modules of a head, with the names that Qwen3.5's has."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        base, config = model.get_decoder(), model.config
        check_family(config.model_type)
        hidden, norm = config.hidden_size, type(base.norm)
        self.pre_fc_norm_embedding = norm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=config.rms_norm_eps)
        self.norm = norm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(base.layers[-1])(config, 0)])
        # the model's last layer on the state alone is a good beginning
        self.layers[0].load_state_dict(base.layers[-1].state_dict())
        self.norm.load_state_dict(base.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1))

    def forward(self, embeds: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return the next states [B,L,H] of embeds and states [B,L,H]."""
        pair = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)
        out = self.layers[0](
            self.fc(torch.cat(pair, -1)), attention_mask=mask, position_embeddings=angles, use_cache=False
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)


class Rows:
    """What a head takes from the model on texts [B,L], for rows 0 to L - 2."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self._model, self._base = model, model.get_decoder()
        states = self._base(ids, use_cache=False).last_hidden_state
        self.states = states[:, :-1]
        self.following = model.get_input_embeddings()(ids[:, 1:])
        self.wanted = model.lm_head(states[:, 1:])  # logits of the token after the following one

    def run(self, head: Head, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run a text's last rows on states [B,N,H]; return logits and next states."""
        count, device = states.shape[1], states.device
        first = self.following.shape[1] - count
        mask = torch.full((count, count), float("-inf"), device=device, dtype=states.dtype).triu(1)
        angles = self._base.rotary_emb(states, torch.arange(first, first + count, device=device)[None])
        out = head(self.following[:, first:], states, angles, mask[None, None])
        return self._model.lm_head(out), out


def loss_of(model: PreTrainedModel, head: Head, ids: Tensor, levels: int) -> Tensor:
    """Compute the loss of the first levels on texts [B,L].

    Of each level it is the cross-entropy with the model's distribution.
    """
    rows = Rows(model, ids)
    wanted, states = rows.wanted.float().softmax(-1), rows.states
    total = torch.zeros((), device=ids.device)
    for level in range(levels):
        logits, out = rows.run(head, states)
        loss = -(wanted[:, level:] * F.log_softmax(logits.float(), -1)).sum(-1).mean()
        total = total + LEVEL_WEIGHT**level * loss
        states = out[:, :-1]  # the last row has no token after it
    return total


@torch.no_grad()
def agreement(model: PreTrainedModel, head: Head, ids: Tensor) -> float:
    """Return the share of the model's most likely tokens that the head predicts."""
    rows = Rows(model, ids)
    logits, _ = rows.run(head, rows.states)
    return (logits.argmax(-1) == rows.wanted.argmax(-1)).float().mean().item()


def save(checkpoint: Path, head: Head) -> None:
    """Add the head's tensors to the checkpoint."""
    tensors = {
        f"mtp.{name}": values.detach().half().contiguous().cpu() for name, values in head.state_dict().items()
    }
    save_file(tensors, checkpoint / HEAD_FILE, metadata={"format": "pt"})
    add_file(checkpoint, HEAD_FILE, tensors)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="directory of the model, which gets the head")
    add("--minutes", type=above_zero, default=10, help="of writing and steps together (default: %(default)s)")
    add("--batch", type=int, default=32, help="texts of a step (default: %(default)s)")
    add("--tokens", type=int, default=256, help="tokens of a text (default: %(default)s)")
    add(
        "--texts",
        type=int,
        default=8192,
        help="texts that the model writes, 8 or more (default: %(default)s)",
    )
    add("--levels", type=int, default=2, help="levels that are trained (default: %(default)s)")
    add("--rate", type=float, default=1e-3, help="largest learning rate (default: %(default)s)")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.texts < 8:
        parser.error(f"--texts {args.texts}: expected 8 or more, an eighth of which are not trained on")
    return args


def write_texts(model: PreTrainedModel, turns: Turns, args: argparse.Namespace, begin: float) -> Tensor:
    """Let the model write --texts conversations [B, L], i64.

    Writing takes two fifths of --minutes at most.
    """
    size = min(512, args.texts)
    writer = Writer(model, turns, size, len(turns.start) + args.tokens)
    texts: list[Texts] = []
    while sum(map(len, texts)) < args.texts and (not texts or time.monotonic() < begin + 24 * args.minutes):
        texts.append(writer.write([None] * size, torch.ones(size, device=model.device)))
    return Texts.join(texts).ids


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.checkpoint.is_dir():
        raise SystemExit(f"--checkpoint {args.checkpoint}: expected a directory, which gets the head")
    model, tokenizer = load_model(args.checkpoint, device)
    head = Head(model).to(device)
    begin, end = time.monotonic(), time.monotonic() + 60 * args.minutes
    data = write_texts(in_bf16(model) if device == "cuda" else model, Turns.of(tokenizer), args, begin)
    unseen, data = data[: min(64, len(data) // 8)], data[min(64, len(data) // 8) :]
    print(f"{len(data)} texts of {data.shape[1]} tokens in {time.monotonic() - begin:.0f} s", flush=True)
    if time.monotonic() > end:
        raise SystemExit(f"--minutes {args.minutes}: writing {args.texts} texts has taken all of them")
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, step = time.monotonic(), 0
    while time.monotonic() < end:
        done = (time.monotonic() - start) / (end - start)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 50) * max(0.02, 1 - done)
        rows = torch.randint(len(data), (min(args.batch, len(data)),), device=data.device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, head, data[rows], args.levels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {100 * done:.0f} %", flush=True)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        share = agreement(model, head, unseen)
    save(args.checkpoint, head)
    print(f"{step} steps; of {unseen.numel()} unseen tokens {share:.1%} are predicted one token early")


if __name__ == "__main__":
    main()
