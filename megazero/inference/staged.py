"""A model whose stages lie on the ranks of a pipeline: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal

import torch
from torch import Tensor, nn

from megazero.inference.cache import KeyValueCache, SharedCache
from megazero.inference.coded import BlockwiseCore
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
        coded_cache: whether keys and values are kept in codes of 8 bits (see `inference.coded`).
    """

    def __init__(
        self,
        chunks: Mapping[int, StagedChunk[M]],
        stage_of: tuple[int, ...],
        pp: Group,
        sharers: Group | None = None,
        *,
        coded_cache: bool = False,
    ):
        self.chunks = dict(chunks)
        self.stage_of = stage_of
        self.pp = pp
        self.sharers = sharers or SoloGroup("cp", 0)
        self.coded_cache = coded_cache

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
        if self.sharers.size == 1:
            return KeyValueCache(max_length, coded=self.coded_cache)
        return SharedCache(self.sharers, coded=self.coded_cache)

    def logits(self, batch: M, cache: Cache) -> Tensor:
        """The logits of the token after `batch`, float32 [b, v], the same on every stage."""

        def last_logits(head: nn.Module, hidden: Tensor) -> Tensor:
            return self.unsliced(head(hidden[-1:])[0])

        shape = len(batch.tokens), self.vocab_size
        return self.run(batch, last_logits, shape, lambda chunk: self.core(cache, chunk))

    def masked_logits(self: StagedModel[BertBatch], batch: BertBatch) -> Tensor:
        """The logits at the m masked places, float32 [m, v], the same on every stage."""

        def logits_at_masks(head: nn.Module, hidden: Tensor) -> Tensor:
            return self.unsliced(head(hidden, batch)[0].squeeze(1))

        return self.run(batch, logits_at_masks, (len(batch.targets.masked), self.vocab_size))

    def unsliced(self, logits: Tensor) -> Tensor:
        """Logits [..., v] of the whole vocabulary, without padding, from this rank's slice [..., v/tp]."""
        return gather_features(logits, self.placement.tp)[..., : self.vocab_size]

    def run(
        self,
        batch: M,
        apply: Callable[[nn.Module, Tensor], Tensor],
        shape: tuple[int, ...],
        core_of: Callable[[StagedChunk[M]], AttentionCore] | None = None,
    ) -> Tensor:
        """Run the batch through all stages and `apply(head, hidden states)`; return its result everywhere.

        Args:
            batch: the tokens, the same on every rank of the model.
            apply: computes the result on the last stage's ranks, from hidden states [s, b, h].
            shape: the result's shape; it is float32.
            core_of: the attention core of a chunk; None for the layers' own.
        """
        hidden = None
        for number, stage in enumerate(self.stage_of):
            if stage != self.pp.rank:
                continue
            chunk = self.chunks[number]
            if number > 0 and self.stage_of[number - 1] != stage:
                hidden = chunk.input_boundary(batch).empty(batch.tokens.device)
                self._move("recv", hidden, self.stage_of[number - 1], number)
            hidden = chunk.hidden(batch, hidden, core=core_of and core_of(chunk))
            if number + 1 < len(self.stage_of) and self.stage_of[number + 1] != stage:
                self._move("send", hidden.contiguous(), self.stage_of[number + 1], number + 1)
        result = torch.empty(shape, device=batch.tokens.device)
        if self.stage_of[-1] == self.pp.rank:
            head = self.chunks[len(self.stage_of) - 1].head
            assert head is not None, "the last chunk has the head"
            assert hidden is not None, "the last chunk has computed"
            result.copy_(apply(head, hidden))
        self.pp.broadcast(result, self.stage_of[-1]).wait()
        return result

    def core(self, cache: Cache, chunk: StagedChunk[M]) -> AttentionCore:
        """The attention core of a chunk that continues the sequences in a cache."""
        core: AttentionCore
        if isinstance(cache, SharedCache):
            core = SharedCacheCore(cache, self.sharers)
        else:
            core = CachedCore(cache, LocalCore(chunk.placement.tp))
        return BlockwiseCore(core) if cache.coded else core

    def _move(self, kind: Literal["send", "recv"], tensor: Tensor, peer: int, tag: int) -> None:
        for work in self.pp.exchange([Transfer(kind, tensor, peer, tag)]):
            work.wait()
