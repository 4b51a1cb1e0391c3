"""Initial weights from a Hugging Face model or a pretrained checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from megazero.checkpoint.part import ROUTER, WEIGHT, Key, Part, Source
from megazero.checkpoint.saver import together
from megazero.checkpoint.shards import parts_to_read, state_keys
from megazero.checkpoint.upcycling import Upcycled, dense_model, router_names
from megazero.config.tree.config import Config
from megazero.config.tree.sparse import SPARSE_FIELDS
from megazero.formats.hf.config_json import Description
from megazero.formats.hf.reader import HFReader
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values
from megazero.spec.resolve import model_spec
from megazero.train.resume.fit import check_tensors
from megazero.train.step.engine import Engine

Opener = Callable[[], AbstractContextManager[Source]]


def take_foreign_weights(
    config: Config, context: ParallelContext, vocab_size: int, engine: Engine
) -> tuple[str, ...]:
    """Load the weights of `--load-hf`, if it is set; every rank calls this.

    With `--moe-use-upcycling` it must be a dense model; experts become copies of its MLPs.

    Returns:
        Remarks for a person.

    Raises:
        CheckpointError: on every rank: it is another model, or cannot be read.
    """
    path, begins, model = config.checkpoint.load_hf, config.checkpoint.moe_use_upcycling, config.model
    if path is None:
        return ()
    folder = config.data.object_cache.model_folder(path, weights=True)
    remarks = [f"began experts from the dense model {path}" if begins else f"took the weights from {path}"]

    @contextmanager
    def opened() -> Iterator[Source]:
        wanted = dense_model(model) if begins else model
        with HFReader.for_model(folder, wanted, vocab_size, SPARSE_FIELDS) as reader:
            remarks.extend(() if begins else reader.remarks)
            yield Upcycled(reader, model_spec(model)) if begins else reader

    own, spare = (router_names(model_spec(model)), ()) if begins else ((), None)
    take_weights(engine, context, path, opened, own=own, spare=spare)
    return tuple(remarks)


def origin_of(config: Config) -> dict[str, object] | None:
    """The record in checkpoints of a Hugging Face model's weights: its class and dtype."""
    path = config.checkpoint.load_hf
    if path is None:
        return None
    description = Description.read(Path(config.data.object_cache.model_folder(path)))
    return {"architecture": description.architecture.name, "dtype": description.dtype}


def take_weights(
    engine: Engine,
    context: ParallelContext,
    path: str,
    opener: Opener,
    *,
    own: tuple[str, ...] = (),
    spare: tuple[str, ...] | None = None,
    without: tuple[str, ...] = (),
) -> tuple[list[str], list[str]]:
    """Load weights, and routers' loads and biases if there are any, from a source; every rank calls this.

    Args:
        engine: a new engine with initial weights.
        path: the source's name in messages.
        opener: opens the source.
        own: name prefixes of weights that may be missing; these keep their initial values.
        spare: name prefixes of weights of the source that may remain unused; None for all.
        without: name prefixes of weights of the source that are not loaded.

    Returns:
        The sorted names of weights that kept their initial values, and of weights that were not used.

    Raises:
        CheckpointError: on every rank: weights are missing, have another shape, or are unused.
    """
    own_names = sorted(key.name for key in state_keys(engine.optimizer) if key.kind == WEIGHT)
    asked = {name for names in gather_values(context.model, own_names, context.device) for name in names}
    kept: list[str] = []
    unused: list[str] = []

    def read() -> None:
        with opener() as source:
            stored = {key.name for key in source.shapes if key.kind == WEIGHT}
            loadable = {name for name in stored if not name.startswith(without)}
            kept.extend(sorted(name for name in asked - loadable if name.startswith(own)))
            unused.extend(sorted(stored - (asked & loadable)))
            allowed = () if spare is None else (*spare, *without)
            surplus = [name for name in unused if spare is not None and not name.startswith(allowed)]
            parts = [
                part
                for part in parts_to_read(engine.optimizer, context, moments=False)
                if part.key.name not in kept
            ]
            biases = [(Key(name, ROUTER), tensor) for name, tensor in engine.loads.state().items()]
            parts += [Part.whole(key, tensor) for key, tensor in biases if key in source.shapes]
            check_tensors(source, parts, path, surplus)
            source.read(parts)

    together(context, read, f"load {path}")
    engine.optimizer.publish()
    return kept, unused
