"""`Runner`: computes a step's plan on one rank, over pages or over caches of single sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.inference.staged import Cache, StagedModel
from megazero.layers.inputs import AttentionCore
from megazero.models.batch import Batch, Places
from megazero.models.chunk import StagedChunk
from megazero.serving.coded_pages import CodedPages
from megazero.serving.page_buffers import PageBuffers, Ragged, on_device
from megazero.serving.plan import Part, Plan
from megazero.serving.sampled import ROWS_AT_ONCE, token_scores

CoreOf = Callable[[StagedChunk[Batch]], AttentionCore]


class Computed(NamedTuple):
    """The results of a step, in the order of its parts.

    Attributes:
        logits: float32 [b, v], of the rows after which a token is drawn.
        scores: for each part its `token_scores`, [its scored rows, 1 + 2 best].
    """

    logits: Tensor
    scores: list[Tensor]


def paged(model: StagedModel[Batch]) -> bool:
    """Whether keys and values of the model's sequences can lie in pages.

    Not if a layer keeps a state instead, sees a sequence by a layout of blocks or sees later tokens, or if
    ranks share a sequence.
    """
    layers = model.spec.layers
    plain = all(layer.mixer is None and layer.cross is None for layer in layers)
    sights = [attention.sight for attention in model.spec.attentions()]
    return (
        model.sharers.size == 1
        and plain
        and model.spec.relative is None
        and all(sight.causal and sight.sparse is None for sight in sights)
    )


class Runner:
    """Computes plans; what it knows of earlier ones are tables of pages, or caches.

    Args:
        model: the model, without sequence parallelism.
        pages: the number of pages.
        page: positions of each.
    """

    def __init__(self, model: StagedModel[Batch], pages: int, page: int):
        self.model = model
        make = CodedPages if model.coded_cache else PageBuffers
        self._buffers = make(pages, page) if paged(model) else None
        self._tables: dict[int, tuple[int, ...]] = {}
        self._caches: dict[int, Cache] = {}

    def __call__(self, plan: Plan) -> Computed:
        """Compute a plan; every rank of the model calls this with the same plan and gets the same."""
        for ticket in plan.dropped:
            table = self._tables.pop(ticket, ())
            self._caches.pop(ticket, None)
            if self._buffers is not None:
                self._buffers.forget(table)
        if not plan.parts:
            return Computed(torch.empty(0, self.model.vocab_size), [])
        if self._buffers is not None:
            return self._on_pages(plan.parts, self._buffers)
        results = [self._alone(part) for part in plan.parts]
        return Computed(torch.cat([one.logits for one in results]), [one.scores[0] for one in results])

    def _on_pages(self, parts: Sequence[Part], buffers: PageBuffers) -> Computed:
        for part in parts:
            if part.pages:
                self._tables[part.ticket] = (*self._tables.get(part.ticket, ()), *part.pages)
        rows, past, device = [part.rows for part in parts], [part.past for part in parts], self.model.device
        ragged = Ragged((*rows,), (*past,), tuple(self._tables[part.ticket] for part in parts), device)
        (positions,) = on_device(device, [at + i for at, n in zip(past, rows, strict=True) for i in range(n)])
        return self._forward(parts, Places(positions), lambda chunk: buffers.core(ragged, chunk.placement.tp))

    def _alone(self, part: Part) -> Computed:
        if part.ticket not in self._caches:
            self._caches[part.ticket] = self.model.new_cache(part.room)
        cache = self._caches[part.ticket]
        places = Places(range(part.past, part.past + part.rows))
        return self._forward([part], places, lambda chunk: self.model.core(cache, chunk))

    def _forward(self, parts: Sequence[Part], places: Places, core_of: CoreOf) -> Computed:
        """Run rows of tokens [1, T] through the model and its head, as far as somebody reads them."""
        device, vocab = self.model.device, self.model.vocab_size
        rows = [token for part in parts for token in part.tokens[: part.rows]]
        batch = Batch(torch.tensor([rows], device=device), places=places)
        reads = _Rows.of(parts, device)
        shapes = [(part.reads.scored, 1 + 2 * min(part.reads.best, vocab)) for part in parts]
        sizes = [len(reads.drawn) * vocab, *(count * width for count, width in shapes)]

        def read(head: nn.Module, hidden: Tensor) -> Tensor:
            pieces = []
            if len(reads.drawn):
                pieces.append(self.model.unsliced(head(hidden[reads.drawn])[:, 0]).float().flatten())
            for scored, following, best in reads.scored:
                logits = self.model.unsliced(head(hidden[scored])[:, 0])
                pieces.append(token_scores(logits, following, best).flatten())
            return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else hidden.new_empty(0)

        logits, *scores = self.model.run(batch, read, (sum(sizes),), core_of).split(sizes)
        return Computed(
            logits.view(-1, vocab), [x.view(shape) for x, shape in zip(scores, shapes, strict=True)]
        )


class _Rows(NamedTuple):
    """The rows whose logits are read: those drawn after, int64 [b], and runs that are scored."""

    drawn: Tensor
    scored: list[tuple[slice, Tensor, int]]

    @classmethod
    def of(cls, parts: Sequence[Part], device: torch.device) -> _Rows:
        drawn, scored, start = [], [], 0
        for part in parts:
            for at in range(0, part.reads.scored, ROWS_AT_ONCE):
                stop = min(at + ROWS_AT_ONCE, part.reads.scored)
                following = torch.tensor(part.tokens[at + 1 : stop + 1], device=device)
                scored.append((slice(start + at, start + stop), following, part.reads.best))
            start += part.rows
            if part.reads.draws:
                drawn.append(start - 1)
        return cls(torch.tensor(drawn, dtype=torch.int64, device=device), scored)
