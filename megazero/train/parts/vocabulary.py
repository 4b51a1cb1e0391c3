"""The vocabulary: facts about the tokenizer that the model and the data need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megazero.config.derive import padded_vocab_size
from megazero.config.tree.config import Config
from megazero.data.from_config import TextVocabulary
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import ConfigError


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer, and the sizes that follow from it.

    Attributes:
        size: number of ids.
        padded: `size` rounded up to be divisible by the tensor-parallel ranks.
        eod: id of the end-of-document token, or None.
        tokenizer: the tokenizer; None if only the size is known.
    """

    size: int
    padded: int
    eod: int | None
    tokenizer: Tokenizer | None


if TYPE_CHECKING:
    _: type[TextVocabulary] = Vocabulary


def build_vocabulary(config: Config) -> Vocabulary:
    """Make the vocabulary from the tokenizer's files, or from `--vocab-size` alone.

    Raises:
        ConfigError: `--vocab-size` is smaller than the tokenizer's vocabulary, or neither is given.
        DataError: the tokenizer's files are missing or unsuitable.
    """
    section, size = config.tokenizer, config.model.vocab_size
    tokenizer = None
    if section.tokenizer_type is not None:
        tokenizer = build_tokenizer(
            TokenizerSpec(
                section.tokenizer_type,
                vocab_file=section.vocab_file,
                merge_file=section.merge_file,
                model=section.tokenizer_model,
                vocab_size=size if section.tokenizer_type == "NullTokenizer" else None,
                extra_ids=section.vocab_extra_ids,
                wordpiece_first=section.wordpiece_first,
            ),
            config.data.object_cache,
        )
        if size is not None and section.tokenizer_type != "NullTokenizer" and size < tokenizer.vocab_size:
            raise ConfigError(
                f"`vocab_size` must be at least the tokenizer's {tokenizer.vocab_size}, but is "
                f"{size}; take the tokenizer that the model is for, or leave `vocab_size` out"
            )
        size = max(size or 0, tokenizer.vocab_size)
    if size is None:
        raise ConfigError("`vocab_size` must be known, but is not; set `tokenizer_type` or `vocab_size`")
    size += config.model.extra_vocab_size
    padded = padded_vocab_size(size, config.model, config.parallel.tensor_model_parallel_size)
    return Vocabulary(size, padded, tokenizer.eod if tokenizer else None, tokenizer)
