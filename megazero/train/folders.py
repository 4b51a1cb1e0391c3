"""Reads the description of the model in a folder: a run's checkpoints, or a Hugging Face folder.

Pretraining, fine-tuning and all commands about a training use this one function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.config.stated import Stated
from megazero.config.tree.finetune import OF_WORDS
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import DamagedCheckpointError
from megazero.storage.cached import Cache
from megazero.storage.urls import is_url

if TYPE_CHECKING:
    from megazero.train.resume.saved import SavedModel


def read_folder(given: Mapping[str, Any]) -> Stated | None:
    """Read the model's description from the folder of a training's initial weights (a `Reader`).

    The folder is that of the newest checkpoint in `--load`, else `--pretrained-checkpoint`, else `--load-hf`.

    Args:
        given: path of a setting of the training -> value.

    Raises:
        CheckpointError: the folder is another system's, or does not describe its model.
    """
    load, pretrained = given.get("checkpoint.load"), given.get("finetune.pretrained_checkpoint")
    folder = given.get("checkpoint.load_hf")
    # These functions import torch, which takes seconds, so they are called only if there is a folder.
    stated = _checkpoint(load, given.get("checkpoint.ckpt_step"), given) if load else None
    stated = stated or (_checkpoint(pretrained, None, given) if pretrained else None)
    stated = stated or (_hugging_face(folder, given) if folder else None)
    if stated is None or given.get("finetune.task") in (None, *OF_WORDS):
        return stated
    from megazero.train.resume.fit import OF_THE_HEAD

    return replace(
        stated,
        silent=stated.silent | OF_THE_HEAD,
        differences=lambda model: [row for row in stated.differences(model) if row[0] not in OF_THE_HEAD],
    )


def _checkpoint(path: str, step: int | None, given: Mapping[str, object]) -> Stated | None:
    """Read the description in the newest intact checkpoint; None without a checkpoint."""
    from megazero.checkpoint.folder import Candidates, candidates
    from megazero.checkpoint.locate import is_checkpoint
    from megazero.checkpoint.remote.mirror import local_folder
    from megazero.train.resume.facts import PRETRAINING
    from megazero.train.resume.saved import read_saved_model

    whole = local_folder(path)
    single = step is None and whole.is_dir() and is_checkpoint(whole)
    listed = Candidates((whole,)) if single else candidates(whole, step)
    for folder in listed.folders:
        try:
            facts = listed.facts(folder)
            saved = read_saved_model(facts, folder)
        except DamagedCheckpointError:
            continue  # the run will skip it, too, and report it
        continues = facts.get("kind") == PRETRAINING and not given.get("checkpoint.finetune")
        return described_by(saved, given, anew=not continues)
    return None


def described_by(saved: SavedModel, given: Mapping[str, object], *, anew: bool) -> Stated:
    """The settings that a checkpoint states (path -> value); `anew` if they do not continue its training."""
    from megazero.checkpoint.upcycling import dense_model
    from megazero.config.derive import FREE_MODEL_FIELDS
    from megazero.train.resume.fit import ROTARY_FIELDS, free_to_begin, unlike

    model, extends = saved.settings, bool(given.get("checkpoint.extend_context"))
    free = FREE_MODEL_FIELDS | free_to_begin(saved, anew) | (ROTARY_FIELDS if extends else frozenset())
    begins = bool(given.get("checkpoint.moe_use_upcycling")) and not model.num_experts
    length = given.get("model.seq_length")
    if isinstance(length, int) and length < model.seq_length:
        # Shorter sequences leave the table of positions as long as it is.
        model = model.model_copy(update={"max_position_embeddings": model.positions})
    return Stated(
        str(saved.place),
        model,
        saved.tokenizer(),
        frozenset({"max_position_embeddings"} if extends else ()),
        lambda wanted: unlike(saved, dense_model(wanted) if begins else wanted, free),
    )


def _hugging_face(path: str, given: Mapping[str, Any]) -> Stated:
    from megazero.checkpoint.upcycling import dense_model
    from megazero.config.tree.sparse import SPARSE_FIELDS
    from megazero.formats.hf.architecture import as_told
    from megazero.formats.hf.config_json import CONFIG, Description, unlike
    from megazero.formats.hf.reader import HFReader
    from megazero.formats.hf.tokenizer_files import tokenizer_settings

    cache = Cache(given.get("data.object_storage_cache_path"))
    folder = Path(cache.model_folder(path))
    description = Description.read(folder)
    if description.architecture.seen is not as_told:
        with HFReader(cache.model_folder(path, weights=True)) as reader:
            description = reader.description
    begins = bool(given.get("checkpoint.moe_use_upcycling"))

    def differences(wanted: ModelConfig) -> list[tuple[str, object, object]]:
        rows = unlike(description.model, dense_model(wanted) if begins else wanted, SPARSE_FIELDS)
        if wanted.vocab_size is not None and wanted.vocab_size != description.vocab_size:
            rows.append(("vocab_size", description.vocab_size, wanted.vocab_size))
        return rows

    tokenizer = tokenizer_settings(folder, description.vocab_size)
    if is_url(path):  # other hosts have copies of their own
        tokenizer = {
            name: str(value).replace(str(folder.resolve()), path) for name, value in tokenizer.items()
        }
    return Stated(
        f"{path}/{CONFIG}" if is_url(path) else str(folder / CONFIG),
        description.model.model_copy(update={"vocab_size": description.vocab_size}),
        TokenizerConfig(**tokenizer),
        frozenset({"seq_length"}),  # the folder's is the model's maximum, too long to train on most machines
        differences,
    )
