"""Would the CPU's proofs notice a broken CUDA kernel? Plants faults in csrc, one by one, and runs them.

    python proofs/kernel_mutants.py                # all of them
    python proofs/kernel_mutants.py --only softmax # those whose file or story matches
    python proofs/kernel_mutants.py --list

A fault is a line of `FAULTS`: a source, what stands there, what takes its place, and the story. It is planted
in a copy of the checkout. First the kernel's case is run and its counts are judged (as `megazero kernels
report` shows them), then its sweep in tests/kernels. One JSON line per fault says which of them found it; the
exit status is 1 if a fault was found by neither.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASE = """
import sys
from megazero.commands.kernels.table import kernel_rows, measured_operators
names = ("{op}", "add_{op}", "de{op}")
examples = [pair for pair in measured_operators() if pair[0].name in names]
problems = [problem for row in kernel_rows(examples, False) for problem in row.problems()]
print("\\n".join(problems))
sys.exit(bool(problems))
"""


@dataclass(frozen=True)
class KernelFault:
    """One planted fault: in `path`, `old` (which stands there `times` times) becomes `new`."""

    story: str
    op: str
    path: str
    old: str
    new: str
    times: int = 1


ATTENTION = "csrc/attention/cuda_blocks.hpp"
RMS_NORM, ROWS, SUMS = "csrc/rms_norm/cuda.cu", "csrc/common/cuda_rows.hpp", "csrc/common/cuda_sums.hpp"

FAULTS = (
    KernelFault(
        "a missing barrier: partial sums are read before all warps wrote theirs",
        "rms_norm",
        ROWS,
        "  }\n  __syncthreads();\n#pragma unroll\n",
        "  }\n#pragma unroll\n",
    ),
    KernelFault(
        "a missing barrier: partial sums are overwritten before all warps read them",
        "rms_norm",
        ROWS,
        "  __syncthreads();  // the last sums have been read\n",
        "",
    ),
    KernelFault(
        "a missing barrier: a block arrives before all of its threads have written",
        "rms_norm",
        SUMS,
        "  __syncthreads();  // all threads have written\n",
        "",
    ),
    KernelFault(
        "an off-by-one tail: the last column is left out",
        "rms_norm",
        SUMS,
        "column < end;",
        "column < end - 1;",
    ),
    KernelFault(
        "a tail that goes too far: one pack beyond the row is read",
        "rms_norm",
        ROWS,
        "packs += at(tile, k) < width;",
        "packs += at(tile, k) <= width;",
    ),
    KernelFault(
        "a wrong lane: the first step of the sum is left out",
        "rms_norm",
        "csrc/common/cuda.hpp",
        "value += __shfl_xor_sync(kAllLanes, value, distance);",
        "value += __shfl_xor_sync(kAllLanes, value, distance & 15);",
    ),
    KernelFault(
        "an uncoalesced stride: neighboring lanes are a pack's count apart",
        "rms_norm",
        ROWS,
        "return ((tile * kPacks + k) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;",
        "return (tile * kPacks * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) * kPacks + k)"
        " * N;",
    ),
    KernelFault(
        "a row is read twice although it is held in registers",
        "rms_norm",
        RMS_NORM,
        "      if (!whole) tile.load(normalized + row * width, width, t);",
        "      tile.load(normalized + row * width, width, t);",
    ),
    KernelFault(
        "a wide row's gradient of the weight forgets the group's earlier rows",
        "rms_norm",
        RMS_NORM,
        "if (row != first_row()) summed.load",
        "if (row < first_row()) summed.load",
    ),
    KernelFault(
        "a missing fence: a block may read what others wrote before it is there",
        "rms_norm",
        SUMS,
        "    __threadfence();\n  }",
        "  }",
    ),
    KernelFault(
        "a narrowed accumulator: the loss's sum of exponentials is kept in fp16",
        "cross_entropy",
        "csrc/cross_entropy/cuda.cu",
        "sum[0] += expf(tile.value[k][n] - seen);",
        "sum[0] = to_float(from_float<F16>(sum[0] + expf(tile.value[k][n] - seen)));",
    ),
    KernelFault(
        "the loss's sum is not scaled when a larger logit is seen",
        "cross_entropy",
        "csrc/cross_entropy/cuda.cu",
        "      sum[0] *= expf(seen - largest);\n",
        "",
    ),
    KernelFault(
        "the gradient of the vocabulary's padding is not zero",
        "cross_entropy",
        "csrc/cross_entropy/cuda.cu",
        "column < columns ? (expf",
        "column < stride ? (expf",
    ),
    KernelFault(
        "causality is off by one: a query does not see its own key",
        "scaled_softmax",
        "csrc/scaled_softmax/cuda.cu",
        "(keys - queries) + 1;",
        "(keys - queries);",
    ),
    KernelFault(
        "a missing barrier: a tile's counts are overwritten before they are read",
        "kept_columns",
        "csrc/kept_columns/cuda.cu",
        "    __syncthreads();  // the counts have been read\n",
        "",
    ),
    KernelFault(
        "a wrong lane: a token counts itself among those before it",
        "kept_columns",
        "csrc/kept_columns/cuda.cu",
        "((1u << lane) - 1)",
        "((2u << lane) - 1)",
    ),
    KernelFault(
        "of equal scores the last column wins",
        "top_k",
        "csrc/top_k/cuda.cu",
        "if (ranks[e] > best) {",
        "if (ranks[e] >= best) {",
    ),
    KernelFault(
        "a segment of tokens is added up for one row though it holds two",
        "embedding",
        "csrc/embedding/cuda.cu",
        "if (row >= rows || row != sorted[end - 1]) return;\n",
        "if (row >= rows) return;\n",
    ),
    KernelFault(
        "a row beyond the last is gathered",
        "gathered_sum",
        "csrc/gathered_sum/cuda.cu",
        "return number < available ? number : -1;",
        "return number <= available ? number : -1;",
    ),
    KernelFault(
        "a wide row's mask repeats that of its first columns",
        "bias_dropout_add",
        "csrc/bias_dropout_add/cuda.cu",
        "if (!whole && row_keys.keys) columns.hash(t);",
        "if (!whole && row_keys.keys) columns.hash(0);",
    ),
    KernelFault(
        "lanes are left out of the search for a block's largest element",
        "quantize",
        "csrc/quantize/cuda.cu",
        "for (int distance = lanes / 2; distance > 0; distance /= 2) {",
        "for (int distance = lanes / 4; distance > 0; distance /= 2) {",
    ),
    KernelFault(
        "a clamp hides infinities from the loss scaler",
        "to_fp8",
        "csrc/to_fp8/cuda.cu",
        "return zero != zero ?",
        "return wide != wide && zero != zero ?",
    ),
    KernelFault(
        "columns are read before all of them are there",
        "to_fp8",
        "csrc/to_fp8/cuda.cu",
        "by_column[n];\n    __syncthreads();",
        "by_column[n];",
    ),
    KernelFault(
        "a narrowed accumulator: squares are rounded to fp32",
        "square_sum",
        "csrc/square_sum/cuda.cu",
        "const double x = to_float",
        "const float x = to_float",
    ),
    KernelFault(
        "a missing barrier: the next tile is copied over one that others still multiply",
        "attention",
        ATTENTION,
        "    __syncthreads();  // the tile has been read, and so have its notes\n",
        "",
        3,
    ),
    KernelFault(
        "a tile is multiplied before its copy has been waited for",
        "attention",
        ATTENTION,
        "  if (another) {\n    wait_for_copies<1>();",
        "  if (another || true) {\n    wait_for_copies<1>();",
    ),
    KernelFault(
        "results go through a tile to which a copy is under way",
        "attention",
        ATTENTION,
        "  wait_for_copies<0>();  // there are some where no key is seen\n",
        "",
        2,
    ),
    KernelFault(
        "the first row's document stands for all rows of a warp",
        "attention",
        ATTENTION,
        "  bool same = own[0] == document && own[1] == document;",
        "  bool same = true;",
    ),
    KernelFault(
        "the documents of a tile are not looked at",
        "attention",
        ATTENTION,
        "same = same && notes.document[i] == document;",
        "same = same && (notes.document[i] == document || true);",
    ),
    KernelFault(
        "a group's heads are all summed by each of the blocks that share them",
        "attention",
        ATTENTION,
        "heads = in.heads_per_group / in.shares;",
        "heads = in.heads_per_group;",
    ),
)


def planted(fault: KernelFault, text: str) -> str:
    """The source with the fault. Raises ValueError if the place is not there as often as it says."""
    if text.count(fault.old) != fault.times:
        raise ValueError(
            f"{fault.path} must hold {fault.old!r} {fault.times} times, but does {text.count(fault.old)}."
        )
    return text.replace(fault.old, fault.new)


def copy_checkout(to: Path, op: str) -> None:
    """What the proofs of one operator's kernels need: the other kernels would only take time to compile."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("megazero", "tests", "csrc"):
        shutil.copytree(ROOT / folder, to / folder, ignore=skipped)
    for native in ROOT.glob("megazero/*/_native*.so"):
        shutil.copy(native, to / native.relative_to(ROOT))
    shutil.copy(ROOT / "pyproject.toml", to)
    for source in (to / "csrc").glob("*/cuda.cu"):
        if source.parent.name not in (op, "column_sum"):
            source.unlink()


def found_by(fault: KernelFault) -> str | None:
    """`counts` or `sweep`, whichever found it first; None if neither did."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        copy_checkout(place, fault.op)
        source = place / fault.path
        source.write_text(planted(fault, source.read_text(encoding="utf-8")), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": scratch,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        proofs = {
            "counts": [sys.executable, "-c", CASE.format(op=fault.op)],
            "sweep": [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "tests/kernels", "-k", fault.op],
        }
        for name, command in proofs.items():
            ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
            words = ended.stdout + ended.stderr
            if "BuildError" in words:
                raise RuntimeError(f"the fault must compile, but does not: {fault.story}\n{words[-2000:]}")
            if ended.returncode != 0:
                return name
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="searched in `path story`")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    flags = parser.parse_args()
    chosen = [fault for fault in FAULTS if re.search(flags.only, f"{fault.path} {fault.story}")]
    missed = 0
    for fault in chosen:
        if flags.list:
            print(f"{fault.path}: {fault.story}")
            continue
        began = time.perf_counter()
        name = found_by(fault)
        missed += name is None
        seconds = round(time.perf_counter() - began, 1)
        print(
            json.dumps({"fault": fault.story, "path": fault.path, "found_by": name, "seconds": seconds}),
            flush=True,
        )
    if not flags.list:
        print(f"{len(chosen) - missed} of {len(chosen)} faults were found", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
