"""Writes a run's tokenizer as the files that transformers' AutoTokenizer reads, and finds it in a folder.

A tokenizer is written only if it gives the same ids there, else a remark says so: one that loads but encodes
differently would be worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megazero.config.compat.hub import local
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data.tokenizers.wordpiece import WordPieceTokenizer
from megazero.formats.hf.config_json import NO_TOKENS, TokenIds, read_json
from megazero.formats.hf.sentence_pieces import tokenizer_json
from megazero.regular_file import read_regular
from megazero.storage.cached import Cache

WORDS = "vocab.txt"
_ROLES = ("unk", "sep", "pad", "cls", "mask")
_JSON = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_BPE = ("vocab.json", "merges.txt")
_PIECES = "tokenizer.model"
_GENERIC = "PreTrainedTokenizerFast"
# The files that `save_pretrained` writes beside a tokenizer.json.
_BESIDE = (_SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", *_BPE, _PIECES)
_NAMED_ROLES = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class TokenizerFiles:
    """The files to write for a tokenizer.

    Attributes:
        files: (name, content).
        tokens: the special tokens.
        remark: the reason why there are no files; None if there are.
    """

    files: tuple[tuple[str, bytes], ...] = ()
    tokens: TokenIds = NO_TOKENS
    remark: str | None = None


def tokenizer_files(section: TokenizerConfig, vocab_size: int | None, positions: int) -> TokenizerFiles:
    """The files of the tokenizer that a run used.

    Args:
        section: the tokenizer section of the run's configuration.
        vocab_size: the configured size, which only NullTokenizer needs.
        positions: the longest sequence that the model takes.

    Raises:
        DataError: the tokenizer's files are missing or unsuitable.
    """
    kind = section.tokenizer_type
    if kind is None:
        return TokenizerFiles(remark="the run had no tokenizer")
    files_of = {name: getattr(section, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    section = section.model_copy(update={k: path and Cache().file(path) for k, path in files_of.items()})
    tokenizer = _built(section, kind, vocab_size)
    roles = tokenizer.special_ids
    tokens = TokenIds(roles.get("bos"), roles.get("eos", tokenizer.eod), roles.get("pad"))
    common = {"model_max_length": positions}
    files = None
    if kind == "GPT2BPETokenizer":
        files = _gpt2(section, {**_names(tokenizer), **common})
    elif kind == "HFTokenizer":
        files = _tokenizer_json(Path(local(section.tokenizer_model) or ""), {**_names(tokenizer), **common})
    elif kind == "GPTSentencePieceTokenizer":
        files = _pieces(Path(section.tokenizer_model or ""), common)
    elif isinstance(tokenizer, WordPieceTokenizer):
        files, settings = word_piece_files(tokenizer)
        files = (*files, (_SETTINGS, _json({"tokenizer_class": _GENERIC, **settings, **common})))
        tokens = TokenIds(pad=roles["pad"])  # Megatron's bos and eos are appended ids, which no text has
    if files is None:
        return TokenizerFiles(
            tokens=tokens, remark=f"transformers has nothing that gives the ids of this {kind}"
        )
    return TokenizerFiles(files, tokens)


def tokenizer_settings(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The fields of `TokenizerConfig` for the tokenizer in a Hugging Face folder; empty if it has none.

    A ``vocab.txt`` alone is BERT's. It is taken only if the embedding has rows for the two ids (bos and eos)
    that Megatron appends to the vocabulary.

    Args:
        folder: the folder.
        vocab_size: rows of the model's embedding.
    """
    folder = folder.resolve()
    if (folder / _JSON).is_file():
        return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)}
    if all((folder / name).is_file() for name in _BPE):
        vocab, merges = (str(folder / name) for name in _BPE)
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
    if (folder / _PIECES).is_file():
        return {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": str(folder / _PIECES)}
    if (folder / WORDS).is_file():
        settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        kind = word_piece_kind(settings.get("do_lower_case") is not False)
        section = TokenizerConfig(tokenizer_type=kind, vocab_file=str(folder / WORDS))
        if _built(section, kind, None).vocab_size <= vocab_size:
            return section.model_dump(exclude_defaults=True)
    return {}


def _built(section: TokenizerConfig, kind: str, vocab_size: int | None) -> Tokenizer:
    return build_tokenizer(
        TokenizerSpec(
            kind,
            vocab_file=section.vocab_file,
            merge_file=section.merge_file,
            model=section.tokenizer_model,
            vocab_size=vocab_size if kind == "NullTokenizer" else None,
            extra_ids=section.vocab_extra_ids,
            wordpiece_first=section.wordpiece_first,
        )
    )


def _gpt2(section: TokenizerConfig, common: Mapping[str, object]) -> tuple[tuple[str, bytes], ...]:
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **common}
    sources = (section.vocab_file, section.merge_file)
    copies = tuple((name, read_regular(path or "")) for name, path in zip(_BPE, sources, strict=True))
    return (*copies, (_SETTINGS, _json(settings)))


def _tokenizer_json(path: Path, common: Mapping[str, object]) -> tuple[tuple[str, bytes], ...]:
    path = path / _JSON if path.is_dir() else path
    main = (_JSON, read_regular(path))
    if not path.with_name(_SETTINGS).is_file():
        return main, (_SETTINGS, _json({"tokenizer_class": _GENERIC, **common}))
    beside = (path.with_name(name) for name in _BESIDE)
    return main, *((path.name, read_regular(path)) for path in beside if path.is_file())


def _pieces(path: Path, common: Mapping[str, object]) -> tuple[tuple[str, bytes], ...] | None:
    made = tokenizer_json(path)
    if made is None:
        return None
    content, names = made
    return (_JSON, content), (_SETTINGS, _json({"tokenizer_class": _GENERIC, **names, **common}))


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens as strings, such as ``eos_token``."""
    ids = {role: tokenizer.special_ids[role] for role in _NAMED_ROLES if role in tokenizer.special_ids}
    if "eos" not in ids and tokenizer.eod is not None:
        ids["eos"] = tokenizer.eod
    return {f"{role}_token": tokenizer.decode([number]) for role, number in ids.items()}


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def word_piece_files(
    tokenizer: WordPieceTokenizer,
) -> tuple[tuple[tuple[str, bytes], ...], Mapping[str, object]]:
    """(name, content) of all files but ``tokenizer_config.json``, and the settings for that file.

    The two ids that Megatron appends to BERT's vocabulary are left out, as no text has them.
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
    """The tokenizer type of a WordPiece vocabulary."""
    return "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
