"""Follow the whole configuration through a resumed run: who takes it, and how often the walk turns back.

    python proofs/walk.py             # this checkout
    python proofs/walk.py FOLDER      # the checkout in a folder, an older one too

A GPT of two layers (`examples_3d/gpt_tiny_cpu.yaml`, made smaller) trains for two steps on one rank and
saves. A second run resumes it and trains for two more; from its call of `pretrain` on, a profile hook notes
each call of a function of the package that has the whole `Config` among its arguments, in order, on all
threads. Sections of the tree, attributes and closures are not followed.

- *stays* are the functions on that walk;
- *returns* are the times that it enters a module which it has been in before and has left since.

Prints the walk and both figures. Exits 1 if one is above its limit, for which decision 36 has the reasons.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_STAYS, MOST_RETURNS = 27, 6
FLAGS = (
    "--config examples_3d/gpt_tiny_cpu.yaml --num-layers 2 --hidden-size 32 --num-attention-heads 2 "
    "--seq-length 32 --train-iters 4 --lr-warmup-iters 1 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--save-interval 2 --save {folder} --load {folder}"
)


class Visit(NamedTuple):
    """A function that the configuration was given to, and the line of its module where it begins."""

    module: str
    function: str
    line: int


def stays(visits: Sequence[Visit]) -> list[Visit]:
    """The functions of a walk, each once, in the order in which it came to them."""
    return list(dict.fromkeys(visits))


def returns(visits: Sequence[Visit]) -> Counter[str]:
    """Module -> how often a walk came back to it from elsewhere; only modules that it came back to."""
    entries = Counter(module for module, _ in groupby(visit.module for visit in visits))
    return Counter({module: count - 1 for module, count in entries.items() if count > 1})


def is_configuration(value: object) -> bool:
    """Whether a value is the whole tree, in whichever module a checkout has its class."""
    kind = type(value)
    return kind.__name__ == "Config" and kind.__module__.startswith("megazero.config.")


@contextmanager
def watched(package: Path, visits: list[Visit]) -> Iterator[None]:
    """Note the functions of a package that are given a `Config`, from the first call of `pretrain` on."""

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{package}{os.sep}"):
            return
        if not visits and code.co_name != "pretrain":
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_configuration(frame.f_locals.get(name)) for name in arguments):
            module = Path(code.co_filename).relative_to(package).as_posix()
            visits.append(Visit(module, code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def walk(checkout: Path) -> list[Visit]:
    """The visits of the configuration in a resumed run of this checkout, in this process.

    Raises:
        RuntimeError: a run failed, or the package is another checkout's.
    """
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    import megazero
    import pretrain_gpt

    package = Path(megazero.__file__).parent
    if package.parent != checkout:
        raise RuntimeError(f"`megazero` must be imported from {checkout}, but is {package}; unset PYTHONPATH")
    visits: list[Visit] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = FLAGS.format(folder=folder).split()
        sys.argv = ["pretrain_gpt.py", *flags, "--exit-interval", "2"]
        first = pretrain_gpt.main()
        sys.argv = ["pretrain_gpt.py", *flags]
        with watched(package, visits):
            second = pretrain_gpt.main()
    if first or second:
        raise RuntimeError(f"the runs ended with {first} and {second}")
    return visits


def main() -> int:
    """Print a checkout's walk and its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", nargs="?", type=Path, default=ROOT, help="its folder; this one if left out"
    )
    visits = walk(parser.parse_args().checkout.resolve())
    functions, again = stays(visits), returns(visits)
    print(*(f"{visit.module}:{visit.line} {visit.function}" for visit in functions), sep="\n")
    print(f"returns: {', '.join(f'{module} {count}' for module, count in again.most_common()) or 'none'}")
    inside = sum(visit.module.startswith("config/") for visit in functions)
    print(f"{len(functions)} stays, {inside} of them in config; {again.total()} returns")
    return int(len(functions) > MOST_STAYS or again.total() > MOST_RETURNS)


if __name__ == "__main__":
    sys.exit(main())
