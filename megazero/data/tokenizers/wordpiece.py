"""BERT's WordPiece (Devlin et al. 2018) from a vocab.txt, run by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megazero.data.tokenizers.base import FastSource
from megazero.data.tokenizers.files import require_file
from megazero.data.tokenizers.library import LibraryTokenizer, check_ids
from megazero.errors import DataError

_ROLES = MappingProxyType({"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"})
# Google's WordPiece gives up on words longer than this; the library's own default is 100.
_LONGEST_WORD = 200


class WordPieceTokenizer(LibraryTokenizer):
    """WordPiece plus the ids Megatron appends: [BOS], [EOS] where absent, then `<extra_id_0>` ..."""

    def __init__(
        self, name: str, backend, vocab_size: int, special_ids: dict[str, int], appended: Sequence[str]
    ):
        super().__init__(name, backend, vocab_size, special_ids, eod=None)
        self._appended = tuple(appended)
        self._own_size = vocab_size
        self.vocab_size += len(appended)

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        words, run = [], []
        for i in ids:
            if i < self._own_size:
                run.append(i)
                continue
            words += [super().decode(run)] if run else []
            words.append(self._appended[i - self._own_size])
            run = []
        words += [super().decode(run)] if run else []
        return " ".join(words)

    def word_pieces(self) -> Mapping[str, int]:
        appended = {token: self._own_size + i for i, token in enumerate(self._appended)}
        return {**self._backend.get_vocab(with_added_tokens=True), **appended}

    def fast_source(self) -> FastSource | None:
        return None


def load_wordpiece(vocab_file: str | None, kind: str, extra_ids: int) -> WordPieceTokenizer:
    """The tokenizer of this vocab.txt; lower-cases and strips accents if `kind` is BertWordPieceLowerCase."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    path = require_file(vocab_file, "--vocab-file", kind, "BERT's vocab.txt")
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"`--vocab-file` must be UTF-8 text, but {path} is not ({error}).") from error
    words = [word.strip() for word in (words[:-1] if words[-1] == "" else words)]
    vocab = {word: i for i, word in enumerate(words)}
    if len(vocab) != len(words):
        twice = next(word for i, word in enumerate(words) if vocab[word] != i)
        raise DataError(f"`--vocab-file` must name each token once, but {path} repeats {twice!r}.")
    missing = [token for token in _ROLES.values() if token not in vocab]
    if missing:
        raise DataError(
            f"`--vocab-file` must contain {', '.join(missing)}, but {path} does not; give BERT's vocab.txt."
        )
    model = models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=kind == "BertWordPieceLowerCase")
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    appended = [token for token in ("[EOS]", "[BOS]") if token not in vocab]
    appended += [f"<extra_id_{i}>" for i in range(extra_ids)]
    ids = {**vocab, **{token: len(vocab) + i for i, token in enumerate(appended)}}
    roles = {**_ROLES, "bos": "[BOS]", "eos": "[EOS]"}
    special_ids = {role: ids[token] for role, token in roles.items()}
    return WordPieceTokenizer(kind, backend, len(vocab), special_ids, appended)
