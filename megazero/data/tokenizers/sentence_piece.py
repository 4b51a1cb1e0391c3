"""SentencePiece models (Kudo and Richardson 2018), in the two ways Megatron reads them."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.data.tokenizers.base import FastSource, TokenBatch, Tokenizer
from megazero.data.tokenizers.files import require_file
from megazero.data.tokenizers.library import check_ids
from megazero.errors import DataError


class GPTSentencePieceTokenizer(Tokenizer):
    """The model's own pieces and nothing else; a document ends with the model's eos."""

    name = "GPTSentencePieceTokenizer"

    def __init__(self, model: str | None):
        import sentencepiece

        path = require_file(model, "--tokenizer-model", self.name, "a SentencePiece .model file")
        self._model_bytes = path.read_bytes()
        processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = processor.LoadFromSerializedProto(self._model_bytes)
        except RuntimeError as error:
            raise DataError(
                f"`--tokenizer-model` must be a SentencePiece model, but {path} is not ({error})."
            ) from error
        if not loaded or processor.get_piece_size() == 0:
            raise DataError(f"`--tokenizer-model` must be a SentencePiece model, but {path} holds no pieces.")
        self._processor = processor
        self.vocab_size = processor.get_piece_size()
        ids = {
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "pad": processor.pad_id(),
            "unk": processor.unk_id(),
        }
        self.special_ids = {role: i for role, i in ids.items() if i >= 0}
        self.eod = self.special_ids.get("eos")

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return TokenBatch.of(self._processor.encode(list(texts), out_type=int, num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        return self._processor.decode(ids)

    def fast_source(self) -> FastSource | None:
        model = self._processor
        pieces = range(model.get_piece_size())
        reserved = [model.id_to_piece(i) for i in pieces if model.is_control(i) or model.is_unknown(i)]
        return FastSource("sentencepiece", self._model_bytes, tuple(reserved), normalizes=True)


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """The model's own pieces with its bos before every text, as Megatron-LM encodes for Llama 2.

    Raises:
        DataError: the model has no bos.
    """

    name = "Llama2Tokenizer"

    def __init__(self, model: str | None):
        super().__init__(model)
        if "bos" not in self.special_ids:
            raise DataError(
                f"`--tokenizer-model` must be a SentencePiece model with a bos for {self.name}, but {model} "
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
    """The model's pieces, then whichever of Megatron's special tokens it lacks, then `<extra_id_0>` ...

    The order is Megatron's: `<CLS> <SEP> <EOD> <MASK>`, pad, bos, eos, extra ids. `<EOD>` ends a document.
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
