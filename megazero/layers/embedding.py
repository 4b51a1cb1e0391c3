"""Token and position embeddings, the vocabulary sliced over the tensor-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.tree import ModelConfig
from megazero.errors import DataError
from megazero.layers.collectives import own_rows, reduce_from_slices, reduce_scatter_sequence
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.mpu import Cut, InitialValues, ParamSpec
from megazero.ops.dropout import dropout_mask_hidden


def vocabulary_spec(name: str, vocab_size: int, padded_size: int, config: ModelConfig) -> ParamSpec:
    """The spec of a [vocab, h] weight (embedding or output head), padded to divide over the ranks."""
    normal = InitialValues("normal", config.init_method_std)
    return ParamSpec(name, (vocab_size, config.hidden_size), normal, (Cut(0, "tp", padded_size),))


class Embedding(nn.Module):
    """tokens [b, s] -> hidden states [s, b, h] ([s/tp, b, h] under sequence parallelism).

    Args:
        vocab_size: entries that tokens may name.
        padded_size: rows allocated, a multiple of the tensor-parallel size.

    Raises:
        DataError: (forward, on CPU) a token lies outside the vocabulary; elsewhere the device reports it.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, padded_size: int, placement: Placement):
        super().__init__()
        self.config = config
        self.placement = placement
        self.vocab_size = vocab_size
        self.word = placement.parameter(
            vocabulary_spec("embedding.word.weight", vocab_size, padded_size, config)
        )
        self.position = None
        if config.position_embedding_type == "learned_absolute":
            self.position = placement.parameter(
                ParamSpec(
                    "embedding.position.weight",
                    (config.positions, config.hidden_size),
                    InitialValues("normal", config.init_method_std),
                    partial_grad=placement.sequence_parallel,
                )
            )

    def forward(self, tokens: Tensor, positions: Tensor, inputs: LayerInputs) -> Tensor:
        """tokens [b, s] and positions [b, s] or [s], int64."""
        placement = self.placement
        x = self._words(tokens.t())  # [s, b, h]
        if self.position is not None:
            positions = positions.t() if positions.dim() == 2 else positions.unsqueeze(1)
            if placement.sequence_parallel:
                positions = own_rows(positions, placement.tp)
            x = x + F.embedding(positions, self.position)
        if self.config.fp32_residual_connection:
            x = x.float()
        drop = inputs.dropout(self.config.hidden_dropout, placement, "hidden", "embedding")
        if drop is None:
            return x
        return x * dropout_mask_hidden(drop, *x.shape) / (1.0 - drop.p)

    def _words(self, tokens: Tensor) -> Tensor:
        tp = self.placement.tp
        foreign = (tokens < 0) | (tokens >= self.vocab_size)
        if tp.size == 1:
            return self._look_up(tokens, foreign)
        rows = self.word.shape[0]
        local = tokens - tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = self._look_up(local.masked_fill(elsewhere, 0), foreign)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.placement.sequence_parallel:
            return reduce_scatter_sequence(x, tp)
        return reduce_from_slices(x, tp)

    def _look_up(self, rows: Tensor, foreign: Tensor) -> Tensor:
        """Rows of the weight. A foreign id, which padding would answer, asks for a row that is nowhere.

        So nothing here waits for a look at the ids; who makes a batch has looked (`data.check_token_ids`).
        """
        try:
            return F.embedding(rows.masked_fill(foreign, -1), self.word)
        except IndexError as error:
            raise DataError(
                f"`tokens` must lie in [0, {self.vocab_size}), but {int(foreign.sum())} do not; "
                "was the data made with another tokenizer?"
            ) from error
