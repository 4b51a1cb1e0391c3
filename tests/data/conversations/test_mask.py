"""The `.mask` of a dataset: written with it, checked with it, merged, and read by GPT's samples."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed import checksum
from megazero.data.indexed.reader import IndexedDataset, content_hash, file_hashes, open_indexed, write_sums
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.packed.dataset import PackedDataset
from megazero.errors import DataError
from tests.data.corpora import write_lengths
from tests.tables import over_table

LENGTHS = [30, 1, 200, 7, 45, 0, 100, 3, 64, 50]  # 500 tokens


def pattern(length: int = 500) -> np.ndarray:
    return np.random.default_rng(length).random(length) < 0.4


def write_masked(prefix: Path, mask: np.ndarray | None = None, dtype: str = "uint16") -> Path:
    """The tokens count up from 0, so that an id says where it lies."""
    mask = pattern() if mask is None else mask
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_raw(np.arange(500), np.array(LENGTHS), mask=mask)
    return prefix


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_written_and_read(tmp_path):
    dataset = open_indexed(write_masked(tmp_path / "d.1"), verify=True, guarded=True)
    content = Path(f"{dataset.prefix}.mask").read_bytes()
    assert content == bytes(pattern().tolist())
    assert dataset.mask.tolist() == pattern().tolist()
    recorded = json.loads(Path(f"{dataset.prefix}.sum").read_text())["mask"]
    assert recorded == {"crc32": f"{zlib.crc32(content):08x}"}
    dataset.validate(full=True)
    assert pickle.loads(pickle.dumps(dataset)).mask.tolist() == dataset.mask.tolist()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".idx", ".mask", ".sum"]


def test_tokens_without_a_mask_count_wherever_they_stand(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", "int32") as writer:
        writer.add_document([np.arange(3), np.arange(2)])
        writer.add_raw(np.arange(4), np.array([4]), mask=np.array([0, 1, 0, 1], dtype=bool))
        writer.add_raw(np.arange(2), np.array([2]))
    assert open_indexed(tmp_path / "d", verify=True).mask.tolist() == [1] * 5 + [0, 1, 0, 1] + [1] * 2
    with IndexedDatasetWriter(tmp_path / "d", "int32") as writer:
        writer.add_raw(np.arange(4), np.array([4]))
    assert open_indexed(tmp_path / "d", verify=True).mask is None, "the older dataset's mask goes with it"


def test_a_mask_of_another_size_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(DataError, match="`mask` must have 500 values"):
        write_masked(tmp_path / "d", pattern(499))
    assert not list(tmp_path.iterdir())


@over_table("order", ["masked, plain", "plain, masked", "masked, masked", "plain, plain"])
def test_merged(tmp_path, order):
    write_masked(tmp_path / "masked")
    write_lengths(tmp_path / "plain", LENGTHS)
    names = order.split(", ")
    with IndexedDatasetWriter(tmp_path / "both", "uint16") as writer:
        for name in names:
            writer.append_dataset(tmp_path / name)
    expected = [
        *(bit for name in names for bit in (pattern() if name == "masked" else np.ones(500))).__iter__()
    ]
    mask = open_indexed(tmp_path / "both", verify=True).mask
    assert (None if mask is None else mask.tolist()) == (None if "masked" not in names else expected)


def _gone(prefix: Path) -> None:
    Path(f"{prefix}.mask").unlink()


def _of_another(prefix: Path) -> None:
    mask = Path(f"{prefix}.mask").read_bytes()
    shutil.copy(f"{write_lengths(prefix.with_name('other'), LENGTHS)}.sum", f"{prefix}.sum")
    Path(f"{prefix}.mask").write_bytes(mask)


def _short(prefix: Path) -> None:
    Path(f"{prefix}.mask").write_bytes(bytes(499))


def _fewer_sums(prefix: Path) -> None:
    rewrite(Path(f"{prefix}.sum"), mask={"crc32": ""})


def _no_sums(prefix: Path) -> None:
    rewrite(Path(f"{prefix}.sum"), mask={})


def _odd_sums(prefix: Path) -> None:
    rewrite(Path(f"{prefix}.sum"), mask={"crc32": "0g"})


@over_table(
    "harm, says",
    [
        (
            _gone,
            "d.mask` must have checksums in the .sum beside it, but that has them, and the file is not there",
        ),
        (_of_another, "d.mask` must have checksums in the .sum beside it, but that has none"),
        (_short, "d.mask` must have a byte for each of the 500 tokens, but has 499"),
        (_fewer_sums, "must have a byte for each of the 500 tokens"),
        (_no_sums, "must be a checksum file"),
        (_odd_sums, "must be a checksum file"),
    ],
)
def test_refused_when_opened(tmp_path, harm, says):
    prefix = write_masked(tmp_path / "d")
    harm(prefix)
    with pytest.raises(DataError, match=says):
        open_indexed(prefix)


def test_damage_is_met_by_verification_and_by_what_it_is_in(tmp_path, monkeypatch):
    monkeypatch.setattr(checksum, "BLOCK", 64)
    prefix = write_masked(tmp_path / "d")
    content = bytearray(Path(f"{prefix}.mask").read_bytes())
    content[299] ^= 1  # of block 4: tokens 256 to 319, of documents 4 and 6
    Path(f"{prefix}.mask").write_bytes(content)
    says = r"d.mask` must have CRC-32 .* in bytes 256..320, .*; the mask is damaged \(documents 4 to 6\)"
    for check in (
        lambda: open_indexed(prefix, verify=True),
        lambda: open_indexed(prefix).validate(full=True),
    ):
        with pytest.raises(DataError, match=says):
            check()
    unharmed = gpt(open_indexed(prefix))
    for number in range(len(unharmed)):
        sample = unharmed[number]
        inside = {256 <= token < 320 for token in (*sample["tokens"].tolist(), *sample["labels"].tolist())}
        with pytest.raises(DataError, match="the mask is damaged") if True in inside else nullcontext():
            gpt(open_indexed(prefix, guarded=True)).batch([number])


def test_changes_are_named_and_identity_covers_the_mask(tmp_path):
    one, other = write_masked(tmp_path / "one"), write_masked(tmp_path / "other", ~pattern())
    plain = write_lengths(tmp_path / "plain", LENGTHS)
    kept = [content_hash(open_indexed(prefix)) for prefix in (one, other, plain)]
    assert len({*kept}) == 3
    masks = [file_hashes(open_indexed(prefix))["mask"] for prefix in (one, other, plain)]
    assert len({*masks}) == 3
    assert masks[2] is None
    guard = open_indexed(one, guarded=True).guard
    Path(f"{one}.mask").write_bytes(bytes(500))
    assert [change.split()[0] for change in guard.changed()] == [f"{one}.mask"]
    Path(f"{one}.mask").write_bytes(bytes(3))
    with pytest.raises(DataError, match="one.mask` must stay as it is"):
        guard.before_use(lambda: (np.array([0]), np.array([2])))


def test_sums_are_written_for_a_mask_of_ones_own(tmp_path):
    prefix = write_lengths(tmp_path / "d", LENGTHS)
    Path(f"{prefix}.sum").unlink()
    Path(f"{prefix}.mask").write_bytes(bytes([1, 2] * 250))
    with pytest.raises(DataError, match="must hold 0 and 1 alone, but holds 2"):
        write_sums(prefix)
    Path(f"{prefix}.mask").write_bytes(bytes([1, 0] * 250))
    assert (write_sums(prefix), write_sums(prefix)) == (True, False)
    assert open_indexed(prefix, verify=True).mask.tolist() == [1, 0] * 250


def gpt(indexed: IndexedDataset, packed: bool = False, **settings) -> GPTDataset | PackedDataset:
    made = GPTSettings(settings.pop("length", 16), **settings)
    return (PackedDataset if packed else GPTDataset)(indexed, range(len(indexed)), None, made)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("options", [{}, {"add_extra_token": False}, {"length": 90}], ids=str)
def test_a_position_has_the_mask_of_its_label(tmp_path, dtype, options):
    dataset = gpt(open_indexed(write_masked(tmp_path / "d", dtype=dtype), guarded=True), **options)
    batch = dataset.batch(range(len(dataset)))
    expected = pattern()[batch["labels"]].astype(np.float32)
    if options.get("add_extra_token") is False:
        expected[:, -1] = 0.0
    assert np.array_equal(batch["loss_mask"], expected)
    assert batch["loss_mask"].dtype == np.float32


def test_packed_samples_and_ends_of_documents(tmp_path):
    indexed = open_indexed(write_masked(tmp_path / "d"), guarded=True)
    dataset = gpt(indexed, packed=True, length=40)
    batch = dataset.batch(range(len(dataset)))
    last = np.isin(batch["tokens"], np.cumsum(LENGTHS) - 1)
    counted = (batch["document_ids"] >= 0) & ~last & pattern()[batch["labels"]]
    assert np.array_equal(batch["loss_mask"], counted.astype(np.float32))
    assert 0 < counted.sum() < (batch["document_ids"] >= 0).sum()
    token = int(batch["tokens"][batch["loss_mask"] > 0][0])
    ended = gpt(indexed, packed=True, length=40, ends=DocumentEnds(token, eod_mask_loss=True))
    masked = ended.batch(range(len(ended)))["loss_mask"]
    assert masked.sum() == counted.sum() - 1


def test_a_blend_with_plain_text(tmp_path):
    write_masked(tmp_path / "masked")
    write_lengths(tmp_path / "plain", LENGTHS)
    paths = ("0.5", str(tmp_path / "masked"), "0.5", str(tmp_path / "plain"))
    sources = DataSources(data_path=paths, split="1,0,0")
    train = build_datasets(DatasetRequest(GPTBuilder(GPTSettings(16)), (20, 0, 0), sources))[0]
    assert train is not None
    masks = {bool(row.all()) for row in train.batch(range(20))["loss_mask"]}
    assert masks == {True, False}


def test_bert_refuses_a_mask(tmp_path):
    indexed = open_indexed(write_masked(tmp_path / "d"))
    with pytest.raises(DataError, match="d` must have no .mask for BERT or T5"):
        BERTDataset(indexed, range(10), None, None)  # type: ignore[arg-type]
