"""Tokens of many requests drawn at once, each by its own settings, and log-probabilities of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.inference.sampling import Sampling, draw_tokens, probabilities
from megazero.ops.cross_entropy import OneRank, VocabularySlice, vocab_parallel_losses
from megazero.serving.wanted import Token, Wanted

ROWS_AT_ONCE = 128
"""Rows of a prompt whose logits are in memory at a time."""


class Row(NamedTuple):
    """A row of logits: the request, and its tokens so far, the prompt's among them."""

    wanted: Wanted
    tokens: Sequence[int]

    @property
    def new(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.tokens) - len(self.wanted.prompt)


def draw(logits: Tensor, rows: Sequence[Row]) -> list[Token]:
    """Draw a token for each row of logits, float32 [b, v], which must be finite; they are not changed."""
    changed = logits
    for i, row in enumerate(rows):
        early = row.new < row.wanted.min_tokens and row.wanted.stop_ids
        if early or not row.wanted.penalties.idle:
            changed = logits.clone() if changed is logits else changed
            _change(changed[i], row)
    settings = [row.wanted.sampling for row in rows]
    numbers = [row.wanted.number for row in rows]
    ids = draw_tokens(changed, settings, numbers, [len(row.tokens) for row in rows])
    drawn = ids.tolist()
    tokens = [Token(token) for token in drawn]
    asked = [i for i, row in enumerate(rows) if row.wanted.logprobs is not None]
    if asked:
        best = max(rows[i].wanted.logprobs or 0 for i in asked)
        scores = token_scores(logits[asked], ids[asked], best).tolist()
        for i, score in zip(asked, scores, strict=True):
            tokens[i] = scored_token(drawn[i], score, rows[i].wanted.logprobs or 0)
    for sampling in {row.wanted.sampling for row in rows if row.wanted.as_drawn}:
        own = [i for i, row in enumerate(rows) if row.wanted.as_drawn and row.wanted.sampling == sampling]
        drawn_so = _as_drawn(changed[own][:, : sampling.vocab_size], [drawn[i] for i in own], sampling)
        for i, token in zip(own, drawn_so, strict=True):
            tokens[i] = token
    return tokens


def _as_drawn(logits: Tensor, ids: Sequence[int], sampling: Sampling) -> list[Token]:
    """Tokens with their log-probabilities in the distribution that they are drawn from, by logits [b, v].

    These are those of training's loss, to the last bit where one rank has the whole vocabulary.
    """
    scores = logits.float() if sampling.temperature == 1.0 else logits.float() / sampling.temperature
    kept: list[list[int]] = [[] for _ in ids]
    if sampling.truncates:
        there = probabilities(logits, sampling) > 0
        scores = scores.masked_fill(~there, torch.finfo(scores.dtype).min / 4)
        among = iter(there.nonzero()[:, 1].tolist())  # of all rows, for which the host waits once
        kept = [[*islice(among, count)] for count in there.sum(1).tolist()]
    part = VocabularySlice(OneRank(), 0, scores.shape[-1])
    drawn = torch.tensor(ids, device=logits.device)
    losses = vocab_parallel_losses(scores.contiguous(), drawn, part).loss.tolist()
    entropies = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1, dtype=torch.float64).tolist()
    return [
        Token(token, -loss, tuple((one, 0.0) for one in among), entropy)
        for token, loss, among, entropy in zip(ids, losses, kept, entropies, strict=True)
    ]


def token_scores(logits: Tensor, tokens: Tensor, best: int) -> Tensor:
    """Score `tokens`, int64 [b], by logits [b, v]: float32 [b, 1 + 2 best].

    A row has the token's log-probability, the ids of the likeliest tokens, of equal ones the smaller first,
    and their log-probabilities. Ids below 2^24 are exact.
    """
    logs = logits.float().log_softmax(dim=-1)
    own = logs.gather(1, tokens.unsqueeze(1))
    if best == 0:
        return own
    if best == 1:
        values, ids = logs.max(dim=-1, keepdim=True)  # of equal ones the first
        return torch.cat((own, ids.float(), values), dim=1)
    ids = logs.topk(min(best, logs.shape[1]), dim=-1).indices.sort(dim=-1).values
    values, order = logs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return torch.cat((own, ids.gather(1, order).float(), values), dim=1)


def scored_token(token: int, score: Sequence[float], kept: int) -> Token:
    """The token with its row of `token_scores`, of whose likeliest tokens the first `kept` are told."""
    width = len(score) // 2
    ids, logs = score[1 : 1 + width], score[1 + width :]
    pairs = zip(ids[:kept], logs[:kept], strict=True)
    return Token(token, score[0], tuple((int(i), log) for i, log in pairs))


def _change(logits: Tensor, row: Row) -> None:
    """Change one row of logits [v] by its penalties, and take away the tokens that end it too early."""
    wanted, penalties, device = row.wanted, row.wanted.penalties, logits.device
    if penalties.repetition != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=device)
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition)
    if (penalties.frequency or penalties.presence) and row.new:
        counts = Counter(row.tokens[len(wanted.prompt) :])
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=device)
        logits[torch.tensor(list(counts), device=device)] -= times * penalties.frequency + penalties.presence
    if penalties.logit_bias:
        biases = torch.tensor(list(penalties.logit_bias.values()), dtype=logits.dtype, device=device)
        logits[torch.tensor(list(penalties.logit_bias), device=device)] += biases
    if row.new < wanted.min_tokens and wanted.stop_ids:
        logits[torch.tensor(sorted(wanted.stop_ids), device=device)] = -torch.inf
