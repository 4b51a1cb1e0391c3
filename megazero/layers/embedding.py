"""Token, position and segment embeddings, the vocabulary sliced over the tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megazero.errors import DataError
from megazero.layers.collectives import reduce_from_slices, reduce_scatter_sequence
from megazero.layers.inputs import LayerInputs
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.rng import site_key
from megazero.ops.dropout import dropout_mask_hidden
from megazero.ops.embedding import embedding
from megazero.spec.model import EmbeddingSpec, HeadSpec
from megazero.spec.parts import StreamSpec


def vocabulary_spec(name: str, vocab: tuple[int, int], stream: StreamSpec) -> ParamSpec:
    """The spec of a [vocab, h] weight (embedding or output head), padded to divide over the ranks."""
    size, padded = vocab
    normal = InitialValues("normal", stream.std)
    return ParamSpec(name, (size, stream.width), normal, (Cut(0, "tp", padded),))


def output_weight(head: HeadSpec, vocab: tuple[int, int], placement: Placement) -> nn.Parameter:
    """A weight for the output head of a stage that does not hold the embedding: its own, or a tied copy."""
    spec = vocabulary_spec("head.weight", vocab, head.stream)
    if head.tied:
        spec = replace(spec, tied_with="embedding.word.weight", shared=True)
    return placement.parameter(spec)


def logit_bias(vocab: tuple[int, int], placement: Placement) -> nn.Parameter:
    """A bias [v/tp] for the logits."""
    cut = Cut(0, "tp", vocab[1])
    spec = ParamSpec("head.bias", (vocab[0],), InitialValues("zeros"), (cut,), weight_decay=False)
    return placement.parameter(spec)


class Embedding(nn.Module):
    """tokens [b, s] -> hidden states [s, b, h] ([s/tp, b, h] under sequence parallelism).

    Args:
        vocab: the size of the vocabulary, and the number of rows allocated, a multiple of the tensor-parallel
            size.

    Raises:
        DataError: (forward, on CPU) a token lies outside the vocabulary. On a GPU, where looking would wait
            for the device, its hidden states are NaN, or torch's kernel fails.
    """

    def __init__(self, spec: EmbeddingSpec, vocab: tuple[int, int], placement: Placement):
        super().__init__()
        self.spec, self.placement, self.vocab_size = spec, placement, vocab[0]
        self.word = placement.parameter(vocabulary_spec("embedding.word.weight", vocab, spec.stream))
        self.position = self._table("position", spec.positions)
        self.norm = None if spec.norm is None else Norm("embedding.norm", spec.norm, placement)
        self.token_type = self._table("token_type", spec.token_types)
        self.site = site_key("hidden", "embedding")

    def _table(self, name: str, rows: int) -> nn.Parameter | None:
        """A table of `rows` vectors, whole on every rank, of which a rank looks up its own positions."""
        if not rows:
            return None
        spec = ParamSpec(
            f"embedding.{name}.weight",
            (rows, self.spec.stream.width),
            InitialValues("normal", self.spec.stream.std),
            partial_grad=self.placement.sequence_parallel,
        )
        return self.placement.parameter(spec)

    def forward(
        self, tokens: Tensor, positions: Tensor, inputs: LayerInputs, token_types: Tensor | None = None
    ) -> Tensor:
        """tokens [b, s], positions [b, s] or [s], and token_types [b, s] where there is a table; int64."""
        spread = inputs.rows.spread
        x = words_of(tokens.t(), self.word, self.vocab_size, self.placement)  # [s, b, h]
        if self.spec.factor != 1.0:
            x = x * self.spec.factor
        if self.norm is not None:
            x = self.norm(x)
        if self.position is not None:
            positions = positions.t() if positions.dim() == 2 else positions.unsqueeze(1)
            x = x + _every_row(spread.own(positions), self.position)
        if self.token_type is not None:
            assert token_types is not None, "a table of token types needs the tokens' types"
            x = x + _every_row(spread.of_columns(token_types.t()), self.token_type)
        if self.spec.stream.fp32:
            x = x.float()
        drop = inputs.dropout(self.spec.stream.dropout, self.site)
        if drop is None:
            return x
        return x * dropout_mask_hidden(drop, *x.shape) / (1.0 - drop.p)


def words_of(tokens: Tensor, word: Tensor, vocab_size: int, placement: Placement) -> Tensor:
    """The rows of a vocabulary's weight [v/tp, h] for tokens [s, b]: [s, b, h], or this rank's s/tp rows.

    Args:
        vocab_size: the number of different tokens.
    """
    tp = placement.tp
    x = _look_up(tokens, word, tp.rank * len(word), vocab_size)
    if tp.size == 1:
        return x
    if placement.sequence_parallel:
        return reduce_scatter_sequence(x, tp)
    return reduce_from_slices(x, tp, given_away=True)


def _look_up(tokens: Tensor, word: Tensor, first: int, vocab_size: int) -> Tensor:
    """Look tokens up without checking their range, which would wait for the device.

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
