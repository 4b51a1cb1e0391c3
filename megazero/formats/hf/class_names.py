"""The names of a classifier's classes: ``id2label`` and ``label2id`` in ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.formats.hf.architecture import Json, JsonObject

COUNT = "num_labels"
_NAMES = "id2label"
_DEFAULT_COUNT = 2


def names_of(config: Json) -> tuple[str, ...]:
    """The names of classes 0, 1, ...; empty if they have none.

    Raises:
        ValueError: ``id2label`` does not map 0, 1, ... to different names that can be encoded.
    """
    named = config.get(_NAMES)
    if named is None:
        return ()
    if not isinstance(named, dict) or not named.keys() == {str(number) for number in range(len(named))}:
        raise ValueError(f"`{_NAMES}` must name the classes 0, 1, ..., but is {named!r:.100}")
    names = tuple(named[str(number)] for number in range(len(named)))
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"`{_NAMES}` must give each class a name of its own, but is {named!r:.100}")
    if any("\ud800" <= char <= "\udfff" for char in "".join(names)):
        raise ValueError(f"`{_NAMES}` must be text that can be written, but is {named!a:.100}")
    return names


def naming(names: Sequence[str]) -> JsonObject:
    """The fields ``id2label`` and ``label2id`` for these names."""
    return {
        _NAMES: {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def with_count(config: Json) -> JsonObject:
    """Add ``num_labels``, which `save_pretrained` leaves to the names.

    Raises:
        ValueError: the names contradict a number that is given.
    """
    names, purpose = names_of(config), "problem_type"
    count = config.get(COUNT, len(names) or _DEFAULT_COUNT)
    if names and count != len(names):
        raise ValueError(f"`{COUNT}` must be {len(names)} as in `{_NAMES}`, but is {count!r:.40}")
    out = {**config, COUNT: count}
    if out.get(purpose) is None:  # transformers then decides by the labels of the first batch
        out.pop(purpose, None)
    return out


def with_default_names(config: Json) -> JsonObject:
    """Replace ``num_labels`` by transformers' default names, the inverse of `with_count`."""
    out = dict(config)
    count = out.pop(COUNT)
    return {**out, **naming([f"LABEL_{number}" for number in range(count)])}
