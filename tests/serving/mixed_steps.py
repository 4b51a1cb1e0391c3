"""Sequences fed to a model in steps that mix prompts' pieces and single tokens of many."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, Places
from megazero.serving.coded_pages import CodedPages
from megazero.serving.page_buffers import PageBuffers, Ragged


def scores(
    model: StagedModel[Batch], texts: Sequence[Sequence[int]], rng: random.Random, page: int
) -> list[Tensor]:
    """Log-probabilities after every token of each text, float32 [s, v], over pages, cut by chance."""
    needed = [-(-len(text) // page) for text in texts]
    numbers = rng.sample(range(sum(needed) + 3), sum(needed))
    tables = [tuple(numbers.pop() for _ in range(count)) for count in needed]
    made = CodedPages if model.coded_cache else PageBuffers
    buffers, done = made(sum(needed) + 3, page), [0] * len(texts)
    parts: list[list[Tensor]] = [[] for _ in texts]
    with torch.inference_mode():
        while live := [i for i, text in enumerate(texts) if done[i] < len(text)]:
            chosen = sorted(rng.sample(live, rng.randint(1, len(live))))
            counts = [min(rng.choice((1, 1, rng.randint(1, 70))), len(texts[i]) - done[i]) for i in chosen]
            ragged = Ragged(tuple(counts), tuple(done[i] for i in chosen), tuple(tables[i] for i in chosen))
            runs = [range(done[i], done[i] + count) for i, count in zip(chosen, counts, strict=True)]
            places = [place for run in runs for place in run]
            fed = [texts[i][place] for i, run in zip(chosen, runs, strict=True) for place in run]
            batch = Batch(torch.tensor([fed]), places=Places(torch.tensor(places)))
            tp = model.placement.tp
            core = buffers.core(ragged, tp)
            rows = model.run(batch, _scored(model), (len(fed), model.vocab_size), lambda _, core=core: core)
            for i, part in zip(chosen, rows.split(counts), strict=True):
                parts[i].append(part)
            for i, run in zip(chosen, runs, strict=True):
                done[i] = run.stop
    return [torch.cat(part) for part in parts]


def trained(model: StagedModel[Batch], text: Sequence[int]) -> Tensor:
    """The same by one pass over the text as training makes it: with gradients, without pages."""
    batch = Batch(torch.tensor([list(text)]))
    return model.run(batch, _scored(model), (len(text), model.vocab_size)).detach()


def _scored(model: StagedModel[Batch]) -> Callable[[nn.Module, Tensor], Tensor]:
    def apply(head: nn.Module, hidden: Tensor) -> Tensor:
        return model.unsliced(head(hidden)).squeeze(1).float().log_softmax(-1)

    return apply
