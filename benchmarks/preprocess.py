"""Claim: jsonl to `.bin/.idx` with GPT-2's BPE at 100 MB/s of text on one core, close to twice that on two.

`python benchmarks/preprocess.py [--mb 220] [--rounds 3] [--cache DIR]` makes a corpus and a vocabulary
of GPT-2's size (50,257) from the standard library's sources, once, then times
`data_tools/preprocess_data.py` as a user runs it, from process start to exit: 1 worker on one core, 2
workers on two, and the same tool confined to the `tokenizers` library (on a slice, as it is slow). They
take turns; each JSON line holds medians over the rounds. The exit status is 1 if any two of them write
different bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 50257
_WORD = re.compile(r"[A-Za-z]{4,}")
_SLOW = """import sys
sys.modules["gigatoken"] = None
from megazero.data_tools.preprocess_data import main
sys.exit(main())"""


@dataclass(frozen=True)
class Corpus:
    """A jsonl file, its text in bytes, and the share of these in lines of text that occur earlier in it."""

    path: str
    text_bytes: int
    repeated: float


@dataclass(frozen=True)
class Contender:
    """A way to run the tool: its command's start, its workers (each on a core of its own) and its corpus."""

    name: str
    command: tuple[str, ...]
    workers: int
    corpus: Corpus
    prefix: str


def tool(name: str, *flags: str) -> None:
    """Runs a data tool to its end."""
    command = [sys.executable, str(ROOT / "data_tools" / name), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def vary(text: str, copy: int, words: list[str], swapped: dict[str, str]) -> str:
    """The text with one word in sixteen replaced, everywhere alike within a copy, by a word of two halves.

    Plain repetition would spare the tokenizer every new word, while real text keeps bringing some. `swapped`
    remembers this copy's words.
    """

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        if word not in swapped:
            key = int.from_bytes(hashlib.blake2b(f"{copy} {word}".encode(), digest_size=4).digest(), "little")
            other = words[key // 16 % len(words)]
            swapped[word] = word if key % 16 else word[: len(word) // 2] + other[len(other) // 2 :]
        return swapped[word]

    return _WORD.sub(swap, text)


def documents(source: Path, size: float) -> Iterator[str]:
    """The source's texts, then varied copies of them, until `size` bytes."""
    texts = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    words = sorted({word for text in texts[::10] for word in _WORD.findall(text)})
    done, copy = 0, 0
    while True:
        swapped: dict[str, str] = {}
        for text in texts:
            varied = vary(text, copy, words, swapped) if copy else text
            yield varied
            done += len(varied.encode())
            if done >= size:
                return
        copy += 1


def make_corpus(source: Path, target: Path, megabytes: float) -> Corpus:
    """Writes the corpus, or takes the one an earlier call left."""
    facts = target.with_suffix(".facts.json")
    if facts.exists():
        return Corpus(**json.loads(facts.read_text()))
    seen: set[int] = set()
    total = again = 0
    with target.open("wb") as file:
        for text in documents(source, megabytes * 1e6):
            file.write(json.dumps({"text": text}).encode() + b"\n")
            for line in text.splitlines(keepends=True):
                size = len(line.encode())
                total += size
                again += size if hash(line) in seen else 0
                seen.add(hash(line))
    corpus = Corpus(str(target), total, round(again / total, 3))
    facts.write_text(json.dumps(asdict(corpus)))
    return corpus


def prepare(cache: Path, megabytes: float, slice_megabytes: float) -> tuple[Corpus, Corpus]:
    """The corpus, its slice and the vocabulary, made once per cache directory."""
    cache.mkdir(parents=True, exist_ok=True)
    source = cache / "source.jsonl"
    if not source.exists():
        tool("corpora/make_corpus.py", "--output", str(source))
    if not (cache / "merges.txt").exists():
        tool(
            "train_tokenizer.py",
            "--input",
            str(source),
            "--output",
            str(cache),
            "--vocab-size",
            str(VOCAB_SIZE),
        )
    return tuple(
        make_corpus(source, cache / f"corpus{mb:g}.jsonl", mb) for mb in (megabytes, slice_megabytes)
    )


def seconds(contender: Contender, cache: Path) -> float:
    """One run from process start to exit."""
    flags = ["--input", contender.corpus.path, "--output-prefix", contender.prefix, "--append-eod"]
    flags += ["--tokenizer-type", "GPT2BPETokenizer", "--workers", str(contender.workers)]
    flags += ["--vocab-file", str(cache / "vocab.json"), "--merge-file", str(cache / "merges.txt")]
    cores = sorted(os.sched_getaffinity(0))[: contender.workers]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *contender.command, *flags],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return time.perf_counter() - start


def digest(prefix: str) -> str:
    """A digest of both files of a dataset."""
    content = hashlib.blake2b()
    for end in (".bin", ".idx"):
        content.update(Path(f"{prefix}_text_document{end}").read_bytes())
    return content.hexdigest()


def run(args: argparse.Namespace, scratch: Path) -> bool:
    """Prints one JSON line per contender; True if equal inputs gave equal outputs."""
    cache = Path(args.cache) if args.cache else scratch
    whole, part = prepare(cache, args.mb, args.slice_mb)
    script = (str(ROOT / "data_tools" / "preprocess_data.py"),)
    contenders = [
        Contender("megazero, 1 worker", script, 1, whole, str(scratch / "one")),
        Contender("megazero, 2 workers", script, 2, whole, str(scratch / "two")),
        Contender("the tokenizers library, 1 worker", ("-c", _SLOW), 1, part, str(scratch / "slow")),
    ]
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(args.rounds):
        for contender in contenders:
            times[contender.name].append(seconds(contender, cache))
    check = Contender("", script, 1, part, str(scratch / "check"))
    seconds(check, cache)
    same = digest(contenders[0].prefix) == digest(contenders[1].prefix)
    same &= digest(check.prefix) == digest(contenders[2].prefix)
    rates = {c.name: c.corpus.text_bytes / 1e6 / statistics.median(times[c.name]) for c in contenders}
    for contender in contenders:
        rate = rates[contender.name]
        row = {
            "benchmark": "preprocess",
            "contender": contender.name,
            "mb_of_text_per_s": round(rate, 1),
            "ratio_to_tokenizers": round(rate / rates[contenders[2].name], 1),
            "ratio_to_one_worker": round(rate / rates[contenders[0].name], 2),
            "seconds": [round(second, 2) for second in times[contender.name]],
            "text_mb": round(contender.corpus.text_bytes / 1e6, 1),
            "share_of_repeated_lines": contender.corpus.repeated,
            "vocab_size": VOCAB_SIZE,
            "outputs_identical": same,
        }
        print(json.dumps(row), flush=True)
    return same


def main() -> int:
    """Runs the benchmark; 0 if the outputs agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=220, help="text of the corpus in MB")
    parser.add_argument("--slice-mb", type=float, default=6, help="text of the slow contender's slice in MB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--cache", metavar="DIR", help="keep corpus and vocabulary here (default: nowhere)")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(parser.parse_args(), Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
