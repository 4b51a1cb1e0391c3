"""A model whose stages lie on the ranks of a pipeline: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal

import torch
from torch import Tensor, nn

from megazero.inference.cache import KeyValueCache, SharedCache
from megazero.layers.attention_cores import CachedCore, LocalCore
from megazero.layers.collectives import gather_features
from megazero.layers.context.cached import SharedCacheCore
from megazero.layers.inputs import AttentionCore
from megazero.layers.placement import Placement
from megazero.models.batch import M
from megazero.models.bert_batch import BertBatch
from megazero.models.chunk import StagedChunk
from megazero.mpu.group import Group, Transfer
from megazero.mpu.solo_group import SoloGroup
from megazero.spec.model import ModelSpec

Cache = KeyValueCache | SharedCache


class StagedModel(Generic[M]):
    """The chunks of a model that this stage holds; a single process holds the whole model as one chunk.

    A token passes through the stages one after another, and every stage gets the logits.

    Args:
        chunks: the chunks of this stage by their numbers along the model, without sequence parallelism.
        stage_of: chunk -> the stage that holds it.
        pp: the ranks of the pipeline; the group rank is the stage.
        sharers: ranks with the same chunks, which split the key-value cache; None if there are none.
    """

    def __init__(
        self,
        chunks: Mapping[int, StagedChunk[M]],
        stage_of: tuple[int, ...],
        pp: Group,
        sharers: Group | None = None,
    ):
        self.chunks = dict(chunks)
        self.stage_of = stage_of
        self.pp = pp
        self.sharers = sharers or SoloGroup("cp", 0)

    @classmethod
    def whole(cls, model: StagedChunk[M]) -> StagedModel[M]:
        """A model that is whole on a single stage."""
        return cls({0: model}, (0,), SoloGroup("pp", 0))

    @property
    def any_part(self) -> StagedChunk[M]:
        """One of the chunks, for properties that all chunks share."""
        return next(iter(self.chunks.values()))

    @property
    def spec(self) -> ModelSpec:
        """The specification of the whole model."""
        return self.any_part.spec

    @property
    def placement(self) -> Placement:
        """Where the layers lie and how they are sliced."""
        return self.any_part.placement

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        weights = (weight for chunk in self.chunks.values() for weight in chunk.parameters())
        return next((weight.device for weight in weights), self.placement.device)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary, without padding."""
        return self.any_part.vocab_size

    def new_cache(self, max_length: int) -> Cache:
        """A cache for `max_length` positions, split over the sharers if there are several."""
        return KeyValueCache(max_length) if self.sharers.size == 1 else SharedCache(self.sharers)

    def logits(self, batch: M, cache: Cache) -> Tensor:
        """The logits of the token after `batch`, float32 [b, v], the same on every stage."""

        def last_logits(head: nn.Module, hidden: Tensor) -> Tensor:
            logits: Tensor = head(hidden[-1:])
            return logits[0]

        return self._run(batch, len(batch.tokens), last_logits, cache)

    def masked_logits(self: StagedModel[BertBatch], batch: BertBatch) -> Tensor:
        """The logits at the m masked places, float32 [m, v], the same on every stage."""

        def logits_at_masks(head: nn.Module, hidden: Tensor) -> Tensor:
            logits: Tensor = head(hidden, batch)[0]
            return logits.squeeze(1)

        return self._run(batch, len(batch.targets.masked), logits_at_masks)

    def _run(
        self,
        batch: M,
        rows: int,
        apply: Callable[[nn.Module, Tensor], Tensor],
        cache: Cache | None = None,
    ) -> Tensor:
        """Run the batch through all stages and `apply(head, hidden states)`; return [rows, v] on every stage.

        `apply` returns logits sliced over tensor-parallel ranks, which are gathered.
        """
        hidden = None
        for number, stage in enumerate(self.stage_of):
            if stage != self.pp.rank:
                continue
            chunk = self.chunks[number]
            if number > 0 and self.stage_of[number - 1] != stage:
                hidden = chunk.input_boundary(batch).empty(batch.tokens.device)
                self._move("recv", hidden, self.stage_of[number - 1], number)
            core = None if cache is None else self._core(cache, chunk)
            hidden = chunk.hidden(batch, hidden, core=core)
            if number + 1 < len(self.stage_of) and self.stage_of[number + 1] != stage:
                self._move("send", hidden.contiguous(), self.stage_of[number + 1], number + 1)
        whole = torch.empty(rows, self.vocab_size, device=batch.tokens.device)
        if self.stage_of[-1] == self.pp.rank:
            head = self.chunks[len(self.stage_of) - 1].head
            assert head is not None, "the last chunk has the head"
            assert hidden is not None, "the last chunk has computed"
            sliced = apply(head, hidden)
            whole.copy_(gather_features(sliced, self.placement.tp)[:, : self.vocab_size])
        self.pp.broadcast(whole, self.stage_of[-1]).wait()
        return whole

    def _core(self, cache: Cache, chunk: StagedChunk[M]) -> AttentionCore:
        if isinstance(cache, SharedCache):
            return SharedCacheCore(cache, self.sharers)
        return CachedCore(cache, LocalCore(chunk.placement.tp))

    def _move(self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int) -> None:
        for work in self.pp.exchange([Transfer(kind, tensor, peer, tag)]):
            work.wait()
