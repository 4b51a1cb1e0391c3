"""The section of the tree about the data that a run reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.tree.option import Probability, Proportions, Section, option

_PREPARED = (
    "model.family=gpt: a BERT's index is another",
    "pack=none: a packing has no such index",
    "mock_data=False: it is an index of files",
)


class DataConfig(Section):
    """Data"""

    data_path: tuple[str, ...] = option(
        (),
        "one dataset prefix, or WEIGHT PREFIX pairs to blend",
        needs="finetune.task=None: `--train-data` and its siblings take its place",
    )
    train_data_path: tuple[str, ...] = option(
        (),
        "prefix or blend for training alone",
        needs="finetune.task=None: `--train-data` and its siblings take its place",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "prefix or blend for validation alone",
        needs="finetune.task=None: `--train-data` and its siblings take its place",
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "prefix or blend for testing alone",
        needs="finetune.task=None: `--train-data` and its siblings take its place",
    )
    split: Proportions = option("969, 30, 1", "train, validation and test proportions of --data-path")
    data_cache_path: str | None = option(None, "folder for built indexes; default: beside the data")
    train_data_exact_num_epochs: PositiveInt | None = option(
        None,
        "exact number of epochs in the index",
        needs=(
            "dataloader_type=single",
            "t5_columns=None: pairs come again and again, and have no index",
            "finetune.task=None: `--epochs` takes its place",
        ),
    )
    train_idx_path: str | None = option(
        None,
        "prepared sentences of the samples of a BERT's training, a Megatron's .npy, instead of an index that "
        "is built",
        needs=(
            "model.family=gpt,bert: sentences of a T5's samples cannot be read",
            "model.family=gpt or mock_data=False: it is an index of files",
        ),
    )
    train_doc_idx_path: str | None = option(
        None,
        "prepared order of documents of the training, a Megatron's .npy; with the two others, instead of an "
        "index that is built",
        needs=("train_sample_idx_path", "train_shuffle_idx_path", *_PREPARED),
    )
    train_sample_idx_path: str | None = option(
        None,
        "prepared begins of samples",
        needs=("train_doc_idx_path", "train_shuffle_idx_path", *_PREPARED),
    )
    train_shuffle_idx_path: str | None = option(
        None,
        "prepared order of samples",
        needs=("train_doc_idx_path", "train_sample_idx_path", *_PREPARED),
    )
    dataloader_type: Literal["single", "cyclic"] = option(
        "single", "single: one pass in index order; cyclic: reshuffled every epoch, without end"
    )
    data_sharding: bool = option(
        False,
        "cyclic in Megatron's order, rank by rank; a resume on other ranks repeats and leaves out samples",
        switches={"--no-data-sharding": False},
        needs="dataloader_type=cyclic",
    )
    num_workers: NonNegativeInt = option(2, "batches read ahead by a background thread; 0 reads in line")
    verify_data: bool = option(
        True,
        "trust the files of the data: neither compare blocks of tokens with their checksums (.sum) when they "
        "are first used, nor look whether files change under the run or before it resumes",
        flag="--no-verify-data",
        switches={"--verify-data": True},
    )
    reset_position_ids: bool = option(
        False,
        "count positions anew after each end of document",
    )
    reset_attention_mask: bool = option(
        False,
        "let tokens attend only within their document",
    )
    eod_mask_loss: bool = option(
        False,
        "leave end-of-document inputs out of the loss",
    )
    pack: Literal["none", "best-fit"] = option(
        "none",
        "best-fit: fill sequences with whole documents, as tightly as they go (Ding et al. 2024), and cut "
        "only those that are longer than a sequence; none: lay documents end to end and cut them anywhere",
        needs=(
            "model.family=gpt: a BERT's samples stay within one document, and --bert-pack packs those",
            "reset_attention_mask: documents that share a sequence have nothing to do with each other",
            "mock_data=False: random tokens have no documents",
            "finetune.task=None: its samples are not cut",
        ),
    )
    mask_prob: Annotated[float, Field(gt=0, lt=1)] = option(
        0.15, "BERT, T5: share of a sample's tokens that the model has to predict"
    )
    short_seq_prob: Probability = option(
        0.1, "BERT, T5: share of the samples that are cut to a random shorter length"
    )
    bert_pack: bool = option(
        False,
        "BERT: put the samples of a micro-batch into as few rows as they fit in, with attention and "
        "positions kept apart",
        needs="model.num_experts=(): the samples of a row would share one capacity and one balance",
    )
    t5_columns: tuple[str, str] | None = option(
        None,
        "T5: the data are files of pairs of texts, JSON objects or TSV, under these two names: what the "
        "encoder is given and what the decoder is to answer",
        flag="--text-to-text-columns",
        needs=("model.family=t5", "mock_data=False: random tokens are no texts"),
    )
    mock_data: bool = option(
        False,
        "train on deterministic random tokens instead of files",
        needs="finetune.task=None: `--train-data` and its siblings take its place",
    )
