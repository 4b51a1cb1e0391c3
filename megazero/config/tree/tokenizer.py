"""The section `tokenizer`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, model_validator

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

_OF_MODELS = ("HFTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


class TokenizerConfig(Section):
    """Tokenizer"""

    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "HFTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "ByteLevelTokenizer",
            "NullTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
        ]
        | None
    ) = option(
        None,
        synonyms={"HuggingFaceTokenizer": "HFTokenizer", "PretrainedFromHF": "HFTokenizer"},
        refused={
            "TikTokenizer": "is not offered: save the vocabulary as a tokenizer.json and take HFTokenizer",
            "SFTTokenizer": "reads conversations, which `megazero data conversations` does beforehand",
            "MultimodalTokenizer": "belongs to vision models, which are not offered",
            "NullMultimodalTokenizer": "belongs to vision models, which are not offered",
        },
        needs=(
            when("GPT2BPETokenizer", here.vocab_file).because(
                "it is the kind that no `--tokenizer-type` means"
            ),
            when("GPT2BPETokenizer", here.merge_file),
            when(
                ("HFTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
                here.tokenizer_model,
            ),
            when(("BertWordPieceLowerCase", "BertWordPieceCase"), here.vocab_file),
            when("NullTokenizer", config.model.vocab_size),
        ),
    )
    """kind of tokenizer; default: GPT2BPETokenizer, or BertWordPieceLowerCase for BERT, or none where
    --vocab-size is given without files"""

    @model_validator(mode="before")
    @classmethod
    def _model_by_another_name(cls, data: object) -> object:
        """Take `--vocab-file` for the tokenizer's model, by which scripts of forks give it."""
        if not isinstance(data, dict) or data.get("tokenizer_type") not in _OF_MODELS:
            return data
        if data.get("tokenizer_model") is not None or data.get("vocab_file") is None:
            return data
        return {**data, "tokenizer_model": data["vocab_file"], "vocab_file": None}

    vocab_file: str | None = option(None, roles=Role.FILE)
    """vocabulary file (GPT-2: vocab.json; BERT: vocab.txt)"""
    merge_file: str | None = option(None, roles=Role.FILE)
    """BPE merges file"""
    tokenizer_model: str | None = option(None, roles=Role.FILE, aliases=("--tokenizer-name-or-path",))
    """sentencepiece model, tokenizer.json, a folder with one, or the name of one on the Hugging Face hub"""
    vocab_extra_ids: NonNegativeInt = option(
        0,
        needs=here.tokenizer_type.among(
            "BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer"
        ),
    )
    """sentinel tokens added to the vocabulary"""
    wordpiece_first: Literal["bos", "eos"] = option(
        "bos", needs=here.tokenizer_type.among("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    """which of [BOS] and [EOS] gets the lower id where vocab.txt lacks them: bos as in Megatron-LM, or eos as
    in checkpoints of earlier versions"""

    @property
    def files(self) -> dict[str, Path]:
        """Setting -> the file or folder that it names."""
        named = {name: getattr(self, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
        return {name: Path(path) for name, path in named.items() if path is not None}

    def located(self, *folders: Path) -> TokenizerConfig:
        """Return the tokenizer with absolute paths of its files, which hold in any working directory.

        A file that is missing is looked for by its name in `folders`. A name that is no file, as of a
        tokenizer on a hub, stays as it is.
        """
        places = {
            name: next(filter(Path.exists, (path, *(folder / path.name for folder in folders))), None)
            for name, path in self.files.items()
        }
        return self.model_copy(update={name: os.path.abspath(path) for name, path in places.items() if path})
