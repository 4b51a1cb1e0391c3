"""A checkpoint's record of the data it was trained on, compared before a run goes on."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.data.blended import SampleDataset
from megazero.data.sources import contents
from megazero.errors import DataError
from megazero.mpu import ParallelContext, gather_values
from megazero.train.state_json import DataFacts


def data_record(dataset: SampleDataset | None, context: ParallelContext) -> list[DataFacts] | None:
    """The record of the training data, as the first rank has it; None without data. Every rank calls this.

    Other ranks may have copies elsewhere, and must still come to the same verdict.
    """
    if dataset is None:
        return None
    mine = contents(dataset) if context.rank == 0 else []
    return [DataFacts(**facts) for facts in gather_values(context.world, mine, context.device)[0]]


def compare_data(
    before: Sequence[DataFacts] | None, now: Sequence[DataFacts] | None, changes_pass: bool
) -> tuple[str, ...]:
    """Return remarks on how the data now differ from those that the steps before were trained on.

    Args:
        before: the checkpoint's record.
        now: the run's; where either is None, nothing is compared.
        changes_pass: whether a changed file is a remark and not an error.

    Raises:
        DataError: a file of the same path holds something else now; names all such files.
    """
    if before is None or now is None:
        return ()
    known = {data.prefix: data for data in before}
    same = {data.prefix for data in now} & {*known}
    changed = [file for data in now if data.prefix in same for file in _differing(known[data.prefix], data)]
    if changed and not changes_pass:
        raise DataError(
            f"`{'`, `'.join(changed)}` must hold what the checkpoint was trained on, but was changed since; "
            "put it back, give other data under another path, or go on with --no-verify-data"
        )
    remarks = [f"{file} is not what the checkpoint was trained on" for file in changed]
    left = [data for data in before if data.prefix not in same]
    for data in now:
        if data.prefix in same:
            continue
        copies = [other for other in left if not _differing(other, data)]
        if copies:
            remarks.append(f"{data.prefix} holds the data that were {copies[0].prefix} before")
            left.remove(copies[0])
        else:
            remarks.append(f"{data.prefix} is trained on from here, and was not before the checkpoint")
    remarks += [f"{data.prefix} was trained on before the checkpoint, and is no longer" for data in left]
    return tuple(remarks)


def _differing(before: DataFacts, now: DataFacts) -> list[str]:
    """The files of `now` that hold something else than those of `before`, as far as the hashes tell."""
    sums_differ = None not in (before.blocks, now.blocks) and before.blocks != now.blocks
    differ = {"idx": before.idx != now.idx, "bin": before.bin != now.bin or sums_differ}
    return [f"{now.prefix}.{suffix}" for suffix, differs in differ.items() if differs]
