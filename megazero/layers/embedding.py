"""Token, position and segment embeddings, the vocabulary sliced over the tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.errors import DataError
from megazero.layers.collectives import reduce_from_slices, reduce_scatter_sequence
from megazero.layers.inputs import LayerInputs
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.dropout import dropout_mask_hidden
from megazero.ops.embedding import embedding


def vocabulary_spec(name: str, vocab_size: int, padded_size: int, config: ModelConfig) -> ParamSpec:
    """The spec of a [vocab, h] weight (embedding or output head), padded to divide over the ranks."""
    normal = InitialValues("normal", config.init_method_std)
    return ParamSpec(name, (vocab_size, config.hidden_size), normal, (Cut(0, "tp", padded_size),))


def output_weight(config: ModelConfig, vocab: tuple[int, int], placement: Placement) -> nn.Parameter:
    """A weight for the output head of a stage that does not hold the embedding: its own, or a tied copy."""
    spec = vocabulary_spec("head.weight", *vocab, config)
    if not config.untie_embeddings_and_output_weights:
        spec = replace(spec, tied_with="embedding.word.weight", shared=True)
    return placement.parameter(spec)


class Embedding(nn.Module):
    """tokens [b, s] -> hidden states [s, b, h] ([s/tp, b, h] under sequence parallelism).

    Args:
        vocab_size: entries that tokens may name.
        padded_size: rows allocated, a multiple of the tensor-parallel size.
        token_types: kinds of tokens that have a vector of their own, such as BERT's two segments; 0 for none.

    Raises:
        DataError: (forward, on CPU) a token lies outside the vocabulary. On a GPU, which does not wait to
            look, its hidden states are NaN, or torch's kernel stops.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        padded_size: int,
        placement: Placement,
        token_types: int = 0,
    ):
        super().__init__()
        self.config = config
        self.placement = placement
        self.vocab_size = vocab_size
        self.word = placement.parameter(
            vocabulary_spec("embedding.word.weight", vocab_size, padded_size, config)
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position = self._table("position", config.positions) if learned else None
        self.norm: Norm | None = None
        if config.embed_layernorm:
            self.norm = Norm("embedding.norm", config, placement)
        self.token_type = self._table("token_type", token_types) if token_types else None

    def _table(self, name: str, rows: int) -> nn.Parameter:
        """A table of `rows` vectors that every rank holds whole; a rank looks up its own positions."""
        spec = ParamSpec(
            f"embedding.{name}.weight",
            (rows, self.config.hidden_size),
            InitialValues("normal", self.config.init_method_std),
            partial_grad=self.placement.sequence_parallel,
        )
        return self.placement.parameter(spec)

    def forward(
        self, tokens: Tensor, positions: Tensor, inputs: LayerInputs, token_types: Tensor | None = None
    ) -> Tensor:
        """tokens [b, s], positions [b, s] or [s], and token_types [b, s] where there is a table; int64."""
        spread = inputs.rows.spread
        x = words_of(tokens.t(), self.word, self.vocab_size, self.placement)  # [s, b, h]
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        if self.norm is not None:
            x = self.norm(x)
        if self.position is not None:
            positions = positions.t() if positions.dim() == 2 else positions.unsqueeze(1)
            x = x + _every_row(spread.own(positions), self.position)
        if self.token_type is not None:
            assert token_types is not None, "a table of token types needs the tokens' types"
            x = x + _every_row(spread.of_columns(token_types.t()), self.token_type)
        if self.config.fp32_residual_connection:
            x = x.float()
        drop = inputs.dropout(self.config.hidden_dropout, "hidden", "embedding")
        if drop is None:
            return x
        return x * dropout_mask_hidden(drop, *x.shape) / (1.0 - drop.p)


def words_of(tokens: Tensor, word: Tensor, vocab_size: int, placement: Placement) -> Tensor:
    """The rows of a vocabulary's weight [v/tp, h] for tokens [s, b]: [s, b, h], or this rank's s/tp rows.

    Args:
        vocab_size: entries that tokens may name.
    """
    tp = placement.tp
    x = _look_up(tokens, word, tp.rank * len(word), vocab_size)
    if tp.size == 1:
        return x
    if placement.sequence_parallel:
        return reduce_scatter_sequence(x, tp)
    return reduce_from_slices(x, tp, given_away=True)


def _look_up(tokens: Tensor, word: Tensor, first: int, vocab_size: int) -> Tensor:
    """Look tokens up without a check of the ids, which would wait for the device.

    `data.check_token_ids` has checked them where the batch was made.
    """
    try:
        return embedding(tokens, word, first, vocab_size)
    except IndexError as error:
        foreign = int(((tokens < 0) | (tokens >= vocab_size)).sum())
        raise DataError(
            f"`tokens` must lie in [0, {vocab_size}), but {foreign} do not; "
            "was the data made with another tokenizer?"
        ) from error


def _every_row(numbers: Tensor, table: Tensor) -> Tensor:
    """Rows of a table that each rank holds whole."""
    return embedding(numbers, table, 0, len(table))
