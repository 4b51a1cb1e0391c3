"""Train, validation and test datasets of a run, from what its command line says.

Sizes and order follow Megatron-Core: a lone prefix is used as it is; a weighted blend asks each dataset for
ceil(N w) samples, builds half a percent more as reserve, and is Σ ceil(N w) samples long; prefixes without
weights give one epoch each, mixed in proportion to their sizes.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from megazero.config.tree import Config, DataConfig
from megazero.data.blended import BlendedDataset, SampleDataset, parse_blend
from megazero.data.gpt_dataset import GPTDataset, GPTSettings, MockGPTDataset
from megazero.data.index_build import normalized
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.splits import SPLIT_NAMES, SplitReading, split_ranges
from megazero.errors import DataError

_RESERVE = 0.005  # share of samples built beyond the request of each dataset of a weighted blend
_MOCK_EPOCH = 100_000  # samples; as many sequences as Megatron-Core's mock data has

Datasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]


@dataclass(frozen=True)
class DatasetRequest:
    """What to build.

    num_samples: the least samples of train, valid and test; 0 for none of that split, None for one epoch.
    data_path: a prefix, prefixes, or weights and prefixes, divided by `split`; or each split's own
    train_data_path, valid_data_path, test_data_path (then `split` is not used). train_exact_num_epochs: make
    the training split exactly this many epochs long. mock: random tokens, no files. Raises DataError if
    sources contradict each other or there are none.
    """

    settings: GPTSettings
    num_samples: tuple[int | None, int | None, int | None]
    data_path: tuple[str, ...] = ()
    split: str = "969,30,1"
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split_reading: SplitReading = SplitReading.MEGATRON_CORE
    train_exact_num_epochs: int | None = None
    mock: bool = False

    def __post_init__(self) -> None:
        given = [name for name, on in (("data_path", self.data_path), ("mock", self.mock)) if on]
        given += ["train_data_path/valid_data_path/test_data_path"] if any(self.own_paths) else []
        if len(given) != 1:
            raise DataError(
                "`data source` must be exactly one of data_path, train/valid/test_data_path and mock, but is "
                f"{' and '.join(given) or 'none'}; give one."
            )

    @property
    def own_paths(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.train_data_path, self.valid_data_path, self.test_data_path


def build_gpt_datasets(request: DatasetRequest) -> Datasets:
    """(train, valid, test), with None for a split that is empty or not wanted.

    Raises DataError for damaged or missing files, impossible blends and splits too small for one sample.
    """
    if request.mock:
        return tuple(
            None if size == 0 else MockGPTDataset(size or _MOCK_EPOCH, request.settings, name)
            for name, size in zip(SPLIT_NAMES, request.num_samples, strict=True)
        )
    opened: dict[str, IndexedDataset] = {}
    built: list[SampleDataset | None] = []
    for number in range(len(SPLIT_NAMES)):
        built.append(_build_split(request, number, opened))
    train, valid, test = built
    return train, valid, test


def gpt_datasets(
    config: Config, vocab_size: int, eod: int | None, num_samples: tuple[int | None, int | None, int | None]
) -> Datasets:
    """The three splits of a run that trains a GPT.

    Args:
        config: the run's configuration.
        vocab_size: entries of the vocabulary, without padding.
        eod: the id that ends a document; None if the tokenizer has none.
        num_samples: the least samples of train, valid and test.

    Raises:
        DataError: files are missing or damaged, or hold too little for one sample.
    """
    data = config.data
    return build_gpt_datasets(
        DatasetRequest(
            settings=GPTSettings(
                sequence_length=config.model.seq_length,
                seed=config.training.seed,
                cache_dir=data.data_cache_path or default_cache(data.data_path or data.train_data_path),
                vocab_size=vocab_size,
                eod_token=eod,
                reset_position_ids=data.reset_position_ids,
                reset_attention_mask=data.reset_attention_mask,
                eod_mask_loss=data.eod_mask_loss,
            ),
            num_samples=(_train_size(data, num_samples[0]), *num_samples[1:]),
            data_path=data.data_path,
            split=data.split,
            train_data_path=data.train_data_path,
            valid_data_path=data.valid_data_path,
            test_data_path=data.test_data_path,
            train_exact_num_epochs=data.train_data_exact_num_epochs,
            mock=data.mock_data,
        )
    )


def _train_size(data: DataConfig, wanted: int | None) -> int | None:
    """How many samples to build for training: one epoch (None) for a cyclic order.

    An epoch is then the data, whatever the batch size and the length of the training. A weighted blend, which
    gives what its weights say, has no epoch; and Megatron's own order is over what Megatron builds.
    """
    if not wanted or data.dataloader_type != "cyclic" or data.data_sharding:
        return wanted
    source = data.train_data_path or data.data_path
    weighted = bool(source) and parse_blend(source, must_exist=False)[0][0] is not None
    return wanted if weighted else None


def default_cache(paths: tuple[str, ...]) -> str | None:
    """Beside the first dataset, where Megatron-DeepSpeed keeps its indexes too."""
    if not paths:
        return None
    _, prefix = parse_blend(paths, must_exist=False)[0]
    return str(Path(prefix).parent / "index-cache")


@dataclass(frozen=True)
class _Portion:
    """One dataset's part in one split: its sequences, and its weight in the blend if it has one."""

    indexed: IndexedDataset
    sequence_ids: range
    weight: float | None


def _build_split(
    request: DatasetRequest, number: int, opened: dict[str, IndexedDataset]
) -> SampleDataset | None:
    size, name = request.num_samples[number], SPLIT_NAMES[number]
    epochs = request.train_exact_num_epochs if number == 0 else None
    own = request.own_paths[number]
    if size == 0 or not (own or request.data_path):
        return None
    sources = []
    for weight, prefix in parse_blend(own or request.data_path):
        if prefix not in opened:
            opened[prefix] = open_indexed(prefix)
        indexed = opened[prefix]
        ids = (
            range(len(indexed))
            if own
            else split_ranges(request.split, len(indexed), request.split_reading)[number]
        )
        sources.append(_Portion(indexed, ids, weight))
    if not any(len(source.sequence_ids) for source in sources):
        if _wanted(request, number):
            warnings.warn(
                f"the {name} split is empty: split {request.split} gives it none of the "
                f"{sum(len(s.indexed) for s in sources)} sequences.",
                stacklevel=3,
            )
        return None
    for source in sources:
        if not len(source.sequence_ids):
            raise DataError(
                f"`{name}` split of {source.indexed.prefix} must have a sequence, but split {request.split} "
                f"gives it none of {len(source.indexed)}; give {name}_data_path or a larger share."
            )
    return _assemble(request.settings, sources, size, name, epochs)


def _wanted(request: DatasetRequest, number: int) -> bool:
    """Whether the split string gives this split any data."""
    return bool(request.own_paths[number]) or len(split_ranges(request.split, 1 << 40)[number]) > 0


def _assemble(
    settings: GPTSettings, sources: list[_Portion], size: int | None, name: str, epochs: int | None
) -> SampleDataset:
    if len(sources) == 1 and sources[0].weight is None:
        (source,) = sources
        return GPTDataset(source.indexed, source.sequence_ids, size, settings, name, epochs)
    weighted = sources[0].weight is not None
    if not weighted or epochs is not None:
        if weighted:
            raise DataError(
                f"`train_exact_num_epochs` must come without weights in `data_path`, but is {epochs}; the "
                "number of epochs already fixes how much each dataset gives."
            )
        parts = [GPTDataset(s.indexed, s.sequence_ids, None, settings, name, epochs) for s in sources]
        total = sum(len(part) for part in parts)
        blend_size = None if size is None or epochs is not None else min(size, total)
        return BlendedDataset(parts, None, blend_size, settings.cache_dir, name)
    if size is None:
        raise DataError(f"`num_samples` must be given for the weighted {name} blend, but is None.")
    weights = normalized([source.weight for source in sources]).tolist()
    targets = [math.ceil(size * weight) for weight in weights]
    parts = [
        GPTDataset(s.indexed, s.sequence_ids, math.ceil(target * (1 + _RESERVE)), settings, name)
        for s, target in zip(sources, targets, strict=True)
    ]
    return BlendedDataset(parts, weights, sum(targets), settings.cache_dir, name)
