"""`MegatronReader`: a checkpoint of Megatron-LM or Megatron-DeepSpeed, seen as megazero's logical tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from megazero.checkpoint.naming import TensorLink
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.megatron.dialects import WORD, Arguments
from megazero.formats.megatron.dist_stages import DistStages
from megazero.formats.megatron.folder import CheckpointForm, find_files
from megazero.formats.megatron.inventory import IN_USE, Inventory, SavedTensor, check, take_inventories
from megazero.formats.megatron.masked import family_settings
from megazero.formats.megatron.names import VERSIONS, ShardedRule, links_of, rules
from megazero.formats.megatron.rank_optimizer import MOMENTS
from megazero.formats.megatron.settings import read_settings
from megazero.formats.megatron.stages import Header, Opened, RankStages
from megazero.formats.megatron.tokenizer import entries, tokenizer_said
from megazero.formats.megatron.universal import UniversalStages
from megazero.spec.resolve import model_spec


@dataclass(frozen=True)
class ImportOptions:
    """The user's choices for an import.

    Attributes:
        trust_pickle: whether the files may be unpickled at all.
        vocab_size: entries before padding; None takes the number in the checkpoint or the tokenizer.
        arguments: Megatron's arguments, which replace those in the checkpoint or add to them.
        average_replicas: whether to average copies that differ between tensor-parallel ranks.
        inert: classes whose objects in the files are not needed, by full name.
        with_optimizer: whether to read masters, moments and progress too, so that the run can resume.
        tokenizer: the tokenizer; None takes the one in Megatron's arguments, if its files exist.
    """

    trust_pickle: bool = False
    vocab_size: int | None = None
    arguments: Arguments = field(default_factory=dict)
    average_replicas: bool = False
    inert: tuple[str, ...] = ()
    with_optimizer: bool = False
    tokenizer: TokenizerConfig | None = None


@dataclass(frozen=True)
class _Contribution:
    """A saved tensor, the rule that says how ranks split it, and its link to a logical tensor."""

    sliced: ShardedRule
    link: TensorLink
    saved: SavedTensor


class MegatronReader:
    """The weights of a GPT or BERT saved on any parallel layout; a `Source`.

    Files are memory-mapped, so only tensors that are read are loaded. Files from before torch 1.6 cannot be
    mapped; they are loaded whole, one stage at a time.

    Args:
        source: a run's folder, whose newest checkpoint is taken, or one checkpoint's folder.
        options: the user's choices.

    Attributes:
        files: the checkpoint's files.
        iteration: the iteration after which it was saved, or None.
        checkpoint_version: Megatron's version, which determines the order of queries, keys and values.
        model: the model, with the vocabulary.
        padded_vocab_size: rows of the embedding in the files.
        tokenizer: the tokenizer that the model was trained with; None if it is unknown.
        shapes: logical tensor -> its shape, in the order of the files.

    Raises:
        ConfigError: `options` do not allow to unpickle.
        CheckpointError: the form or the model is not supported.
        DamagedCheckpointError: a file cannot be read.
    """

    def __init__(self, source: str | Path, options: ImportOptions):
        if not options.trust_pickle:
            raise ConfigError(
                f"`--trust-pickle` must be given to read {source}: Megatron's checkpoints are pickles, which "
                f"can name any function to be called. Only those that make tensors are called; still, give "
                f"the flag only if you trust whoever wrote the files"
            )
        self.options = options
        self._average = options.average_replicas
        files = find_files(Path(source))
        opened: RankStages | DistStages | UniversalStages
        if files.form is CheckpointForm.DISTRIBUTED:
            opened = DistStages(files, options.inert)
        elif files.form is CheckpointForm.UNIVERSAL:
            opened = UniversalStages(files, options.inert)
        else:
            opened = RankStages(files, options.inert, with_optimizer=options.with_optimizer)
        self._stages: Opened = opened
        self.files = opened.files
        inventories = take_inventories(opened) if isinstance(opened, RankStages) else opened.inventories
        inventory = inventories.get(IN_USE, {})
        header = self._agreed_header()
        self.iteration, self.checkpoint_version = header.iteration, header.version
        if header.arguments is None and not options.arguments:
            raise CheckpointError(
                f"`{self.files.ranks[0]}` must hold Megatron's `args`, but does not; give those of the "
                f"model as a JSON file with --megatron-args"
            )
        self.arguments: Arguments = {**(header.arguments or {}), **options.arguments}
        self.header, arguments = header, self.arguments
        self._check_ranks(arguments)
        core = not any(tensor.saved.name.startswith("language_model.") for tensor in inventory.values())
        family = family_settings(inventory, arguments)
        settings = read_settings(arguments, family=family, core=core, names=inventory.keys())
        if settings.model.num_layers > len(inventory):  # checked before a table of names is made of them
            raise CheckpointError(
                f"`num_layers` must fit the {len(inventory)} tensors in `{self.files.folder}`, but "
                f"Megatron's arguments say {settings.model.num_layers}; correct them with --megatron-args"
            )
        self.padded_vocab_size = _rows(inventory)
        self.tokenizer = options.tokenizer or tokenizer_said(arguments, self.files.folder)
        sizes = (options.vocab_size, header.original_vocab_size, settings.vocab_size)
        said = next((size for size in sizes if size is not None), None)
        size = self._checked(entries(self.tokenizer) if said is None else said)
        self.model = settings.model.model_copy(update={"vocab_size": size})
        links = {
            name: (sliced.fitted(link, inventory[name].shapes) if name in inventory else sliced, link)
            for name, (sliced, link) in links_of(
                rules(self.checkpoint_version), model_spec(self.model), size
            ).items()
        }
        check(inventory, links, self._stages, average_replicas=self._average)
        pieces: dict[Key, list[_Contribution]] = defaultdict(list)
        for kind, records in self._wanted(inventories, links).items():
            for name, (sliced, link) in links.items():
                if kind != WEIGHT != link.key.kind:
                    continue  # only weights have masters and moments
                saved = records[name].saved
                key = link.key if kind == WEIGHT else Key(link.key.name, kind)
                pieces[key].append(_Contribution(sliced, link, saved))
        # In the order of stages, because only one stage is open at a time.
        by_stage = sorted(pieces.items(), key=lambda item: item[1][0].saved.stage)
        self._pieces: Mapping[Key, list[_Contribution]] = MappingProxyType(dict(by_stage))
        self.shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType(
            {key: pieces[0].link.shape for key, pieces in by_stage}
        )

    def __enter__(self) -> MegatronReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stages.close()

    def model_settings(self) -> dict[str, object]:
        """The fields of `ModelConfig`, as JSON."""
        return self.model.model_dump(mode="json")

    @torch.no_grad()
    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        todo = [(part, piece) for part in parts for piece in self._pieces[part.key]]
        for part, piece in sorted(todo, key=lambda item: item[1].saved.stage):
            sliced, link = piece.sliced, piece.link
            assert part.shape == link.shape, f"{part.key} has shape {link.shape}, not {part.shape}"
            if link.box.overlap(part.box) is None:
                continue
            theirs = piece.saved.tensors(self._stages)
            if sliced.letter is None:
                theirs = (torch.stack([x.float() for x in theirs]).mean(0) if self._average else theirs[0],)
            boxes = sliced.boxes(link, len(theirs), theirs[0].shape[0])
            for tensor, box in zip(theirs, boxes, strict=True):
                shared = box.overlap(part.box)
                if shared is not None:
                    rows = tensor[: box.shape[0]] if sliced.letter == "v" else tensor
                    ours = link.as_ours(rows.contiguous(), box)
                    part.tensor[shared.within(part.box)].copy_(ours[shared.within(box)])

    def _wanted(
        self, inventories: Mapping[str, Inventory], links: Mapping[str, tuple[ShardedRule, TensorLink]]
    ) -> Mapping[str, Inventory]:
        """The tensors to read, by our kinds: weights (masters where there are some) and moments."""
        in_use = inventories[IN_USE]
        if not self.options.with_optimizer:
            return {WEIGHT: in_use}
        kinds = {WEIGHT: {**in_use, **inventories.get(WEIGHT, {})}}
        for kind in (*MOMENTS, *(inventories.keys() - {IN_USE, WEIGHT, *MOMENTS})):
            kinds[kind] = {**in_use, **inventories.get(kind, {})}
        lacking = {
            f"{kind} of {name}"
            for kind in (*MOMENTS, WEIGHT)
            for name, (_, link) in links.items()
            if link.key.kind == WEIGHT
            and name not in inventories.get(kind, {})
            # fp32 weights are their own masters.
            and (kind != WEIGHT or in_use[name].dtypes[0] not in (torch.float32, torch.float64))
        }
        further = kinds.keys() - {WEIGHT, *MOMENTS}
        if lacking or further:
            has = f"has {', '.join(sorted(further))}" if further else f"lacks {min(lacking)}"
            named, remedy = "of all weights", "copy all files"
            if self.files.form is CheckpointForm.DISTRIBUTED:
                named = "by names of weights"
                remedy = "save it with Megatron-LM's --dist-ckpt-optim-fully-reshardable"
            raise CheckpointError(
                f"`{self.files.folder}` must hold Adam's two moments and masters {named}, but {has}; "
                f"{remedy}, or import without --with-optimizer"
            )
        misshaped = {
            f"{kind} of {name}"
            for kind in (WEIGHT, *MOMENTS)
            for name in links
            if (record := kinds[kind][name]).shapes != in_use[name].shapes
            or not record.dtypes[0].is_floating_point
            or (links[name][0].letter is None and record.difference != 0.0 and not self._average)
        }
        if misshaped:
            raise CheckpointError(
                f"`{self.files.folder}` must hold masters and moments as floats in the shapes of their "
                f"weights, alike where ranks have copies, but holds {min(misshaped)} otherwise; copy all"
            )
        return kinds

    def _agreed_header(self) -> Header:
        """The first rank's header; raises unless all ranks have the same iteration and version."""
        folder, paths = self.files.folder, self.files.ranks
        headers = [self._stages.headers[path] for path in paths]
        for what in ("iteration", "version"):
            values = [getattr(header, what) for header in headers]
            if len(set(values)) > 1:
                pairs = zip(values, paths, strict=True)
                places = ", ".join(f"{value} in {path.relative_to(folder)}" for value, path in pairs)
                raise CheckpointError(
                    f"`{folder}` must be of one {what}, but its ranks are of {places[:400]}; copy all "
                    f"ranks of one checkpoint"
                )
        if headers[0].version not in VERSIONS:
            raise CheckpointError(
                f"`{folder}` must be of checkpoint version {', '.join(map(str, VERSIONS))}, but is of "
                f"{headers[0].version}; save it with a version of Megatron that writes one of these"
            )
        return headers[0]

    def _check_ranks(self, arguments: Arguments) -> None:
        """Refuse missing files by the sizes in the arguments; a missing last rank leaves no gap in names."""
        files = self.files
        if files.form in (CheckpointForm.DISTRIBUTED, CheckpointForm.UNIVERSAL):
            return
        experts = 1 + max(map(len, files.experts.values()), default=0)
        ranks = arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")
        ranks = ranks if isinstance(ranks, int) else files.tensor_ranks
        stages = (
            1 if files.form is CheckpointForm.DEEPSPEED else arguments.get("pipeline_model_parallel_size")
        )
        stages = stages if isinstance(stages, int) else len(files.ranks) // ranks // experts
        if (files.tensor_ranks, len(files.ranks)) != (ranks, ranks * stages * experts):
            raise CheckpointError(
                f"`{files.folder}` must have the files of {ranks} tensor-parallel ranks in {stages} stages, "
                f"but has {len(files.ranks)} files of {files.tensor_ranks} tensor-parallel ranks; copy all"
            )

    def _checked(self, size: int | None) -> int:
        if size is None:
            raise CheckpointError(
                f"the tokenizer of {self.files.folder} must be known, as it says how many of the "
                f"{self.padded_vocab_size} rows of the embedding are not padding, but its files are not "
                f"where they were; name them with --tokenizer-type and its files, or give --vocab-size"
            )
        if not 0 < size <= self.padded_vocab_size:
            raise CheckpointError(
                f"`--vocab-size` must be from 1 to the {self.padded_vocab_size} rows of the embedding, but "
                f"is {size}; give the tokenizer's size"
            )
        return size


def _rows(inventory: Inventory) -> int:
    if WORD not in inventory or not all(inventory[WORD].shapes):
        raise CheckpointError(
            f"the checkpoint must hold {WORD} or its equivalent, but does not; copy all ranks"
        )
    return sum(shape[0] for shape in inventory[WORD].shapes)


_: type[Source] = MegatronReader
