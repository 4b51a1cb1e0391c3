"""Builds the order of training samples from sequence lengths: document, sample, shuffle and blending index.

A GPT sample is `sequence_length` + 1 consecutive tokens of the shuffled documents laid end to end;
consecutive samples share one token. Three arrays define the samples: the *document index* (epochs of shuffled
sequence numbers), the *sample index* (where in these sequences sample k begins) and the *shuffle index* (the
order in which samples are drawn). The construction, its use of one `numpy.random.RandomState` and the 80%
rule for the last epoch are Megatron-Core's, so a seed gives the same order of samples as there. What is too
large to be shuffled in memory has a `ComputedOrder` instead. The sample index goes to a file block by block.

Each builder has a `*_reference` twin in numpy; the compiled builder (csrc/data) is used if it is built.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.computed_order import ComputedOrder
from megazero.data.native import NATIVE
from megazero.errors import DataError

_FINAL_EPOCH_SHARE = 0.80  # a last epoch of which less is used is shuffled apart from the earlier epochs
_MOST_INDEX_BYTES = 2**42
_WALK_BLOCK = 1 << 18  # documents
MAX_DATASETS = int(np.iinfo(np.int16).max)


@dataclass(frozen=True)
class SamplePlan:
    """The number of samples of a split, and the number of epochs that they take.

    samples: at least the number asked for. samples_before_last: samples in all epochs except the last.
    separate_last: whether the last epoch is shuffled by itself, after the others.
    """

    tokens_per_epoch: int
    sequence_length: int
    extra: int
    epochs: int
    samples: int
    samples_before_last: int
    separate_last: bool


@dataclass(frozen=True)
class GPTIndex:
    """document_index: int32|int64 [epochs * sequences]; sample_index: int32|int64 [samples + 1, 2], rows
    (position in document_index, token offset); shuffle_index: uint32|int64 [samples]."""

    document_index: np.ndarray | ComputedOrder
    sample_index: np.ndarray
    shuffle_index: np.ndarray | ComputedOrder


def plan_samples(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    epochs: int | None = None,
    extra: int = 1,
) -> SamplePlan:
    """Count epochs and samples.

    num_samples: the least number of samples (None: one epoch); epochs: exactly this many epochs instead.
    extra: 1 if a sample reads one token past its end for the last label, else 0. Raises DataError if there
    are too few tokens for one sample.
    """
    if sequence_length < 1:
        raise DataError(f"`sequence_length` must be at least 1, but is {sequence_length}.")
    if tokens_per_epoch < 1 or (
        num_samples is None and (epochs or 1) * tokens_per_epoch < sequence_length + extra
    ):
        raise DataError(
            f"`tokens` must be at least sequence_length + {extra} = {sequence_length + extra} for one "
            f"sample, but are {tokens_per_epoch} in each of {epochs or 1} epoch(s); give more text or a "
            "shorter sequence."
        )
    if num_samples is not None and num_samples < 1:
        raise DataError(f"`num_samples` must be at least 1, but is {num_samples}.")
    if epochs is not None and epochs < 1:
        raise DataError(f"`epochs` must be at least 1, but is {epochs}.")
    if epochs is None:
        wanted = 1 if num_samples is None else num_samples * sequence_length + extra
        epochs = max(1, -(-wanted // tokens_per_epoch))
    else:
        num_samples = None
    samples = (epochs * tokens_per_epoch - extra) // sequence_length
    before_last = ((epochs - 1) * tokens_per_epoch - extra) // sequence_length if epochs > 1 else 0
    per_epoch = (tokens_per_epoch - extra) // sequence_length
    asked_of_last = (samples if num_samples is None else num_samples) - before_last
    separate = epochs > 1 and asked_of_last < int(_FINAL_EPOCH_SHARE * per_epoch)
    return SamplePlan(tokens_per_epoch, sequence_length, extra, epochs, samples, before_last, separate)


def build_seconds(plan: SamplePlan, sequences: int) -> float:
    """An estimate of the time of `build_gpt_index`, from its time per array element on one busy core."""
    return 150e-9 * plan.epochs * sequences + 250e-9 * plan.samples


def shuffled_bytes(plan: SamplePlan, sequences: int) -> int:
    """The memory in which `build_gpt_index` shuffles sequences and samples."""
    wide = 8 if sequences * plan.epochs > np.iinfo(np.int32).max else 4
    return wide * ((plan.epochs + 1) * sequences + plan.samples)


def build_gpt_index(
    lengths: np.ndarray,
    sequence_ids: range | np.ndarray,
    plan: SamplePlan,
    seed: int,
    orders: tuple[ComputedOrder, ComputedOrder] | None = None,
    folder: str | Path | None = None,
    step: Callable[[str], None] = lambda what: None,
) -> GPTIndex:
    """Build the three arrays of a split.

    lengths: int32 [S], of the whole dataset; sequence_ids: int [n], of the split, with
    `plan.tokens_per_epoch` tokens in all; orders: of sequences and samples, if they are computed; folder: for
    a temporary file with the sample index, None for memory; step: is called with the name of each step.
    Raises DataError if the index is too large for any memory.
    """
    size = 8 * plan.samples + (shuffled_bytes(plan, len(sequence_ids)) if orders is None else 0)
    if size > _MOST_INDEX_BYTES:
        raise DataError(
            f"the samples must fit into memory as an index, but {plan.samples:,} samples over "
            f"{plan.epochs:,} epochs take {size / 2**40:,.0f} TiB; train on fewer samples, or evaluate less "
            "often."
        )
    random = np.random.RandomState(seed)
    step("the order of the sequences, step 1 of 3")
    document_index = build_document_index(sequence_ids, plan, random) if orders is None else orders[0]
    step("where each sample begins, step 2 of 3")
    length = plan.sequence_length
    sample_index = build_sample_index(lengths, document_index, length, plan.samples, plan.extra, folder)
    step("the order of the samples, step 3 of 3")
    shuffle_index = build_shuffle_index(plan, random) if orders is None else orders[1]
    return GPTIndex(document_index, sample_index, shuffle_index)


def build_document_index(
    sequence_ids: range | np.ndarray, plan: SamplePlan, random: np.random.RandomState
) -> np.ndarray:
    """Repeat `sequence_ids` for each epoch and shuffle; int32 if the ids fit, else int64.

    The last epoch is shuffled by itself if the plan says so.
    """
    most = np.iinfo(np.int32).max
    if isinstance(sequence_ids, range):
        dtype = np.int32 if sequence_ids.stop <= most else np.int64
        ids = np.arange(sequence_ids.start, sequence_ids.stop, dtype=dtype)
    else:
        ids = sequence_ids.astype(np.int32 if sequence_ids.max(initial=0) <= most else np.int64)
    index = np.tile(ids, plan.epochs)
    last = (plan.epochs - 1 if plan.separate_last else plan.epochs) * ids.size
    random.shuffle(index[:last])
    if plan.separate_last:
        random.shuffle(index[last:])
    return index


def build_shuffle_index(plan: SamplePlan, random: np.random.RandomState) -> np.ndarray:
    """Permute the samples; with `separate_last`, those before the last epoch and the rest by themselves."""
    dtype = np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(plan.samples, dtype=dtype)
    last = plan.samples_before_last if plan.separate_last else plan.samples
    random.shuffle(index[:last])
    if plan.separate_last:
        random.shuffle(index[last:])
    return index


def build_sample_index(
    lengths: np.ndarray,
    document_index: np.ndarray | ComputedOrder,
    sequence_length: int,
    samples: int,
    extra: int = 1,
    folder: str | Path | None = None,
) -> np.ndarray:
    """Build the rows (position in document_index, offset), [samples + 1, 2].

    Row k is the first token of sample k and, with `extra`, the last token of sample k - 1. The dtype is int32
    if every position fits, else int64. With a `folder` that can be written, the rows are a map of a nameless
    file there. Raises DataError if the documents hold too few tokens.
    """
    dtype = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    rows = _sample_rows(lengths, document_index, sequence_length, samples, extra)
    if folder is None:
        return np.concatenate([block.astype(dtype) for block in rows])
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for block in rows:
                file.write(block.astype(dtype).data)
            file.flush()
            return np.memmap(file, dtype, "r", shape=(samples + 1, 2)).view(np.ndarray)
    except OSError:
        return build_sample_index(lengths, document_index, sequence_length, samples, extra)


def _sample_rows(
    lengths: np.ndarray,
    documents: np.ndarray | ComputedOrder,
    sequence_length: int,
    samples: int,
    extra: int,
) -> Iterator[np.ndarray]:
    """Yield the rows of the sample index, int64 [n, 2], after each block of documents."""
    yield np.zeros((1, 2), dtype=np.int64)
    walk, rows_of = (0, 0, 1), sample_rows_reference if NATIVE is None else NATIVE.sample_rows
    for begin in range(0, len(documents), _WALK_BLOCK):
        block = documents[begin : begin + _WALK_BLOCK]
        try:
            rows, walk = rows_of(lengths, block, sequence_length, extra, samples, walk)
        except IndexError as error:
            raise _too_few_tokens(str(error), samples, sequence_length, extra) from error
        yield rows
        if walk[2] > samples:
            return
    if walk[2] <= samples:
        raise _too_few_tokens("the documents hold fewer tokens", samples, sequence_length, extra)


def sample_rows_reference(
    lengths: np.ndarray,
    documents: np.ndarray,
    sequence_length: int,
    extra: int,
    samples: int,
    walk: tuple[int, int, int],
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The reference of the compiled walk, by prefix sums: sample k - 1 ends with token kT + extra - 1.

    documents: a block of them; walk: the tokens and documents before it, and the number of the next row.
    Returns the block's rows, and the walk after it.
    """
    sizes = np.asarray(lengths)[documents].astype(np.int64)
    ends = np.cumsum(sizes) + walk[0]
    after = max(walk[2], min(samples, (int(ends[-1]) - extra) // sequence_length) + 1)
    firsts = np.arange(walk[2], after, dtype=np.int64) * sequence_length
    places = np.searchsorted(ends, firsts + extra, side="left")
    rows = np.stack([walk[1] + places, firsts - (ends[places] - sizes[places])], axis=1)
    return rows, (int(ends[-1]), walk[1] + len(documents), after)


def _too_few_tokens(reason: str, samples: int, sequence_length: int, extra: int) -> DataError:
    return DataError(
        f"`tokens` must be at least {samples} samples * {sequence_length} + {extra} = "
        f"{samples * sequence_length + extra}, but are fewer ({reason}); the index does not fit the dataset."
    )


def build_blending_index(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of a blend: the dataset, int16 [size], and the sample's number in it, int64 [size].

    weights: positive, [d], normalized here. Sample i comes from the dataset with the largest
    weight * max(i, 1) - samples taken so far; of equal ones, from the first.
    """
    return _blending_index(normalized(weights), None, size)


def build_exhaustive_blending_index(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `build_blending_index`, in proportion to `sizes`, int [d], with every sample exactly once."""
    limits = np.asarray(sizes, dtype=np.int64)
    if limits.size == 0 or int(limits.min()) < 0 or int(limits.sum()) < 1:
        raise DataError(f"`sizes` must be counts with at least one sample, but are {limits.tolist()}.")
    _check_dataset_count(limits.size)
    total = int(limits.sum())
    return _blending_index(limits / float(total), limits, total)


def _blending_index(
    shares: np.ndarray, limits: np.ndarray | None, size: int
) -> tuple[np.ndarray, np.ndarray]:
    if NATIVE is None:
        return blending_index_reference(shares, limits, size)
    index: tuple[np.ndarray, np.ndarray] = NATIVE.blending_index(shares, limits, size)
    return index


def blending_index_reference(
    shares: np.ndarray, limits: np.ndarray | None, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The reference of both blending builders.

    shares: float64 [d] of sum 1; limits: the most samples of each dataset, int64 [d]; None for no limits.
    """
    dataset_index = np.empty(size, dtype=np.int16)
    sample_index = np.empty(size, dtype=np.int64)
    taken = np.zeros(len(shares), dtype=np.int64)
    for i in range(size):
        lag = shares * float(max(i, 1)) - taken
        if limits is not None:
            lag[taken >= limits] = -np.inf
        chosen = int(np.argmax(lag))
        dataset_index[i] = chosen
        sample_index[i] = taken[chosen]
        taken[chosen] += 1
    return dataset_index, sample_index


def normalized(weights: np.ndarray | Sequence[float]) -> np.ndarray:
    """`weights` divided by their sum, float64 [d]. Raises DataError unless all are positive and finite."""
    values = np.asarray(weights, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or float(values.min()) <= 0:
        raise DataError(f"`weights` of a blend must be positive numbers, but are {values.tolist()}.")
    _check_dataset_count(values.size)
    shares: np.ndarray = values / np.sum(values)
    return shares


def _check_dataset_count(count: int) -> None:
    if count >= MAX_DATASETS:
        raise DataError(
            f"`datasets` of a blend must be fewer than {MAX_DATASETS}, but are {count}; merge some."
        )


def gather_reference(
    tokens: np.ndarray,
    tables: tuple[np.ndarray, np.ndarray, np.ndarray],
    starts: np.ndarray,
    length: int,
    extra: int,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The reference of the compiled gather.

    tokens: the ids [total] in the `.bin`; tables: (lengths, offsets, document_index); starts: int64 [b, 2],
    rows of the sample index. Returns tokens and labels, int64 [b, length] each, and the lowest and highest
    id. With extra 0 the last label is 0.
    """
    lengths, offsets, documents = tables
    text = np.zeros((len(starts), length + 1), dtype=np.int64)
    for row, (position, offset) in enumerate(starts.tolist()):
        done = 0
        while done < length + extra:
            document = documents[position]
            begin = int(offsets[document]) // tokens.itemsize + offset
            count = min(int(lengths[document]) - offset, length + extra - done)
            text[row, done : done + count] = tokens[begin : begin + count]
            done, position, offset = done + count, position + 1, 0
    read = text[:, : length + extra]
    lowest, highest = (int(read.min()), int(read.max())) if read.size else (0, 0)
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:]), lowest, highest
