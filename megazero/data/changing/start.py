"""The datasets of a run whose training blend may change: at its beginning, and where it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megazero.config.compat.blends import MARK, expanded, prefix_of
from megazero.config.tree.config import Config
from megazero.data.blended import BlendedDataset, parse_blend
from megazero.data.build import Datasets, Sizes, planned_samples
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.file import Written, read_blend
from megazero.data.changing.history import History, Segment, Share
from megazero.data.changing.library import Build, Library
from megazero.data.sources import sources
from megazero.errors import DataError


@dataclass(frozen=True)
class Before:
    """The blend in a checkpoint: its history, if it has one, and the samples consumed."""

    history: History | None = None
    position: int = 0


BEGINNING = Before()
"""A training that begins."""


def blend_file(config: Config) -> Path | None:
    """The file with the training's blend; None if the blend is not given by a file."""
    named = config.data.train_data_path or config.data.data_path
    return Path(named[0].removeprefix(MARK)) if len(named) == 1 and named[0].startswith(MARK) else None


def changing_datasets(
    config: Config, sizes: Sizes, build: Build, vocab_size: int, before: Before
) -> Datasets:
    """The three splits, with a `ChangingBlend` for training if its blend may change or has changed.

    It may if its weights and sources are in a file, and its order is that of an index.
    """
    data, file = config.data, blend_file(config)
    named = data.train_data_path or data.data_path
    fixed = data.dataloader_type != "single" or config.data_sampling.curriculum_metrics or data.t5_columns
    if not sizes[0] or not named or fixed:
        return build(config, sizes)
    if before.history is not None and before.position:
        library = Library(config, build, vocab_size, words_of(before.history.segments[0].shares))
        return _continued(library, sizes, before, named, file)
    if file is None:
        return build(config, sizes)
    written = read_blend(file)
    return _begun(Library(config, build, vocab_size, written.words), sizes, sizes[0], written)


def words_of(shares: tuple[Share, ...]) -> tuple[str, ...]:
    """A blend as the words of a data path."""
    return tuple(word for share in shares for word in (repr(share.weight), share.path))


def _begun(library: Library, sizes: Sizes, samples: int, written: Written) -> Datasets:
    """The datasets of a new training."""
    train, valid, test = library.build(written.words, sizes)
    if not isinstance(train, BlendedDataset) or parse_blend(written.words)[0][0] is None:
        return train, valid, test
    shares = library.shares(written.words, opened=sources(train))
    if len(shares) != len(train.datasets):  # copies of one dataset, which count apart here
        return train, valid, test
    planned = planned_samples([share.weight for share in shares], samples)[1]
    by_source = {share.source: n for share, n in zip(shares, planned, strict=True)}
    first = Segment(start=0, shares=shares, origin=written.origin)
    history = History(samples=samples, planned=by_source, segments=(first,))
    return ChangingBlend(history, library, len(train), first=train, words=written.words), valid, test


def _continued(
    library: Library, sizes: Sizes, before: Before, named: tuple[str, ...], file: Path | None
) -> Datasets:
    """The datasets of a training with a history, which ends with the blend that is asked for now."""
    history, at = before.history, before.position
    assert history is not None, "it has a history"
    last = history.segments[-1]
    words: tuple[str, ...] = ()
    shares, origin = last.shares, None
    try:
        if file is None:
            words = expanded(named, "train")
        else:
            written = read_blend(file)
            words, origin = written.words, written.origin
        shares = library.shares(words, history.sources)
    except DataError:
        if file is None:
            raise
        words = ()  # the run goes on with the blend that it had, and says so
    paths = {share.source: share.path for share in shares}
    history = history.model_copy(update={"segments": tuple(s.moved(paths) for s in history.segments)})
    first, unedited = history.segments[0], len(history.segments) == 1 and last.mixes(shares)
    # Validation keeps the blend with which the training began.
    gone = [] if unedited or not library.shared else [s.path for s in first.shares if not _is_there(s)]
    kept = tuple(share for share in first.shares if share.path not in gone)
    evaluated = sizes[1:] if kept else (0, 0)
    train, valid, test = library.build(words_of(kept), (history.samples if unedited else 0, *evaluated))
    planned = planned_samples([share.weight for share in first.shares], history.samples)[0]
    begun = train if isinstance(train, BlendedDataset) else None
    blend = ChangingBlend(history, library, max(sizes[0] or 0, sum(planned)), at, begun, words)
    if not last.mixes(shares):
        try:
            blend.use(blend.edited(shares, at, origin), words)
        except DataError:
            if file is None:
                raise
            blend.words = ()
    if gone and any(sizes[1:]):
        blend.remarks = (f"warning: validation goes on without {', '.join(gone)}, whose files are gone",)
    return blend, valid, test


def _is_there(share: Share) -> bool:
    return all(Path(f"{prefix_of(share.path)}{suffix}").is_file() for suffix in (".idx", ".bin"))
