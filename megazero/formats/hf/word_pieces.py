"""BERT's WordPiece (Devlin et al. 2018) in the files that transformers' AutoTokenizer and pipelines expect.

The class is the generic one, which takes ``tokenizer.json`` as it is. transformers' BertTokenizer makes a
tokenizer of its own from the words, and gives up on words of more than 100 characters instead of 200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from megazero.data.tokenizers.wordpiece import WordPieceTokenizer

WORDS = "vocab.txt"
_ROLES = ("unk", "sep", "pad", "cls", "mask")


def word_piece_files(
    tokenizer: WordPieceTokenizer,
) -> tuple[tuple[tuple[str, bytes], ...], Mapping[str, Any]]:
    """(name, content) of the files but for ``tokenizer_config.json``, and that one's settings.

    The ids that Megatron appends to BERT's are not among the words: no text has them.
    """
    import tokenizers
    from tokenizers import processors

    definition = tokenizer.definition()
    vocabulary: dict[str, int] = definition["model"]["vocab"]
    names = {role: tokenizer.decode([tokenizer.special_ids[role]]) for role in _ROLES}
    backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    backend.add_special_tokens(
        [names[role] for role in sorted(_ROLES, key=tokenizer.special_ids.__getitem__)]
    )
    first, last = names["cls"], names["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, tokenizer.special_ids["cls"]), (last, tokenizer.special_ids["sep"])],
    )
    tokens = {f"{role}_token": name for role, name in names.items()}
    settings = {
        **tokens,
        "do_lower_case": definition["normalizer"]["lowercase"],
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    words = "".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.__getitem__))
    files = (
        (WORDS, words.encode()),
        ("tokenizer.json", backend.to_str(pretty=True).encode()),
        ("special_tokens_map.json", json.dumps(tokens, indent=2, sort_keys=True).encode()),
    )
    return files, settings


def word_piece_kind(lower_case: bool) -> Literal["BertWordPieceLowerCase", "BertWordPieceCase"]:
    """The kind of a folder's tokenizer."""
    return "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
