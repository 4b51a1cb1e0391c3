"""Train BERT's WordPiece (Schuster and Nakajima 2012; Devlin et al. 2018) reproducibly.

The trainer of the `tokenizers` library breaks ties by token number, and numbers the `##` letters in the order
of a hash map, which differs between processes. So words are counted here, and the trainer gets its letters in
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megazero.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONTINUED = "##"
_MOST_LETTERS = 1000  # rarer ones become [UNK]; what BERT's own vocabularies have
_LONGEST_WORD = 200
_REPEATED = 1000


def train_wordpiece(corpus: Iterable[str], size: int, *, cased: bool) -> tuple[Tokenizer, dict[str, str]]:
    """Train a tokenizer with up to `size` tokens; returns it and the contents of its files by name.

    Raises DataError if the letters of the corpus alone need more tokens.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    normalizer = normalizers.BertNormalizer(lowercase=not cased)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = _count_words(corpus, normalizer, pre_tokenizer)
    vocab = _vocabulary(words, size)
    ids = {token: number for number, token in enumerate(vocab)}
    model = models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return tokenizer, {
        "vocab.txt": "".join(f"{token}\n" for token in vocab),
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }


def _count_words(corpus: Iterable[str], normalizer: Normalizer, pre_tokenizer: PreTokenizer) -> Counter[str]:
    """Count BERT's words. Texts between spaces are counted first, so that each is tokenized once."""
    between_spaces: Counter[str] = Counter()
    for text in corpus:
        between_spaces.update(text.split())
    words: Counter[str] = Counter()
    for chunk, count in between_spaces.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk)):
            words[word] += count
    return words


def _vocabulary(words: Counter[str], size: int) -> list[str]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    alphabet = sorted(letters, key=lambda letter: (-letters[letter], letter))[:_MOST_LETTERS]
    kept = set(alphabet)
    continued = sorted({letter for word in words for letter in word[1:]} & kept)
    special = [*SPECIAL_TOKENS, *(_CONTINUED + letter for letter in continued)]
    least = len(special) + len(alphabet)
    if size < least:
        raise DataError(
            f"`--vocab-size` must be at least {least}, for the letters of this text, but is {size}."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_repeated(words), trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yield texts that contain each word as often as it was counted."""
    for word, count in words.items():
        whole, rest = divmod(count, _REPEATED)
        for times in [_REPEATED] * whole + [rest] * (rest > 0):
            yield " ".join([word] * times)
