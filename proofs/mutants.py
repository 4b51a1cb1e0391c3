"""Would the tests notice? Plants faults in the sources, one by one, and runs the tests that should see them.

    python proofs/mutants.py                          # 220 faults, spread over packages and rules
    python proofs/mutants.py --seed 2 --count 400
    python proofs/mutants.py --only "zero/reduce"     # only faults whose file, function or rule matches
    python proofs/mutants.py --survivors build/mutants/seed1.jsonl    # once more those not found then
    python proofs/mutants.py --list --only optim      # show them, run nothing

The first run measures every test without a fault: how long it takes and which functions it runs
(`build/mutants/tests`; a test file that changes is measured again). A fault is then shown to the tests
that run its function, the nearest and fastest first, each stage within `--budget` seconds. Nothing is changed
in the checkout: every worker has a copy of it and a process that has torch loaded and forks for each run.

One JSON line per fault goes to `--out`; survivors are printed with their diff, and at the end the score: the
share of the faults that were found. Faults listed in `proofs/mutants_equivalent.txt`, each with the
reason why no test can see it, do not count. The exit status is 1 below a score of 95%.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proofs.mutation.faults import GPU, PACKAGES, Fault, Key, all_faults, read_equivalents, sample, stale
from proofs.mutation.hits import instrument
from proofs.mutation.nearest import ORACLE, MeasuredTests, Nearest, digest
from proofs.mutation.runner import Workplace
from tests.durations import read_durations

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.95
EQUIVALENTS = ROOT / "proofs/mutants_equivalent.txt"
KEPT = ROOT / "build/mutants"
LONGEST = 900.0  # seconds that measuring a run of test files may take
RUN_SECONDS = 12.0  # of tests in such a run, as a start takes some too


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=220, help="faults to plant")
    parser.add_argument("--seed", type=int, default=1, help="another one draws other faults")
    parser.add_argument("--only", metavar="REGEX", default="", help="searched in `path function rule`")
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="only those not found in this result")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at the same time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests per fault and stage")
    parser.add_argument("--near", action="store_true", help="only the tests of the packages and the oracle")
    parser.add_argument(
        "--last",
        type=Path,
        metavar="FILE",
        help="tests, one a line, of any tier, for what no other test found",
    )
    parser.add_argument("--measure", action="store_true", help="only measure the tests that need it")
    parser.add_argument("--resume", action="store_true", help="keep what `--out` already says")
    parser.add_argument("--out", type=Path, help="results; default: build/mutants/seed<N>.jsonl")
    return parser.parse_args()


def name_of(fault: Fault) -> str:
    """What `--only` is searched in."""
    return f"{fault.path} {fault.edit.function} {fault.edit.rule}"


def chosen_faults(options: argparse.Namespace, faults: list[Fault]) -> list[Fault]:
    """The faults that the options ask for."""
    if options.survivors is None:
        matching = [fault for fault in faults if re.search(options.only, name_of(fault))]
        return sample(matching, options.count, options.seed)
    wanted = {Key(**row["key"]) for row in read_rows(options.survivors) if not row["found"]}
    unique = {fault.key: fault for fault in faults if re.search(options.only, name_of(fault))}
    return [fault for key, fault in unique.items() if key in wanted]


def read_rows(path: Path) -> list[dict]:
    """The results kept in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(folder: Path, workers: int, parts: Iterable[str] | None) -> MeasuredTests:
    """What is known of the tests, after measuring those in `parts` of tests/, or all, that have changed."""
    tests = MeasuredTests(KEPT / "tests")
    missing = tests.missing(ROOT, parts)
    if not missing:
        return tests
    places = [Workplace(ROOT, folder / f"measure{i}") for i in range(workers)]
    for place in places:
        instrument(place.copy, [f"megazero/{package}" for package in PACKAGES])
    functions = json.loads((places[0].copy / "functions.json").read_text())

    def measure(place: Workplace, names: list[str]) -> None:
        answer = place.run(names, None, LONGEST, stop=False, hits=True)
        for name in names:
            of_file = {
                test: entry for test, entry in answer.get("tests", {}).items() if test.startswith(f"{name}::")
            }
            tests.add(name, digest(ROOT / name), of_file, functions)
        passed = sum(entry["passed"] for entry in answer.get("tests", {}).values())
        print(f"{' '.join(names)}: {passed} passed in {answer['seconds']} s", flush=True)
        if answer["code"] not in (0, 5):
            print(f"  not clean without a fault: {answer.get('failed') or answer['code']}", flush=True)
            for test, entry in answer.get("tests", {}).items():
                if "why" in entry:
                    print(f"  {test}:\n{entry['why']}", flush=True)

    in_turns(places, runs_of(missing), measure)
    return tests


def runs_of(files: Iterable[str]) -> list[list[str]]:
    """Files that one process runs: some seconds of one folder. The longest runs come first."""
    seconds = read_durations()
    runs: list[list[str]] = []
    for name in files:
        last = runs[-1] if runs else []
        shared = last and Path(last[0]).parent == Path(name).parent
        if not shared or sum(seconds.get(other, 0.0) for other in [*last, name]) > RUN_SECONDS:
            runs.append([])
        runs[-1].append(name)
    return sorted(runs, key=lambda run: -sum(seconds.get(name, 0.0) for name in run))


def in_turns(places: list[Workplace], work: Iterable, act: Callable) -> None:
    """Each place takes the next piece of work until there is none; an error of one ends all."""
    left: queue.SimpleQueue = queue.SimpleQueue()
    for piece in work:
        left.put(piece)
    errors: list[Exception] = []

    def take(place: Workplace) -> None:
        try:
            while not errors:
                act(place, left.get_nowait())
        except queue.Empty:
            pass
        except Exception as error:
            errors.append(error)
        finally:
            place.close()

    threads = [threading.Thread(target=take, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def try_all(
    faults: list[Fault], done: list[dict], choices: list[Nearest], folder: Path, workers: int, out: Path
) -> list[dict]:
    """What became of each fault; also one JSON line each in `out`, as soon as it is known."""
    known = {Key(**row["key"]): row for row in done}
    rows = [known[fault.key] for fault in faults if fault.key in known]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)

        def attempt(place: Workplace, fault: Fault) -> None:
            row = {"key": vars(fault.key), "line": fault.edit.line, **place.try_fault(fault, *choices)}
            rows.append(row)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if not row["found"]:
                print(f"\nsurvived {row['tests']} tests, {row['seconds']} s: {name_of(fault)}")
                print(f"{fault.path}:{fault.edit.line}\n{fault.diff()}", flush=True)

        left = [fault for fault in faults if fault.key not in known]
        in_turns([Workplace(ROOT, folder / f"worker{i}") for i in range(workers)], left, attempt)
    return rows


def print_score(rows: list[dict], unseen: Counter, seconds: float) -> float:
    """The last lines; returns the score."""
    for title, part in (("package", lambda row: row["key"]["path"].split("/")[1]), ("rule", _rule)):
        of, found = Counter(map(part, rows)), Counter(part(row) for row in rows if row["found"])
        print(f"by {title}: " + ", ".join(f"{name} {found[name]}/{of[name]}" for name in sorted(of)))
    found = sum(row["found"] for row in rows)
    score = found / len(rows) if rows else 1.0
    hidden = f"{unseen['equivalent']} that change nothing, {unseen[GPU]} that need a GPU to be seen"
    print(f"found by tests of `--last` alone: {sum(row.get('choice') == 1 for row in rows)}")
    print(f"score {score:.1%}: {found} of {len(rows)} faults found, {len(rows) - found} survived; ", end="")
    print(f"not counted: {hidden}; {seconds:.0f} s")
    return score


def _rule(row: dict) -> str:
    return row["key"]["rule"]


def main() -> int:
    options = arguments()
    faults = all_faults(ROOT)
    equivalents = read_equivalents(EQUIVALENTS)
    for key in stale(equivalents, faults):
        print(f"{EQUIVALENTS.name} lists a fault that no longer exists:\n{key}", file=sys.stderr)
    chosen = chosen_faults(options, faults)
    counted = [fault for fault in chosen if fault.key not in equivalents]
    if options.list:
        for fault in chosen:
            print(f"{fault.path}:{fault.edit.line} {fault.edit.function} {fault.edit.rule}")
            print(fault.diff() + "\n")
        print(
            f"{len(chosen)} of {len(faults)} faults, {len(chosen) - len(counted)} of them known as equivalent"
        )
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        parts = {ORACLE, *(fault.package for fault in counted)} if options.near else None
        tests = measured(Path(folder), options.workers, parts)
        if options.measure:
            return 0
        last = options.last.read_text().splitlines() if options.last else []
        first = [test for test in tests.tests if test.name not in set(last)]
        choices = [Nearest(ROOT, part, options.budget) for part in (first, tests.like_others(last))]
        out = options.out or KEPT / f"seed{options.seed}.jsonl"
        done = read_rows(out) if options.resume and out.exists() else []
        rows = try_all(counted, done, choices, Path(folder), options.workers, out)
    reasons = [equivalents[fault.key] for fault in chosen if fault.key in equivalents]
    unseen = Counter(GPU if reason.startswith(GPU) else "equivalent" for reason in reasons)
    return int(print_score(rows, unseen, time.monotonic() - start) < TARGET)


if __name__ == "__main__":
    sys.exit(main())
