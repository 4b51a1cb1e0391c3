"""Checkpoints with right checksums and wrong content: what someone could hand over who knows the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from megazero.checkpoint.blocks import BlockHasher, FileRecord
from megazero.checkpoint.manifest import MANIFEST, dump_manifest
from megazero.checkpoint.part import Key
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint

TENSORS = {
    Key("a"): torch.arange(12.0).view(4, 3),
    Key("b"): torch.arange(5, dtype=torch.bfloat16),
    Key("a", "exp_avg"): torch.arange(12.0).view(4, 3) / 7,
}
FACTS = {"kind": "weights", "vocab_size": 5}


def make(directory: Path, iteration: int = 7, tensors: Mapping[Key, torch.Tensor] = TENSORS) -> Path:
    """Write a small checkpoint."""
    made = ((key, Later(t.dtype, tuple(t.shape), lambda t=t: t)) for key, t in tensors.items())
    return write_checkpoint(directory, iteration, made, FACTS)


def record_of(path: Path) -> FileRecord:
    """A file's entry in a manifest."""
    hasher = BlockHasher()
    hasher.update(path.read_bytes())
    return hasher.record()


def sealed(text: str) -> bytes:
    """A JSON object, given as text from its brace on, with the checksum of a manifest."""
    rest = text[1:].encode("utf-8", "surrogatepass")
    return b'{"checksum": "' + xxh3_64_hexdigest(rest).encode() + b'",\n' + rest


def reseal(folder: Path) -> None:
    """Rewrite the manifest to fit the files as they are."""
    iteration = int(folder.name.removeprefix("iter_"))
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    (folder / MANIFEST).write_bytes(dump_manifest(iteration, {n: record_of(folder / n) for n in names}))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a JSON file, and reseal the checkpoint.

    `change` gets the object. It returns another object, or text that Python would not write, or None after a
    change in place.
    """
    content = json.loads(path.read_text())
    changed = change(content)
    changed = content if changed is None else changed
    text = changed if isinstance(changed, str) else json.dumps(changed)
    path.write_text(text, errors="surrogatepass")
    reseal(path.parent)


def edit_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest; see `edit`."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    changed = change(content)
    changed = content if changed is None else changed
    text = changed if isinstance(changed, str) else json.dumps(changed)
    (folder / MANIFEST).write_bytes(sealed(text))
