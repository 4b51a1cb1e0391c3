"""The section of the tree about the data that a run reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Probability, Proportions, Section, option
from megazero.config.tree.roles import Role

_OF_BERT = (config.model.family == "bert").because("`pretrain_bert.py` trains one")
_OF_GPT = (config.model.family == "gpt").because("a BERT's samples stay within one document")

_NO_TASK = config.finetune.task.is_none.because("`--train-data` and its siblings take its place")
_PREPARED = (
    (config.model.family == "gpt").because("a BERT's index is another"),
    (here.pack == "none").because("a packing has no such index"),
    here.mock_data.is_off.because("it is an index of files"),
)


class DataConfig(Section):
    """Data"""

    data_path: tuple[str, ...] = option(
        (), "one dataset prefix, or WEIGHT PREFIX pairs to blend", Role.FILE | Role.SOURCE, needs=_NO_TASK
    )
    train_data_path: tuple[str, ...] = option(
        (), "prefix or blend for training alone", Role.FILE | Role.SOURCE, needs=_NO_TASK
    )
    valid_data_path: tuple[str, ...] = option(
        (), "prefix or blend for validation alone", Role.FILE | Role.SOURCE, needs=_NO_TASK
    )
    test_data_path: tuple[str, ...] = option(
        (), "prefix or blend for testing alone", Role.FILE | Role.SOURCE, needs=_NO_TASK
    )
    split: Proportions = option("969, 30, 1", "train, validation and test proportions of --data-path")
    data_cache_path: str | None = option(
        None, "folder for built indexes; default: beside the data", Role.LOCAL
    )
    train_data_exact_num_epochs: PositiveInt | None = option(
        None,
        "exact number of epochs in the index",
        needs=(
            here.dataloader_type == "single",
            here.t5_columns.is_none.because("pairs come again and again, and have no index"),
            config.finetune.task.is_none.because("`--epochs` takes its place"),
        ),
    )
    train_idx_path: str | None = option(
        None,
        "prepared sentences of the samples of a BERT's training, a Megatron's .npy, instead of an index that "
        "is built",
        needs=(
            config.model.family.among("gpt", "bert").because("sentences of a T5's samples cannot be read"),
            ((config.model.family == "gpt") | here.mock_data.is_off).because("it is an index of files"),
        ),
        idle_without=_OF_BERT,
    )
    train_doc_idx_path: str | None = option(
        None,
        "prepared order of documents of the training, a Megatron's .npy; with the two others, instead of an "
        "index that is built",
        needs=(here.train_sample_idx_path, here.train_shuffle_idx_path, *_PREPARED),
    )
    train_sample_idx_path: str | None = option(
        None,
        "prepared begins of samples",
        needs=(here.train_doc_idx_path, here.train_shuffle_idx_path, *_PREPARED),
    )
    train_shuffle_idx_path: str | None = option(
        None,
        "prepared order of samples",
        needs=(here.train_doc_idx_path, here.train_sample_idx_path, *_PREPARED),
    )
    dataloader_type: Literal["single", "cyclic"] = option(
        "single", "single: one pass in index order; cyclic: reshuffled every epoch, without end"
    )
    data_sharding: bool = option(
        False,
        "cyclic in Megatron's order, rank by rank; a resume on other ranks repeats and leaves out samples",
        switches={"--no-data-sharding": False},
        needs=here.dataloader_type == "cyclic",
    )
    num_workers: NonNegativeInt = option(
        2, "batches read ahead by a background thread; 0 reads in line", Role.LOCAL
    )
    verify_data: bool = option(
        True,
        "trust the files of the data: neither compare blocks of tokens with their checksums (.sum) when they "
        "are first used, nor look whether files change under the run or before it resumes",
        flag="--no-verify-data",
        switches={"--verify-data": True},
    )
    reset_position_ids: bool = option(
        False, "count positions anew after each end of document", idle_without=_OF_GPT
    )
    reset_attention_mask: bool = option(
        False, "let tokens attend only within their document", idle_without=_OF_GPT
    )
    eod_mask_loss: bool = option(False, "leave end-of-document inputs out of the loss", idle_without=_OF_GPT)
    pack: Literal["none", "best-fit"] = option(
        "none",
        "best-fit: fill sequences with whole documents, as tightly as they go (Ding et al. 2024), and cut "
        "only those that are longer than a sequence; none: lay documents end to end and cut them anywhere",
        needs=(
            (config.model.family == "gpt").because(
                "a BERT's samples stay within one document, and --bert-pack packs those"
            ),
            here.reset_attention_mask.because(
                "documents that share a sequence have nothing to do with each other"
            ),
            here.mock_data.is_off.because("random tokens have no documents"),
            config.finetune.task.is_none.because("its samples are not cut"),
        ),
    )
    mask_prob: Annotated[float, Field(gt=0, lt=1)] = option(
        0.15, "BERT, T5: share of a sample's tokens that the model has to predict", idle_without=_OF_BERT
    )
    short_seq_prob: Probability = option(
        0.1, "BERT, T5: share of the samples that are cut to a random shorter length", idle_without=_OF_BERT
    )
    bert_pack: bool = option(
        False,
        "BERT: put the samples of a micro-batch into as few rows as they fit in, with attention and "
        "positions kept apart",
        needs=(config.model.num_experts == ()).because(
            "the samples of a row would share one capacity and one balance"
        ),
        idle_without=_OF_BERT,
    )
    t5_columns: tuple[str, str] | None = option(
        None,
        "T5: the data are files of pairs of texts, JSON objects or TSV, under these two names: what the "
        "encoder is given and what the decoder is to answer",
        flag="--text-to-text-columns",
        needs=(config.model.family == "t5", here.mock_data.is_off.because("random tokens are no texts")),
    )
    mock_data: bool = option(
        False, "train on deterministic random tokens instead of files", Role.SOURCE, needs=_NO_TASK
    )
