"""The tokenizer in Megatron's arguments, and the size of its vocabulary."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from megazero.config.fields import FIELD_BY_PATH
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.formats.megatron.dialects import Arguments


def tokenizer_said(arguments: Arguments, folder: Path) -> TokenizerConfig | None:
    """The tokenizer that the arguments name; None if megazero lacks its kind, or its files do not exist.

    Files are looked for at their paths, in `folder` and in its parent.
    """
    fields = {name: arguments.get(name) for name in TokenizerConfig.model_fields if arguments.get(name)}
    kind = str(fields.get("tokenizer_type"))
    fields["tokenizer_type"] = FIELD_BY_PATH["tokenizer.tokenizer_type"].synonyms.get(kind, kind)
    try:
        section = TokenizerConfig.model_validate(fields).located(folder, folder.parent)
    except ValidationError:  # a kind that only Megatron has
        return None
    return section if all(path.exists() for path in section.files.values()) else None


def entries(section: TokenizerConfig | None) -> int | None:
    """The number of entries in a tokenizer's vocabulary; None without a tokenizer, and for NullTokenizer.

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
