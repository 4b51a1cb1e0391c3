"""`HFReader`: a local Hugging Face model, seen as megazero's logical tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import Table, TensorLink, TensorRule, cut
from megazero.checkpoint.part import Key, Part, Source
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.coded import CodedTensor, decoded, read_codes
from megazero.formats.hf.config_json import CONFIG, Description, differences
from megazero.formats.hf.folder import FLOATS, StoredTensor, TensorFolder, named
from megazero.formats.hf.packed import QuantizedWeight
from megazero.spec.resolve import model_spec

CHUNK = 1 << 18
"""Elements that are read at a time: few enough that a transpose stays within the cache."""


class HFReader(Source):
    """A folder that `save_pretrained` wrote, as a `Source` of weights; nothing in it is unpickled.

    `read` holds `CHUNK` elements besides the destination. Use it from one thread at a time.

    Attributes:
        folder: the folder.
        description: the model in ``config.json``.
        table: the links between megazero's tensors and transformers'.
        shapes: logical tensor -> its shape.
        remarks: the tensors that were left out, in words.

    Raises:
        CheckpointError: the model is not supported, or the files do not hold exactly its tensors; names file
            and field, or the tensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.description = Description.read(self.folder)
        self._tensors = TensorFolder(self.folder)
        try:
            # Checked before a table of them is made: a hostile config.json may name billions of layers.
            layers, tensors = self.description.model.num_layers, len(self._tensors.tensors)
            if layers > tensors:
                raise self._misfit(f"{layers} layers cannot be in {tensors} tensors")
            present, self.remarks = self._named_as_today()
            try:
                self.description = self.description.given(present)
            except ValueError as error:
                raise self._misfit(str(error)) from None
            rules = self.description.architecture.rules_for(present)
            self._check_experts(rules, tensors)
            self.table = self._table(rules)
            self._stored = self._match(present)
        except BaseException:
            self.close()
            raise

    @classmethod
    def for_model(
        cls, folder: str | Path, model: ModelConfig, vocab_size: int, free: Set[str] = frozenset()
    ) -> HFReader:
        """Open a folder that must fit a model; see `check_model`.

        Raises:
            CheckpointError: the folder does not fit, or cannot be read.
        """
        reader = cls(folder)
        try:
            reader.check_model(model, vocab_size, free)
        except BaseException:
            reader.close()
            raise
        return reader

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Logical tensor -> its shape."""
        return self.table.shapes

    def model_settings(self) -> dict[str, object]:
        """The fields of `ModelConfig` for this model, with `vocab_size`."""
        return {**self.description.model.model_dump(), "vocab_size": self.description.vocab_size}

    def check_model(self, model: ModelConfig, vocab_size: int, free: Set[str] = frozenset()) -> None:
        """Check that a model computes the same with these weights as transformers' does.

        Args:
            model: the model.
            vocab_size: entries of its vocabulary, without padding.
            free: fields that may differ, because the weights that depend on them are not taken.

        Raises:
            CheckpointError: fields differ; all are named.
        """
        wrong = differences(self.description.model, model, free)
        if vocab_size != self.description.vocab_size:
            wrong.append(f"`vocab_size` is {self.description.vocab_size}, not {vocab_size}")
        if wrong:
            raise CheckpointError(f"`{self.folder / CONFIG}` must fit the model, but {'; '.join(wrong)}")

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`. Only the rows with these parts are read.

        Raises:
            DamagedCheckpointError: a file has become shorter or cannot be read.
        """
        for part in parts:
            assert self.shapes[part.key] == tuple(part.shape), f"{part.key}: {part.shape}"
            for link in self.table.by_key[part.key]:
                box, stored, link = link.box.overlap(part.box), self._stored[link.theirs], link.in_rows
                for piece in () if box is None else cut(box, link.merged[0], CHUNK):
                    _read(stored.in_rows, link, piece, part.tensor[piece.within(part.box)])

    def tensor(self, key: Key) -> Tensor:
        """Read a whole logical tensor, in its stored dtype."""
        shape = self.shapes[key]
        whole = torch.empty(shape, dtype=self._stored[self.table.by_key[key][0].theirs].dtype)
        self.read([Part.whole(key, whole)])
        return whole

    @property
    def coded(self) -> frozenset[str]:
        """The names of our weights that the folder holds as codes, or some part of them."""
        links = self.table.by_theirs.items()
        return frozenset(link.key.name for name, link in links if isinstance(self._stored[name], CodedTensor))

    def quantized(self, key: Key, box: Box) -> QuantizedWeight | None:
        """The codes of a box of a weight, as a matrix of its last dim; None if there are none to give."""
        links = [(link, self._stored[link.theirs]) for link in self.table.by_key[key]]
        return read_codes(links, box, CHUNK)

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()

    def _check_experts(self, rules: Iterable[TensorRule], tensors: int) -> None:
        """Refuse more experts than there are tensors, before a table of them is made."""
        experts = sum(layer.experts for layer in model_spec(self.description.model).layers)
        if any("{x}" in rule.theirs for rule in rules) and experts > tensors:
            raise self._misfit(f"{experts} experts cannot be in {tensors} tensors")

    def _table(self, rules: Iterable[TensorRule]) -> Table:
        return Table.of(rules, model_spec(self.description.model), self.description.vocab_size)

    def _named_as_today(self) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
        """The stored tensors under their present names, without ignored ones, and remarks on these."""
        architecture = self.description.architecture
        compression = self.description.compression
        present = dict(self._tensors.tensors)
        if compression is not None:
            present = decoded(compression, present)
        if not any(name.startswith(architecture.prefix) for name in present):  # the bare model was saved
            heads = {copy for copy, _ in architecture.copies}
            present = {
                name if name in heads else architecture.prefix + name: tensor
                for name, tensor in present.items()
            }
        for pattern, name in architecture.renamed:
            present = {re.sub(rf"\A{pattern}\Z", name, theirs): tensor for theirs, tensor in present.items()}
        buffers: set[str] = set()
        further: dict[int, str] = {}  # number -> the beginning of the names in a layer behind the model's
        for ignored in map(re.compile, architecture.ignored):
            for match in filter(None, map(ignored.fullmatch, present)):
                if "further" not in ignored.groupindex:
                    buffers.add(match[0])
                elif int(match["further"]) >= self.description.model.num_layers:
                    further[int(match["further"])] = match[0][: match.end("further") + 1]
        remarks = tuple(
            f"left out layer {number}, which predicts further tokens, as transformers does"
            for number in sorted(further)
        )
        layers = tuple(further.values())
        return {n: t for n, t in present.items() if n not in buffers and not n.startswith(layers)}, remarks

    def _match(self, present: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The stored tensor of each name in the table; raises unless exactly these are `present`."""
        architecture = self.description.architecture
        blank = self._table(architecture.without_ours).by_theirs
        present = self._parted(self._without_copies(present), blank)
        wrong = [
            f"hold {name} as {list(stored.shape)} with other numbers than {constant.number}"
            for constant in architecture.constants
            for name in self._table([constant.rule]).by_theirs
            if (stored := present.get(name)) is not None and not _is_constant(stored, constant.number)
        ]
        for name in blank:
            present.pop(name, None)  # zeros or constants, which have been checked, or never used
        if missing := self.table.by_theirs.keys() - present.keys():
            wrong.append(f"lack {named(missing)}")
        if unused := present.keys() - self.table.by_theirs.keys():
            wrong.append(f"also hold {named(unused)}")
        for name, link in self.table.by_theirs.items():
            stored = present.get(name)
            if stored is not None and (stored.shape != link.their_shape or stored.dtype not in FLOATS):
                actual, expected = list(stored.shape), list(link.their_shape)
                wrong.append(f"hold {name} as {stored.dtype} {actual} instead of floats {expected}")
        if wrong:
            raise self._misfit("they " + "; ".join(wrong[:8]))
        return present

    def _parted(
        self, present: dict[str, StoredTensor], blank: Mapping[str, TensorLink]
    ) -> dict[str, StoredTensor]:
        """Cut fused tensors into those of the table and of `blank`."""
        model, architecture = self.description.model, self.description.architecture
        present, table = dict(present), {**blank, **self.table.by_theirs}
        for whole, parts in architecture.fused_in(model.num_layers):
            here = [part for part in parts if part in table]
            rows = [table[part].their_shape[0] for part in here]
            if here and whole in present and present[whole].shape[:1] == (sum(rows),):
                stored = present.pop(whole)
                for part, below in zip(here, accumulate(rows), strict=True):
                    present[part] = stored.cut(below - table[part].their_shape[0], below)
        return present

    def _without_copies(self, present: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Drop copies that the table lacks, after checking that they equal their originals.

        A file may have either of two tied tensors: the one that is missing is taken from the other.

        Raises:
            CheckpointError: both are there, and differ.
        """
        present, table = dict(present), self.table.by_theirs
        for copy, original in self.description.architecture.copies:
            if copy in table and table[copy].key != table[original].key:  # untied: a tensor of its own
                continue
            if copy in present and original in present:
                self._check_copy(present[copy], present[original], original)
            for one, other in ((copy, original), (original, copy)):
                if one not in present and other in present:
                    present[one] = present[other]
            if copy not in table:
                present.pop(copy, None)
        return present

    def _check_copy(self, copy: StoredTensor, original: StoredTensor, name: str) -> None:
        """Check that a copy equals its `original`, whose present name is `name`."""
        same = (copy.shape, copy.dtype) == (original.shape, original.dtype)
        if same:
            step = max(1, CHUNK // max(1, copy.shape[-1])) if copy.shape else 1
            for start in range(0, copy.shape[0] if copy.shape else 0, step):
                rows = slice(start, min(start + step, copy.shape[0]))
                if not torch.equal(copy.rows(rows), original.rows(rows)):
                    same = False
                    break
        if not same:
            untie = self.description.model.untie_embeddings_and_output_weights
            raise self._misfit(
                f"{copy.name} differs from {name}, "
                + (
                    "of which it must be a copy"
                    if untie
                    else "although `tie_word_embeddings` is true; set it to false if the head has weights of "
                    "its own"
                )
            )

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the tensors in `{self.folder}` must be those that its {CONFIG} describes, but {what}"
        )


def _is_constant(stored: StoredTensor, number: float) -> bool:
    """Whether a tensor is that number, possibly rounded to the dtype of an earlier file."""
    if stored.shape or stored.dtype not in FLOATS:
        return False
    value = stored.rows(slice(0, 1)).item()
    exact = torch.tensor(number, dtype=torch.float64)
    return any(exact.to(dtype).to(stored.dtype).item() == value for dtype in FLOATS)


def _read(stored: StoredTensor, link: TensorLink, box: Box, target: Tensor) -> None:
    """Read our `box`, which is some consecutive rows of theirs, or a part of such rows."""
    rows, covered = link.rows_of(box)
    straight = link.is_straight and covered == box and target.is_contiguous()
    if straight and target.is_cpu and target.dtype == stored.dtype:
        stored.read_rows(rows, target)
    else:
        target.copy_(link.as_ours(stored.rows(rows), covered)[box.within(covered)])
