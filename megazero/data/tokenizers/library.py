"""Tokenizers run by the `tokenizers` library: GPT-2's byte-level BPE and any `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.data.tokenizers.base import (
    FastSource,
    TokenBatch,
    Tokenizer,
    is_failure,
    read_json,
    require_file,
)
from megazero.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_MOST_UNUSED = 1 << 16  # ids without a token; some vocabularies reserve a few thousand
_ROLES = ("bos", "eos", "pad", "cls", "sep", "mask", "unk")


class LibraryTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` that encodes documents as plain text."""

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: Mapping[str, int],
        eod: int | None,
        source: Path,
    ):
        # A tokenizer.json may ask for truncation or padding, which would change documents silently.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.name = name
        self.eod = eod
        self.special_ids = dict(special_ids)
        self.vocab_size = vocab_size
        named = takewhile(lambda i: i is not None, (backend.token_to_id(f"<extra_id_{i}>") for i in count()))
        self.extra_ids = tuple(i for i in named if i is not None)
        self._backend = backend
        self.source = source

    def definition(self) -> dict[str, Any]:
        """The content of a `tokenizer.json` for this tokenizer."""
        description: dict[str, object] = json.loads(self._backend.to_str())
        return description

    def encode(self, text: str) -> list[int]:
        with _refusals(f"text must have tokens in this {self.name}, but has none", self.source):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        with _refusals(f"texts must have tokens in this {self.name}, but one has none", self.source):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return TokenBatch.of([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        with _refusals(f"token ids must have a text in this {self.name}, but have none", self.source):
            return self._backend.decode(ids, skip_special_tokens=False)

    def word_pieces(self) -> Mapping[str, int] | None:
        from tokenizers import models

        is_one = isinstance(self._backend.model, models.WordPiece)
        return self._backend.get_vocab(with_added_tokens=True) if is_one else None

    def fast_source(self) -> FastSource | None:
        # The vocabulary is behind all else, and stays text: parsing it takes as long as loading it.
        head, model, vocabulary = self._backend.to_str().partition(',"model":{')
        config = json.loads(f"{head}}}")
        # A fast encoder recognizes special tokens in text; without them, documents stay plain text.
        config["added_tokens"] = [token for token in config["added_tokens"] if not token["special"]]
        config["post_processor"] = None
        normalizes = config["normalizer"] is not None
        text = f"{json.dumps(config)[:-1]}{model}{vocabulary}"
        return FastSource("tokenizer.json", text.encode(), normalizes=normalizes)


@contextmanager
def _refusals(must: str, source: Path | None = None) -> Iterator[None]:
    """Turn errors of the library, panics of its Rust code included, into DataErrors.

    must: the start of the message; source: the tokenizer's file, if `must` does not name it.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        where = "" if source is None else f", with {source}"
        raise DataError(f"{must} ({str(error)[:300]}{where}).") from error


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise DataError if an id is outside 0..vocab_size-1."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise DataError(
                f"token ids must be in 0..{vocab_size - 1}, but one is {i}; is it another vocabulary's?"
            )


def load_gpt2_bpe(vocab_file: str | None, merge_file: str | None) -> LibraryTokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt; eod is `<|endoftext|>`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    kind = "GPT2BPETokenizer"
    vocab = require_file(vocab_file, "vocab_file", kind, "a vocab.json")
    merges = require_file(merge_file, "merge_file", kind, "a merges.txt")
    table = read_json(vocab, "vocab_file")
    if not isinstance(table, dict) or not all(type(i) is int and i >= 0 for i in table.values()):
        raise DataError(
            f"`vocab_file` must map tokens to ids, but {vocab} does not; give GPT-2's vocab.json."
        )
    _require_byte_alphabet(table, f"`vocab_file` {vocab}")
    if END_OF_TEXT not in table:
        raise DataError(
            f"`vocab_file` must contain {END_OF_TEXT}, which ends documents, but {vocab} does not; "
            "give GPT-2's vocab.json."
        )
    size = _size_of(table, f"`vocab_file` {vocab}")
    if len(set(table.values())) != len(table):
        raise DataError(f"`vocab_file` must give every token its own id, but {vocab} repeats some.")
    with _refusals(f"`merge_file` must hold merges of {vocab}, but {merges} does not"):
        model = models.BPE.from_file(str(vocab), str(merges))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    eod = table[END_OF_TEXT]
    return LibraryTokenizer(kind, backend, size, {"bos": eod, "eos": eod}, eod, vocab)


def load_tokenizer_json(model: str | None, kind: str) -> LibraryTokenizer:
    """Load a Hugging Face `tokenizer.json`, given as the file, its directory, or a name on the hub.

    The roles of special tokens come from `tokenizer_config.json` and `special_tokens_map.json` beside the
    file. Without these, the first of `<|endoftext|>`, `<|end_of_text|>`, `</s>`, `<eos>`, `[EOS]` that exists
    ends documents, and a WordPiece has BERT's special tokens.
    """
    import tokenizers

    from megazero.config.compat.hub import fetched

    model = fetched(model)
    if model is not None and Path(model).is_dir():
        model = str(Path(model) / "tokenizer.json")
    path = require_file(model, "tokenizer_model", kind, "a tokenizer.json or a directory holding one")
    is_not = f"`tokenizer_model` must be a tokenizer.json, but {path} is not"
    with _refusals(is_not):
        backend = tokenizers.Tokenizer.from_file(str(path))
        vocab = backend.get_vocab(with_added_tokens=True)
    # Checked before `to_str`, in which the library counts up to the largest id.
    size = _size_of(vocab, f"`tokenizer_model` {path}")
    with _refusals(is_not):
        config = json.loads(backend.to_str())
    byte_level = '"ByteLevel"' in json.dumps([config["pre_tokenizer"], config["normalizer"]])
    if byte_level and config["model"]["type"] == "BPE" and config["model"].get("unk_token") is None:
        # The library drops bytes that such a vocabulary lacks.
        _require_byte_alphabet(config["model"]["vocab"], f"`tokenizer_model` {path}")
    special_ids = {**_usual_roles(config), **_roles_beside(path, backend)}
    eod = special_ids.get("eos")
    if eod is None:
        known = (backend.token_to_id(name) for name in _END_NAMES)
        eod = next((i for i in known if i is not None), None)
    return LibraryTokenizer(kind, backend, size, special_ids, eod, path)


def _size_of(vocab: Mapping[str, int], what: str) -> int:
    """The largest id + 1. Raises DataError if there are no tokens, or if most ids have no token."""
    largest = max(vocab.values(), default=None)
    if largest is None:
        raise DataError(f"{what} must hold tokens, but holds none.")
    if largest > _MOST_UNUSED + 2 * len(vocab):
        raise DataError(
            f"{what} must number its {len(vocab)} tokens without large gaps, but one has the id {largest}."
        )
    return largest + 1


def _require_byte_alphabet(vocab: Mapping[str, int], what: str) -> None:
    from tokenizers import pre_tokenizers

    missing = sum(letter not in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
    if missing:
        raise DataError(
            f"{what} must contain all 256 byte letters, but lacks {missing}; "
            "text with these bytes would lose them."
        )


def _usual_roles(config: dict[str, Any]) -> dict[str, int]:
    """The ids of BERT's special tokens in a WordPiece; older files do not name the roles."""
    if config["model"]["type"] != "WordPiece":
        return {}
    vocab = config["model"]["vocab"]
    return {role: vocab[name] for role in _ROLES if (name := f"[{role.upper()}]") in vocab}


def _roles_beside(path: Path, backend: tokenizers.Tokenizer) -> dict[str, int]:
    """The ids of the special tokens that the files beside `path` name; the last file to name a role counts.

    An eos that is not in the vocabulary is refused, as another token would take its place. Other tokens may
    be missing: transformers adds them when a model needs them.
    """
    named: dict[str, tuple[str, Path]] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        beside = path.with_name(name)
        if not beside.exists():
            continue
        config = read_json(beside, "tokenizer_model")
        if not isinstance(config, dict):
            raise DataError(f"`tokenizer_model` must come with an object in {name}, but {beside} holds none.")
        for role in _ROLES:
            token = config.get(f"{role}_token")
            content = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(content, str):
                raise DataError(
                    f"`{role}_token` must be text, an object with its `content`, or null, but {beside} has "
                    f"{token!r:.80}."
                )
            if content is not None:
                named[role] = content, beside
    roles = {role: _id_of(backend, token) for role, (token, _) in named.items()}
    if roles.get("eos", 0) is None:
        token, beside = named["eos"]
        raise DataError(
            f"`eos_token` must be a token of {path}, but {beside} has {token!r:.80}; correct one of the two."
        )
    return {role: i for role, i in roles.items() if i is not None}


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int | None:
    try:
        return backend.token_to_id(token)
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which is not text
        return None
