"""The section of the tree about the tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from megazero.config.tree.option import Section, option


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
        "kind of tokenizer; default: GPT2BPETokenizer, or BertWordPieceLowerCase for BERT, or none where "
        "--vocab-size is given without files",
        synonyms={"HuggingFaceTokenizer": "HFTokenizer", "PretrainedFromHF": "HFTokenizer"},
        refused={
            "TikTokenizer": "is not offered: save the vocabulary as a tokenizer.json and take HFTokenizer",
            "SFTTokenizer": "belongs to fine-tuning, which is not offered",
            "MultimodalTokenizer": "belongs to vision models, which are not offered",
            "NullMultimodalTokenizer": "belongs to vision models, which are not offered",
        },
        needs=(
            "GPT2BPETokenizer => vocab_file: it is the kind that no `--tokenizer-type` means",
            "GPT2BPETokenizer => merge_file",
            (
                "HFTokenizer,SentencePieceTokenizer,GPTSentencePieceTokenizer,Llama2Tokenizer => "
                "tokenizer_model"
            ),
            "BertWordPieceLowerCase,BertWordPieceCase => vocab_file",
            "NullTokenizer => model.vocab_size",
        ),
    )
    vocab_file: str | None = option(None, "vocabulary file (GPT-2: vocab.json; BERT: vocab.txt)")
    merge_file: str | None = option(None, "BPE merges file")
    tokenizer_model: str | None = option(
        None,
        "sentencepiece model, tokenizer.json, a folder with one, or the name of one on the Hugging Face hub",
        aliases=("--tokenizer-name-or-path",),
    )
    vocab_extra_ids: NonNegativeInt = option(
        0,
        "sentinel tokens added to the vocabulary",
        needs="tokenizer_type=BertWordPieceLowerCase,BertWordPieceCase,SentencePieceTokenizer",
    )
