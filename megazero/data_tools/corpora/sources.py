"""Make a corpus that every machine has: the sources of Python's standard library, as jsonl.

`megazero data corpus --output corpus.jsonl [--max-mb N]` writes an object {"text",
"path"} per `.py` file, in the order of the paths, without installed packages, the data of the library's tests
(broken on purpose) and files that equal an earlier one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megazero.data.files import whole_file
from megazero.data_tools import cli
from megazero.errors import DataError

# Installed packages differ between machines.
EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})


def source_files(root: Path) -> list[Path]:
    """The `.py` files below `root`, sorted by their relative path in POSIX form."""
    sources: list[Path] = []
    for directory, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED and not name.endswith("data")]
        sources += [Path(directory, name) for name in files if name.endswith(".py")]
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix())


def documents(root: Path, counts: Counter[str]) -> Iterator[dict[str, str]]:
    """Yield an object per distinct readable file; count "unreadable", "duplicate" and "empty" files."""
    seen: set[bytes] = set()
    for path in source_files(root):
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            counts["unreadable"] += 1
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if not text.strip():
            counts["empty"] += 1
        elif digest in seen:
            counts["duplicate"] += 1
        else:
            seen.add(digest)
            yield {"text": text, "path": path.relative_to(root).as_posix()}


def standard_library() -> Path:
    """The folder of this Python's library. Raises DataError if it is not a directory of sources."""
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        what = "is a zip archive" if root.is_file() else "holds no sources"
        raise DataError(
            f"the standard library must be a directory of .py files, but {root} {what}; use another Python."
        )
    return root


def make_corpus(args: argparse.Namespace) -> None:
    """Write the corpus and print the counts."""
    counts: Counter[str] = Counter()
    limit = None if args.max_mb is None else args.max_mb * 1e6
    size = number = 0
    with whole_file(args.output) as file:
        for document in documents(standard_library(), counts):
            line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
            if limit is not None and size + len(line) > limit:
                break
            file.write(line)
            size += len(line)
            number += 1
        if not number:
            raise DataError(f"`--max-mb` must leave room for one file, but is {args.max_mb}; raise it.")
    skipped = ", ".join(f"{counts[reason]} {reason}" for reason in ("unreadable", "duplicate", "empty"))
    print(f"{args.output}: {number:,} documents, {size / 1e6:.1f} MB (left out: {skipped})")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the corpus was written."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="jsonl file to write")
    parser.add_argument("--max-mb", type=float, metavar="N", help="stop before the corpus grows beyond N MB")
    return cli.run(make_corpus, parser.parse_args(argv))
