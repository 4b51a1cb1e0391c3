"""Sections of the tree about what a run reads: tokenizer and data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.option import Probability, Proportions, Section, option


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
        synonyms={"HuggingFaceTokenizer": "HFTokenizer"},
        refused={
            "TikTokenizer": "is not offered: save the vocabulary as a tokenizer.json and take HFTokenizer",
            "SFTTokenizer": "belongs to fine-tuning, which is not offered",
            "MultimodalTokenizer": "belongs to vision models, which are not offered",
            "NullMultimodalTokenizer": "belongs to vision models, which are not offered",
        },
    )
    vocab_file: str | None = option(None, "vocabulary file (GPT-2: vocab.json; BERT: vocab.txt)")
    merge_file: str | None = option(None, "BPE merges file")
    tokenizer_model: str | None = option(None, "sentencepiece model, tokenizer.json, or a folder with one")
    vocab_extra_ids: NonNegativeInt = option(0, "sentinel tokens added to the vocabulary")


class DataConfig(Section):
    """Data"""

    data_path: tuple[str, ...] = option((), "one dataset prefix, or WEIGHT PREFIX pairs to blend")
    train_data_path: tuple[str, ...] = option((), "prefix or blend for training alone")
    valid_data_path: tuple[str, ...] = option((), "prefix or blend for validation alone")
    test_data_path: tuple[str, ...] = option((), "prefix or blend for testing alone")
    split: Proportions = option("969, 30, 1", "train, validation and test proportions of --data-path")
    data_cache_path: str | None = option(None, "folder for built indexes; default: beside the data")
    train_data_exact_num_epochs: PositiveInt | None = option(None, "exact number of epochs in the index")
    dataloader_type: Literal["single", "cyclic"] = option(
        "single", "single: one pass in index order; cyclic: reshuffled every epoch, without end"
    )
    data_sharding: bool = option(
        False,
        "cyclic in Megatron's order, rank by rank; a resume on other ranks repeats and leaves out samples",
        switches={"--no-data-sharding": False},
    )
    num_workers: NonNegativeInt = option(2, "batches read ahead by a background thread; 0 reads in line")
    verify_data: bool = option(
        True,
        "trust the files of the data: neither compare blocks of tokens with their checksums (.sum) when they "
        "are first used, nor look whether files change under the run or before it resumes",
        flag="--no-verify-data",
        switches={"--verify-data": True},
    )
    reset_position_ids: bool = option(False, "count positions anew after each end of document")
    reset_attention_mask: bool = option(False, "let tokens attend only within their document")
    eod_mask_loss: bool = option(False, "leave end-of-document inputs out of the loss")
    mask_prob: Annotated[float, Field(gt=0, lt=1)] = option(
        0.15, "BERT: share of a sample's tokens that the model has to predict"
    )
    short_seq_prob: Probability = option(
        0.1, "BERT: share of the samples that are cut to a random shorter length"
    )
    bert_pack: bool = option(
        False,
        "BERT: put the samples of a micro-batch into as few rows as they fit in, with attention and "
        "positions kept apart",
    )
    mock_data: bool = option(False, "train on deterministic random tokens instead of files")
