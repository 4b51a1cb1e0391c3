"""Fuzz of everything a user hands in as a text or model file.

    python -m proofs.fuzz_inputs --count 2000

Kinds: YAML configurations and DeepSpeed JSONs, read as `--check-config` does; tokenizer files (vocab.json and
merges.txt, tokenizer.json with its settings, vocab.txt); Hugging Face's config.json and
model.safetensors.index.json, read as `megazero checkpoint from-hf` does; SentencePiece models. Each case is
a valid sample with one or two files changed: in their structure, in lines, or in bytes. What is read is
compared with an independent reading of the changed file, so that nothing passes that means something else.

Prints a table; `--jsonl` adds one line per kind and one per finding. Exits 1 unless everything is refused in
printable words or accepted with the same meaning. `--only N --keep FOLDER` makes one case again and keeps its
files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from proofs.fuzz_inputs.harness import OUTCOMES, WRONG, Finding, Kind, make_case, run

# Module and name; imported when it is its turn, for one of them needs torch.
KINDS = {
    "yaml": ("config_files", "YAML"),
    "deepspeed": ("config_files", "DEEPSPEED"),
    "tokenizer": ("tokenizer_files", "TOKENIZER"),
    "hf": ("hf_files", "HUGGING_FACE"),
    "sentencepiece": ("tokenizer_files", "SENTENCE_PIECE"),
}


def sweep(kind: Kind, args: argparse.Namespace, folder: Path) -> list[Finding]:
    """All findings of one kind; what is wrong is printed at once."""
    numbers = [args.only] if args.only is not None else range(args.count)
    findings = []
    for found in run(kind, numbers, args.seed, folder, args.jobs, args.limit):
        findings.append(found)
        if found.outcome in WRONG or args.only is not None:
            detail = found.detail if args.only is not None else found.detail[-600:]
            print(f"{found.kind} {found.number} ({found.sample}): {found.outcome}: {detail}", flush=True)
    if args.only is not None and args.keep:
        samples = kind.samples(folder / "again")
        make_case(samples, args.seed, args.only).write(args.keep)
    return findings


def summary(kind: Kind, findings: list[Finding], seed: int) -> dict[str, object]:
    """One line of the results."""
    counts = Counter(found.outcome for found in findings)
    return {
        "benchmark": "fuzz_inputs",
        "kind": kind.name,
        "seed": seed,
        "cases": len(findings),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "slowest": round(max(found.seconds for found in findings), 2),
    }


def _short(column: str) -> str:
    return column.removeprefix("accepted, ").removesuffix(" meaning").removesuffix(" message")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, default=2000, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds of the processor, at most")
    parser.add_argument("--only", type=int, help="the number of the one case to run")
    parser.add_argument("--keep", type=Path, help="folder for the files of the case that `--only` names")
    parser.add_argument("--jsonl", type=Path, help="file that gets the results as JSON lines")
    args = parser.parse_args()
    lines, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.kinds:
            begin = time.perf_counter()
            module, constant = KINDS[name]
            kind = getattr(importlib.import_module(f"proofs.fuzz_inputs.{module}"), constant)
            findings = sweep(kind, args, Path(folder) / name)
            line = summary(kind, findings, args.seed)
            lines.append({**line, "seconds": round(time.perf_counter() - begin, 1)})
            bad = [found for found in findings if found.outcome in WRONG]
            wrong += len(bad)
            lines += [{"finding": found.outcome, **vars(found)} for found in bad]
    columns = ("cases", *OUTCOMES, "slowest", "seconds")
    print(f"{'kind':20}" + "".join(f"{_short(column):>11}" for column in columns))
    for line in lines:
        if "finding" not in line:
            print(f"{line['kind']:20}" + "".join(f"{line[column]:>11}" for column in columns))
    if args.jsonl:
        args.jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
