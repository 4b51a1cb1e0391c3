"""Flags of Megatron-LM whose meaning depends on others: layers on stages, and batches of evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_STAGES = "--pipeline-model-parallel-size"
_LAYERS = "--num-layers"
_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
_FIRST = ("--decoder-first-pipeline-num-layers", "--num-layers-in-first-pipeline-stage")
_LAST = ("--decoder-last-pipeline-num-layers", "--num-layers-in-last-pipeline-stage")
_EMBEDDING, _LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"

FlagValues = Mapping[str, Sequence[str]]
"""Every flag of a line -> its values."""


def of_layout(layout: str, given: FlagValues) -> list[str]:
    """The arguments for a layout such as ``Et*3|(tt|)*29m|L``: E is the embedding, t a layer, L the loss.

    Raises ValueError for another text, and for a stage without a layer.
    """
    text = layout.replace(",", "").replace("'", "").replace('"', "")
    while (written := re.sub(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d+)", _repeated, text)) != text:
        text = written
    if re.fullmatch(r"[EtmL|]+", text) is None:
        raise ValueError(f"a layout is made of E, t, m, L, | and repetitions, but this is `{text}`")
    return _partition([stage.count("t") for stage in text.split("|")], given)


def _repeated(match: re.Match[str]) -> str:
    return (match[1] if match[2] is None else match[2]) * int(match[3])


def of_ends(given: FlagValues) -> list[str]:
    """The arguments for flags that give the first or the last stage another number of layers.

    Raises ValueError if the layers do not come out even, or if there are several chunks on a stage.
    """
    if any(flag in given for flag in _CHUNKS):
        raise ValueError(
            "with several chunks on a stage, write the layers of each with `--pipeline-partition`"
        )
    stages, layers = _number(given, (_STAGES,)) or 1, _number(given, (_LAYERS,)) or 0
    first, last = _number(given, _FIRST), _number(given, _LAST)
    if first is None and last is None:
        counted, rest = (
            (_EMBEDDING in given, _LOSS in given),
            (layers + (_EMBEDDING in given) + (_LOSS in given)),
        )
        share, left = divmod(rest, stages)
        counts = [share] * stages
        counts[0] -= counted[0]
        counts[-1] -= counted[1]
    else:
        inner = stages - (first is not None) - (last is not None)
        share, left = divmod(layers - (first or 0) - (last or 0), max(1, inner))
        counts = [
            *([first] if first is not None else []),
            *[share] * inner,
            *([last] if last is not None else []),
        ]
    if left or sum(counts) != layers:
        raise ValueError(
            f"{layers} layers do not come out even over {stages} stages; use `--pipeline-partition`"
        )
    return _partition(counts, given)


def of_split(rank: int, given: FlagValues) -> list[str]:
    """The arguments where the stages before this one have T5's encoder, and the others its decoder.

    Both Megatrons read the flag for a T5 on several stages alone; for other models there are no arguments.
    Raises ValueError if a stack has no stage, or its layers do not come out even over its stages.
    """
    stages = _number(given, (_STAGES,)) or 1
    if stages == 1 or given.get("--model-family") != ["t5"]:
        return []
    counts: list[int] = []
    for stack, on in (("--encoder-num-layers", rank), ("--decoder-num-layers", stages - rank)):
        layers = _number(given, (stack, _LAYERS)) or 0
        if on < 1 or layers % on:
            raise ValueError(
                f"{layers} layers do not come out even over {on} stages; use `--pipeline-partition`"
            )
        counts += [layers // on] * on
    return _partition(counts, given)


def of_evaluations(size: int, given: FlagValues) -> list[str]:
    """No arguments where evaluations have the training's batch size, as they do here.

    Raises ValueError for another size, with the number of batches that have as many samples here.
    """
    batch, evaluations = _number(given, ("--global-batch-size",)), _number(given, ("--eval-iters",)) or 100
    if batch == size:
        return []
    same = "--eval-iters N"
    if batch and size * evaluations % batch == 0:
        same = f"--eval-iters {size * evaluations // batch}"
    raise ValueError(
        f"an evaluation has batches of `--global-batch-size` samples; for as many samples leave it out and "
        f"give `{same}`"
    )


def _number(given: FlagValues, names: Sequence[str]) -> int | None:
    return next((int(given[name][0]) for name in names if given.get(name)), None)


def _partition(counts: Sequence[int], given: FlagValues) -> list[str]:
    stages = _number(given, (_STAGES,)) or 1
    if min(counts) < 1:
        raise ValueError(
            "every stage must have a layer; give its neighbours fewer, with `--pipeline-partition`"
        )
    if len(counts) % stages:
        raise ValueError(f"{len(counts)} parts cannot be dealt over {stages} stages")
    chunks = len(counts) // stages
    virtual = [_CHUNKS[0], str(chunks)] if chunks > 1 and not any(flag in given for flag in _CHUNKS) else []
    return ["--pipeline-partition", ",".join(map(str, counts)), *virtual]
