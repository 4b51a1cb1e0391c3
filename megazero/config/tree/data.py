"""The section `data`: the data that a run reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Probability, Proportions, Section, option
from megazero.config.tree.roles import Role
from megazero.storage.cached import CACHE_GIB, Cache

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

    data_path: tuple[str, ...] = option((), roles=Role.FILE | Role.SOURCE, needs=_NO_TASK)
    """one dataset prefix, or WEIGHT PREFIX pairs to blend; @FILE: those in a file, which a run reads anew
    when they change"""
    train_data_path: tuple[str, ...] = option((), roles=Role.FILE | Role.SOURCE, needs=_NO_TASK)
    """prefix or blend for training alone"""
    valid_data_path: tuple[str, ...] = option((), roles=Role.FILE | Role.SOURCE, needs=_NO_TASK)
    """prefix or blend for validation alone"""
    test_data_path: tuple[str, ...] = option((), roles=Role.FILE | Role.SOURCE, needs=_NO_TASK)
    """prefix or blend for testing alone"""
    multiple_validation_sets: bool = option(
        False,
        needs=(_NO_TASK, here.mock_data.is_off.because("random tokens are one set")),
    )
    """validate on each dataset of the validation data by itself, and report a loss for each"""
    validation_set_names: tuple[str, ...] = option((), roles=Role.QUIET, needs=here.multiple_validation_sets)
    """names of these sets, in their order; default: those of the files"""
    split: Proportions = option("969, 30, 1")
    """train, validation and test proportions of --data-path"""
    data_cache_path: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT)
    """folder for built indexes; default: beside the data"""
    object_storage_cache_path: str | None = option(None, roles=Role.LOCAL)
    """folder on a local disk for what is fetched from URLs of objects (s3://, gs://, az://, https://), shared
    by the ranks of a host; default: in the user's cache folder"""
    object_storage_cache_gib: PositiveFloat = option(CACHE_GIB, roles=Role.LOCAL)
    """GiB that tokens may take there; those that were used least recently make room"""
    index_memory_gib: PositiveFloat = option(64.0, idle_without=_OF_GPT)
    """the most memory in which the documents and the samples of a split are shuffled, in GiB; an index that
    needs more has an order that is computed place by place, without memory, and is another than Megatron's"""
    train_data_exact_num_epochs: PositiveInt | None = option(
        None,
        needs=(
            here.dataloader_type == "single",
            here.t5_columns.is_none.because("pairs come again and again, and have no index"),
            config.finetune.task.is_none.because("`--epochs` takes its place"),
        ),
    )
    """exact number of epochs in the index"""
    train_idx_path: str | None = option(
        None,
        needs=(
            config.model.family.among("gpt", "bert").because("sentences of a T5's samples cannot be read"),
            ((config.model.family == "gpt") | here.mock_data.is_off).because("it is an index of files"),
        ),
        idle_without=_OF_BERT,
    )
    """prepared sentences of the samples of a BERT's training, a Megatron's .npy, instead of an index that is
    built"""
    train_doc_idx_path: str | None = option(
        None, needs=(here.train_sample_idx_path, here.train_shuffle_idx_path, *_PREPARED)
    )
    """prepared order of documents of the training, a Megatron's .npy; with the two others, instead of an
    index that is built"""
    train_sample_idx_path: str | None = option(
        None, needs=(here.train_doc_idx_path, here.train_shuffle_idx_path, *_PREPARED)
    )
    """prepared begins of samples"""
    train_shuffle_idx_path: str | None = option(
        None, needs=(here.train_doc_idx_path, here.train_sample_idx_path, *_PREPARED)
    )
    """prepared order of samples"""
    dataloader_type: Literal["single", "cyclic"] = option("single")
    """single: one pass in index order; cyclic: reshuffled every epoch, without end"""
    data_sharding: bool = option(
        False, switches={"--no-data-sharding": False}, needs=here.dataloader_type == "cyclic"
    )
    """cyclic in Megatron's order, rank by rank; a resume on other ranks repeats and leaves out samples"""
    num_workers: NonNegativeInt = option(2, roles=Role.LOCAL)
    """batches read ahead by a background thread; 0 reads in line"""
    verify_data: bool = option(True, switches={"--verify-data": True})
    """trust the files of the data: neither compare blocks of tokens with their checksums (.sum) when they are
    first used, nor look whether files change under the run or before it resumes"""
    reset_position_ids: bool = option(False, idle_without=_OF_GPT)
    """count positions anew after each end of document"""
    reset_attention_mask: bool = option(False, idle_without=_OF_GPT)
    """let tokens attend only within their document"""
    eod_mask_loss: bool = option(False, idle_without=_OF_GPT)
    """leave end-of-document inputs out of the loss"""
    pack: Literal["none", "best-fit"] = option(
        "none",
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
    """best-fit: fill sequences with whole documents, as tightly as they go (Ding et al. 2024), and cut only
    those that are longer than a sequence; none: lay documents end to end and cut them anywhere"""
    mask_prob: Annotated[float, Field(gt=0, lt=1)] = option(0.15, idle_without=_OF_BERT)
    """BERT, T5: share of a sample's tokens that the model has to predict"""
    short_seq_prob: Probability = option(0.1, idle_without=_OF_BERT)
    """BERT, T5: share of the samples that are cut to a random shorter length"""
    bert_pack: bool = option(
        False,
        needs=(config.model.num_experts == ()).because(
            "the samples of a row would share one capacity and one balance"
        ),
        idle_without=_OF_BERT,
    )
    """BERT: put the samples of a micro-batch into as few rows as they fit in, with attention and positions
    kept apart"""
    t5_columns: tuple[str, str] | None = option(
        None,
        flag="--text-to-text-columns",
        needs=(config.model.family == "t5", here.mock_data.is_off.because("random tokens are no texts")),
    )
    """T5: the data are files of pairs of texts, JSON objects or TSV, under these two names: what the encoder
    is given and what the decoder is to answer"""
    mock_data: bool = option(False, roles=Role.SOURCE, needs=_NO_TASK)
    """train on deterministic random tokens instead of files"""

    @property
    def object_cache(self) -> Cache:
        """Where this host keeps what it fetches from URLs."""
        return Cache(self.object_storage_cache_path, self.object_storage_cache_gib)
