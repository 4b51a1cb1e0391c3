"""SentencePiece models (Kudo and Richardson 2018), in the two ways Megatron reads them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.data.tokenizers.base import FastSource, TokenBatch, Tokenizer, require_file
from megazero.data.tokenizers.library import check_ids
from megazero.errors import DataError

if TYPE_CHECKING:
    import sentencepiece

# Loads a model from standard input under limits on CPU seconds and bytes of memory, and uses it once. It
# starts without `site` and gets the parent's `sys.path` instead, which is faster.
_TRIAL = """
import sys
seconds, memory, *sys.path = sys.argv[1:]
import resource
for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(kind)[1]  # a limit may not be raised above it
    resource.setrlimit(kind, (int(most) if hard == resource.RLIM_INFINITY else min(int(most), hard), hard))
import sentencepiece
model = sentencepiece.SentencePieceProcessor()
try:
    model.LoadFromSerializedProto(sys.stdin.buffer.read())
    model.id_to_piece(list(range(model.get_piece_size())))
    model.decode(model.encode("Two  words, \\u00bd na\\u00efve \\u732b\\n"))
except (RuntimeError, ValueError) as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""
_NO_MODEL = 3
_TRIAL_SECONDS = 3
_SECONDS_PER_MEGABYTE = 2  # 256,000 pieces take 4 MB and load in half a second
_TRIAL_MEMORY = 8 << 30


def load_model(path: Path) -> tuple[bytes, sentencepiece.SentencePieceProcessor]:
    """Load a model; return the bytes of the file and the model.

    Some versions of the library hang or crash on a damaged file. So another process loads the file first,
    which takes about 0.1 s.

    Raises:
        DataError: the file is not a model, or cannot be loaded within the limits.
    """
    import sentencepiece

    content = path.read_bytes()
    seconds = _TRIAL_SECONDS + _SECONDS_PER_MEGABYTE * len(content) // 10**6
    command = [sys.executable, "-S", "-c", _TRIAL, str(seconds), str(_TRIAL_MEMORY), *sys.path]
    trial = subprocess.run(command, input=content, capture_output=True, check=False)
    if trial.returncode == -signal.SIGXCPU:
        raise _unsuitable(path, f"loading it takes more than {seconds} s")
    if trial.returncode != 0:
        last = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        if trial.returncode < 0:
            last = f"loading it ends the process with {signal.Signals(-trial.returncode).name}"
        if trial.returncode != _NO_MODEL and 0 <= memory_limit() < _TRIAL_MEMORY:
            raise DataError(
                f"`tokenizer_model` must be tried by another process first, but {path} was not ({last}), "
                f"where a process may have {memory_limit() >> 20:,} MiB; raise `ulimit -v`."
            )
        raise _unsuitable(path, last)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    return content, processor


def memory_limit() -> int:
    """The memory limit of a process here in bytes (`ulimit -v`); -1 if there is no limit."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[1]


def _unsuitable(path: Path, reason: str) -> DataError:
    return DataError(f"`tokenizer_model` must be a SentencePiece model, but {path} is not ({reason}).")


class GPTSentencePieceTokenizer(Tokenizer):
    """The model's own pieces and no other tokens; the model's eos ends a document."""

    name = "GPTSentencePieceTokenizer"

    def __init__(self, model: str | None):
        path = require_file(model, "tokenizer_model", self.name, "a SentencePiece .model file")
        self._model_bytes, processor = load_model(path)
        if processor.get_piece_size() == 0:
            raise _unsuitable(path, "it holds no pieces")
        self._processor = processor
        self.vocab_size = processor.get_piece_size()
        ids = {role: getattr(processor, f"{role}_id")() for role in ("bos", "eos", "pad", "unk")}
        self.special_ids = {role: i for role, i in ids.items() if i >= 0}
        self.eod = self.special_ids.get("eos")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return TokenBatch.of(self._processor.encode(list(texts), out_type=int, num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        text: str = self._processor.decode(ids)
        return text

    def fast_source(self) -> FastSource | None:
        model = self._processor
        pieces = range(model.get_piece_size())
        reserved = [model.id_to_piece(i) for i in pieces if model.is_control(i) or model.is_unknown(i)]
        return FastSource("sentencepiece", self._model_bytes, tuple(reserved), normalizes=True)


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """The model's own pieces with its bos before every text, as Megatron-LM encodes for Llama 2.

    Raises DataError if the model has no bos.
    """

    name = "Llama2Tokenizer"

    def __init__(self, model: str | None):
        super().__init__(model)
        if "bos" not in self.special_ids:
            raise DataError(
                f"`tokenizer_model` must be a SentencePiece model with a bos for {self.name}, but {model} "
                "has none; use GPTSentencePieceTokenizer."
            )
        self._bos = self.special_ids["bos"]

    def encode(self, text: str) -> list[int]:
        return [self._bos, *super().encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        rows = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return TokenBatch.of([[self._bos, *row] for row in rows])

    def fast_source(self) -> FastSource | None:
        return None


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """The model's pieces, then those of Megatron's special tokens that the model lacks, then sentinels.

    The order is Megatron's: `<CLS> <SEP> <EOD> <MASK>`, pad, bos, eos, `<extra_id_0>` ... `<EOD>` ends a
    document.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model: str | None, extra_ids: int = 0):
        super().__init__(model)
        pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        table = {piece: i for i, piece in enumerate(pieces)}
        tokens = {"cls": "<CLS>", "sep": "<SEP>", "eod": "<EOD>", "mask": "<MASK>"}
        for role, fallback in (("pad", "<PAD>"), ("bos", "<BOS>"), ("eos", "<EOS>")):
            own = self.special_ids.get(role)
            tokens[role] = fallback if own is None else pieces[own]
        for token in (*tokens.values(), *(f"<extra_id_{i}>" for i in range(extra_ids))):
            table.setdefault(token, len(table))
        ids = {role: table[token] for role, token in tokens.items()}
        self.eod = ids.pop("eod")
        self.special_ids = {**self.special_ids, **ids}
        self.extra_ids = tuple(table[f"<extra_id_{i}>"] for i in range(extra_ids))
        self._names = {i: token for token, i in table.items() if i >= self.vocab_size}
        self._own_size, self.vocab_size = self.vocab_size, len(table)

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        parts, run = [], []
        for i in ids:
            if i < self._own_size:
                run.append(i)
                continue
            parts += [self._processor.decode(run), self._names[i]]
            run = []
        return "".join([*parts, self._processor.decode(run)])
