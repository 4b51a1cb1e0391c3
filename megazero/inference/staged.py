"""A model spread over the stages of a pipeline, as inference sees it: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal

import torch
from torch import Tensor, nn

from megazero.inference.cache import KeyValueCache
from megazero.inference.shared_cache import SharedCache
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
    """The parts of a model that this stage holds; a single process holds one part, the whole model.

    A token passes through the stages one after another, and every stage gets the logits.

    Args:
        chunks: this stage's parts by their numbers along the model, without sequence parallelism.
        stage_of: chunk -> the stage that holds it.
        pp: the ranks of the pipeline; the group rank is the stage.
        sharers: ranks with equal parts, which share keys and values of earlier positions; None: there are no
            others.
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
        """One of the parts, for properties that all of them share."""
        return next(iter(self.chunks.values()))

    @property
    def spec(self) -> ModelSpec:
        """The model, layer by layer."""
        return self.any_part.spec

    @property
    def placement(self) -> Placement:
        """The placement of the layers."""
        return self.any_part.placement

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        weights = (weight for chunk in self.chunks.values() for weight in chunk.parameters())
        return next((weight.device for weight in weights), self.placement.device)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows, without padding."""
        return self.any_part.vocab_size

    def new_cache(self, max_length: int) -> Cache:
        """A cache for so many positions, of which this rank keeps its share."""
        return KeyValueCache(max_length) if self.sharers.size == 1 else SharedCache(self.sharers)

    def logits(self, batch: M, cache: Cache) -> Tensor:
        """Logits of the token after `batch`, float32 [b, v], the same on every stage."""

        def ask(head: nn.Module, hidden: Tensor) -> Tensor:
            logits: Tensor = head(hidden[-1:])
            return logits[0]

        return self._answers(batch, len(batch.tokens), ask, cache)

    def masked_logits(self: StagedModel[BertBatch], batch: BertBatch) -> Tensor:
        """Logits at the masked places, float32 [m, v], the same on every stage."""

        def ask(head: nn.Module, hidden: Tensor) -> Tensor:
            logits: Tensor = head(hidden, batch)[0]
            return logits.squeeze(1)

        return self._answers(batch, len(batch.targets.masked), ask)

    def _answers(
        self,
        batch: M,
        rows: int,
        ask: Callable[[nn.Module, Tensor], Tensor],
        cache: Cache | None = None,
    ) -> Tensor:
        """The result of `ask(head, hidden states)` on the last stage, gathered: [rows, v] on every stage."""
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
            sliced = ask(head, hidden)
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
