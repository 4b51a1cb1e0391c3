"""Tokenizer files, read by `build_tokenizer`; each kind has another reader of the same files beside it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from proofs.fuzz_inputs.harness import Kind, Sample
from proofs.fuzz_inputs.mutate import of_json, of_lines, of_message

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "naïve",
    "Zoë",
    "counts",
    "12345",
    "stars",
    "and",
    "私は猫です",
]
LINES = tuple(" ".join(WORDS[i % 17 :] + WORDS[: i % 17]) + f" line {i}." for i in range(100))
Encode = Callable[[str], Sequence[int]]
TEXTS = (
    "the quick brown fox",
    "Don't count 12345 stars, naïve Zoë!",
    "  two  blanks\tand\n\nlines ",
    "私は猫です 👩\u200d👧 \u00a0\u2028",
    "a<|endoftext|>b</s><s>[MASK]<unk>",
    "\x00\x01 ÷ e\u0301 ﬁ",
    "",
)
END = "<|endoftext|>"
END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


def _byte_level(model: models.Model | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model or models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if model is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(LINES, trainer)
    return backend


def _trained(model: models.Model, trainer: trainers.Trainer) -> bytes:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("ß", "ss")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    backend.train_from_iterator(LINES, trainer)
    return backend.to_str(pretty=True).encode()


def _samples(folder: Path) -> list[Sample]:
    backend = _byte_level()
    backend.model.save(str(folder))
    vocab, merges = ((folder / name).read_bytes() for name in ("vocab.json", "merges.txt"))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "eos_token": {"content": "the", "lstrip": False, "normalized": False},
        "pad_token": None,
        "model_max_length": 1024,
    }
    roles = {"eos_token": "the", "unk_token": {"content": END}}
    both = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "special_tokens_map.json": json.dumps(roles).encode(),
    }
    quiet = {"show_progress": False, "vocab_size": 120}
    unigram = trainers.UnigramTrainer(unk_token="<unk>", special_tokens=["<unk>", "</s>"], **quiet)
    pieces = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[EOS]"], **quiet)
    others = {
        "unigram": _trained(models.Unigram(), unigram),
        "wordpiece": _trained(models.WordPiece(unk_token="[UNK]"), pieces),
        "words": _trained(
            models.WordLevel(unk_token="<unk>"),
            trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], **quiet),
        ),
    }
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789!,'猫私は"]
    bert += ["##" + letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    bert += ["the", "qu", "##ick", "brown", "fox", "##oe", "naive", "12", "##34"]
    return [
        Sample(
            "vocab.json",
            {"vocab.json": vocab, "merges.txt": merges},
            {"vocab.json": (of_json,), "merges.txt": (of_lines,)},
        ),
        Sample("tokenizer.json", both, dict.fromkeys(both, (of_json,))),
        Sample("settings", both, dict.fromkeys(list(both)[1:], (of_json,))),
        Sample("vocab.txt", {"vocab.txt": "\n".join([*bert, ""]).encode()}, {"vocab.txt": (of_lines,)}),
        *(
            Sample(name, {"tokenizer.json": content}, {"tokenizer.json": (of_json, of_json, of_lines)})
            for name, content in others.items()
        ),
    ]


@dataclass(frozen=True)
class Observed:
    """What a tokenizer of the product does."""

    rows: list[list[int]]
    size: int
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Observed:
        rows = [tokenizer.encode(text) for text in TEXTS]
        batch = [row.tolist() for row in tokenizer.encode_batch(TEXTS).rows()]
        assert batch == rows, "a batch gives other ids than one text at a time"
        for row in rows:
            tokenizer.decode(row)
        return cls(rows, tokenizer.vocab_size, tokenizer.eod)

    def difference(self, encode: Encode, size: int, end: int | None) -> str | None:
        """Where it is not what another reader says."""
        for text, ids in zip(TEXTS, self.rows, strict=True):
            expected = list(encode(text))
            if ids != expected:
                return f"{text!r} is {ids}, but should be {expected}"
        if (self.size, self.end) != (size, end):
            return f"size and end are {self.size}, {self.end}, but should be {size}, {end}"
        return None


def _read(folder: Path, sample: Sample) -> Observed:
    named = str(folder / sample.name)
    specs = {
        "vocab.json": TokenizerSpec("GPT2BPETokenizer", named, str(folder / "merges.txt")),
        "vocab.txt": TokenizerSpec("BertWordPieceLowerCase", named),
    }
    return Observed.of(
        build_tokenizer(specs.get(sample.name, TokenizerSpec("HFTokenizer", model=str(folder))))
    )


def _compare(folder: Path, sample: Sample, found: Observed) -> str | None:
    readers = {"vocab.json": _plain_bpe, "vocab.txt": _plain_wordpiece}
    return found.difference(*readers.get(sample.name, _library)(folder))


_SPLIT = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _plain_bpe(folder: Path) -> tuple[Encode, int, int]:
    """Byte-level BPE as Radford et al. (2019) describe it; its size, and the id of the end."""
    table = json.loads((folder / "vocab.json").read_bytes())
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(text: str) -> list[int]:
        ids = []
        for word in _SPLIT.findall(text):
            parts = [letters[byte] for byte in word.encode()]
            while len(parts) > 1:
                best = min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                merged, at = [], 0
                while at < len(parts):
                    both = tuple(parts[at : at + 2]) == best
                    merged.append("".join(best) if both else parts[at])
                    at += 2 if both else 1
                parts = merged
            ids += [table[part] for part in parts]
        return ids

    return encode, max(table.values()) + 1, table[END]


def _plain_wordpiece(folder: Path) -> tuple[Encode, int, None]:
    """WordPiece as Devlin et al. (2018) describe it; its size with [BOS] and [EOS], and no end."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    table = {line.strip(): i for i, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}

    def encode(text: str) -> list[int]:
        plain = "".join(
            c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn"
        ).lower()
        spaced = "".join(f" {c} " if _stands_alone(c) else " " if c.isspace() else c for c in plain)
        kept = "".join(
            c for c in spaced if c not in "\x00\ufffd" and not unicodedata.category(c).startswith("C")
        )
        return [i for word in kept.split() for i in pieces(word)]

    def pieces(word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            ends = (
                end for end in range(len(word), start, -1) if ("##" * (start > 0) + word[start:end]) in table
            )
            end = next(ends, None)
            if end is None:
                return [table["[UNK]"]]
            ids.append(table["##" * (start > 0) + word[start:end]])
            start = end
        return ids

    return encode, len(table) + sum(name not in table for name in ("[EOS]", "[BOS]")), None


def _stands_alone(letter: str) -> bool:
    symbol = letter.isascii() and letter.isprintable() and not letter.isalnum() and letter != " "
    return symbol or unicodedata.category(letter).startswith("P") or "\u4e00" <= letter <= "\u9fff"


def _library(folder: Path) -> tuple[Encode, int, int | None]:
    """The tokenizers library itself, its size, and the end that the settings name."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    named = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content: Mapping[str, Any] = {}
        if (folder / name).exists():
            content = json.loads((folder / name).read_bytes())
        token = content.get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        named = token if token is not None else named
    found = backend.get_vocab(with_added_tokens=True)
    ends = [found[name] for name in END_NAMES if name in found]
    end = found.get(named, -1) if named is not None else next(iter(ends), None)
    return lambda text: backend.encode(text, add_special_tokens=False).ids, max(found.values()) + 1, end


SENTENCE_PIECE_KINDS: Mapping[str, str] = {
    "bpe": "GPTSentencePieceTokenizer",
    "unigram": "SentencePieceTokenizer",
    "symbols": "SentencePieceTokenizer",
    "normalizing": "GPTSentencePieceTokenizer",
}


def _sentence_piece_samples(folder: Path) -> list[Sample]:
    text = folder / "text.txt"
    text.write_text("\n".join(LINES), encoding="utf-8")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    ways = {
        "bpe": {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, **plain},
        "unigram": {"vocab_size": 120, "normalization_rule_name": "identity"},
        "symbols": {"vocab_size": 120, "user_defined_symbols": ["<x>", "猫です"], "pad_id": 3},
        "normalizing": {"vocab_size": 110, "model_type": "char"},
    }
    out = []
    for name, way in ways.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / name),
            minloglevel=2,
            num_threads=1,
            hard_vocab_limit=False,
            **way,
        )
        content = (folder / f"{name}.model").read_bytes()
        out.append(Sample(name, {"m.model": content}, {"m.model": (of_message,)}))
    return out


def _read_sentence_piece(folder: Path, sample: Sample) -> Observed:
    spec = TokenizerSpec(SENTENCE_PIECE_KINDS[sample.name], model=str(folder / "m.model"))
    return Observed.of(build_tokenizer(spec))


def _compare_sentence_piece(folder: Path, sample: Sample, found: Observed) -> str | None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    size, end = len(pieces), model.eos_id() if model.eos_id() >= 0 else None
    if SENTENCE_PIECE_KINDS[sample.name] == "SentencePieceTokenizer":
        # Megatron adds those of its special tokens that the model lacks, in this order.
        own = {"<PAD>": model.pad_id(), "<BOS>": model.bos_id(), "<EOS>": model.eos_id()}
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", *(name for name, i in own.items() if i < 0)]
        pieces += [name for name in names if name not in pieces]
        size, end = len(pieces), pieces.index("<EOD>")
    return found.difference(model.encode, size, end)


TOKENIZER = Kind("tokenizer files", _samples, _read, _compare)
SENTENCE_PIECE = Kind("SentencePiece", _sentence_piece_samples, _read_sentence_piece, _compare_sentence_piece)
