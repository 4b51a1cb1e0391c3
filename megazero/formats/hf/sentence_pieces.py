"""Converts a SentencePiece model like Llama's (BPE with a fallback to bytes) into a ``tokenizer.json``.

transformers' own LlamaTokenizer reads the model too, but encodes texts that begin with a blank differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

_BLANK = "\u2581"
_PROBES = (
    "",
    " two  blanks   and\ttabs\n\n",
    "def main(argv):\n    return 0\r\n",
    "na\u00efve \ufb01 \u2160 \u00bd e\u0301",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441 \u2603 \U0001f600\u200d",
    f"a{_BLANK}b <s> </s> <0x41> <unk>",
)


def tokenizer_json(path: Path) -> tuple[bytes, dict[str, str]] | None:
    """The content of ``tokenizer.json``, and the special tokens by name, such as ``bos_token``.

    None if the ids would differ from the model's, because it is no such BPE, normalizes texts, or has pieces
    with rules of their own. Texts that show each of these are encoded both ways to find out.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromFile(str(path))
    ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    names = {f"{role}_token": model.id_to_piece(number) for role, number in ids.items() if number >= 0}
    backend = _backend(model)
    if backend is None or any(
        backend.encode(text, add_special_tokens=False).ids != model.encode(text) for text in _PROBES
    ):
        return None
    return _with_specials(backend, model), names


def _backend(model: sentencepiece.SentencePieceProcessor) -> tokenizers.Tokenizer | None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    ranked = [
        number
        for number in range(len(pieces))
        if not (model.is_control(number) or model.is_unknown(number) or model.is_byte(number))
    ]
    # The Python API does not tell the kind of model, but scores do: a BPE's are 0, -1, -2, ..., a unigram
    # model's are log-probabilities.
    if [model.get_score(number) for number in ranked] != [-float(rank) for rank in range(len(ranked))]:
        return None
    if not any(model.is_byte(number) for number in range(len(pieces))):
        return None
    rank = {pieces[number]: place for place, number in enumerate(ranked)}
    merges = []
    for piece in rank:
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in halves if left in rank and right in rank]
        merges += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    backend = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            unk_token=pieces[model.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return backend


def _with_specials(backend: tokenizers.Tokenizer, model: sentencepiece.SentencePieceProcessor) -> bytes:
    """Dump the backend with its control pieces as special tokens, as transformers expects them."""
    content: dict[str, object] = json.loads(backend.to_str())
    content["added_tokens"] = [
        {
            **{"id": number, "content": model.id_to_piece(number), "special": True},
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number in range(model.get_piece_size())
        if model.is_control(number) or model.is_unknown(number)
    ]
    return json.dumps(content, ensure_ascii=False).encode()
