"""The tokenizer of Megatron's arguments, and how many entries its vocabulary has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.config.fields import FIELD_BY_PATH
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer


def tokenizer_said(arguments: Mapping[str, Any], folder: Path) -> TokenizerConfig | None:
    """The tokenizer that arguments name, if there is such a kind, and its files, perhaps in the folder."""
    given = {name: arguments.get(name) for name in TokenizerConfig.model_fields if arguments.get(name)}
    kind = str(given.get("tokenizer_type"))
    given["tokenizer_type"] = FIELD_BY_PATH["tokenizer.tokenizer_type"].synonyms.get(kind, kind)
    try:
        section = TokenizerConfig.model_validate(given).located(folder, folder.parent)
    except ValidationError:  # a kind that only Megatron has
        return None
    return section if all(path.exists() for path in section.files.values()) else None


def entries(section: TokenizerConfig | None) -> int | None:
    """The entries of a tokenizer's vocabulary; None if only its user knows how many.

    Raises:
        DataError: the tokenizer's files are unsuitable.
    """
    if section is None or section.tokenizer_type in (None, "NullTokenizer"):
        return None
    spec = TokenizerSpec(
        section.tokenizer_type,
        vocab_file=section.vocab_file,
        merge_file=section.merge_file,
        model=section.tokenizer_model,
        extra_ids=section.vocab_extra_ids,
    )
    return build_tokenizer(spec).vocab_size
