"""What the table of kernels says, and the bounds that every kernel keeps in its case."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megazero.commands.kernels import BEGIN, END, main
from megazero.commands.kernels.compiled import CompiledKernel, occupancy, read_compiled
from megazero.commands.kernels.table import KernelRow, kernel_rows, markdown, measured_operators
from megazero.kernels.build import CSRC, ROOT
from megazero.kernels.on_cpu import KernelCounts, MemoryCounts, MistakeCounts
from tests.tables import over_table

LOG = """
ptxas info    : Compiling entry function '_ZN8megazero8rms_normIfLi1EEEvllPKT_' for 'sm_80'
ptxas info    : Function properties for _ZN8megazero8rms_normIfLi1EEEvllPKT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers, 128 bytes smem, 408 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN8megazero8rms_normINS_4Bf16ELi8EEEvllPKT_' for 'sm_80'
ptxas info    : Function properties for _ZN8megazero8rms_normINS_4Bf16ELi8EEEvllPKT_
    8 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 128 bytes smem, 408 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN8megazero12_GLOBAL__N_14movePf' for 'sm_90'
ptxas info    : Function properties for _ZN8megazero12_GLOBAL__N_14movePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers
ptxas info    : Compiling entry function '_ZN8megazero12_GLOBAL__N_14movePf' for 'sm_100'
ptxas info    : Function properties for _ZN8megazero12_GLOBAL__N_14movePf
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 24 registers
"""


@pytest.fixture(scope="module")
def rows() -> list[KernelRow]:
    return kernel_rows(measured_operators(), compiled_by_nvcc=False)


def test_what_the_compiler_said_is_read():
    assert read_compiled(LOG) == {
        ("rms_norm", "sm_80"): CompiledKernel(registers=56, spilled=12, instances=2),
        ("move", "sm_90"): CompiledKernel(registers=18, spilled=0, instances=1),
        ("move", "sm_100"): CompiledKernel(registers=24, spilled=8, instances=1),
    }


@over_table(
    ("architecture", "registers", "threads", "shared", "share"),
    [
        ("sm_80", 32, 1024, 128, 1.0),
        ("sm_80", 64, 1024, 128, 0.5),
        ("sm_80", 65, 1024, 128, 0.0),
        ("sm_80", 64, 128, 0, 0.5),
        ("sm_80", 16, 32, 0, 0.5),  # 32 blocks of a warp are the most
        ("sm_80", 32, 256, 48 * 1024, 3 * 8 / 64),
        ("sm_90", 32, 256, 48 * 1024, 4 * 8 / 64),
        ("sm_100", 32, 256, 48 * 1024, 4 * 8 / 64),
        ("sm_100", 65, 1024, 128, 0.0),
        ("sm_100", 16, 32, 0, 0.5),
    ],
)
def test_occupancy(architecture, registers, threads, shared, share):
    assert occupancy(architecture, registers, threads, shared) == share


def test_every_kernel_has_a_case(rows):
    declared = {
        name
        for path in CSRC.glob("*/cuda.cu")
        for name in re.findall(r"MEGAZERO_LAUNCH\(\s*\(([\w#]+)", path.read_text(encoding="utf-8"))
    }
    listed = (CSRC / "update/rules.hpp").read_text(encoding="utf-8").partition("define MEGAZERO_RULES")[2]
    made = {f"{name}_update" for name in re.findall(r" use\((\w+), ", listed.partition("\n")[0])}
    assert {row.kernel for row in rows} == declared - {"name##_update"} | made
    assert "name##_update" in declared


def test_every_kernel_keeps_its_bounds(rows):
    assert [problem for row in rows for problem in row.problems()] == []


def counts(**given: int) -> KernelCounts:
    """What a kernel did that read 100 bytes and nothing else, with these changes."""
    kinds = (KernelCounts, MemoryCounts, MistakeCounts)
    names = {field.name for kind in kinds for field in fields(kind)} - {"memory", "mistakes"}
    return KernelCounts.read(dict.fromkeys(names, 0) | {"bytes_read": 100} | given)


GOOD = counts()


@over_table(
    ("changes", "must_move", "word"),
    [
        ({"races": 1}, 100, "mistake"),
        ({"bank_conflicts": 2}, 100, "bank conflict"),
        ({"bytes_written": 6}, 100, "1.05"),
        ({}, 102, "1.05"),
        ({}, None, "1.05"),
        ({"sectors": 12, "ideal_sectors": 10}, 100, "1.1"),
    ],
)
def test_a_bound_that_is_not_kept_is_a_problem(changes, must_move, word):
    assert KernelRow("move", "case", GOOD, 100, "", {}).problems() == []
    (problem,) = KernelRow("move", "case", counts(**changes), must_move, "", {}).problems()
    assert word in problem


def test_a_reason_excuses_sectors():
    scattered = counts(sectors=12, ideal_sectors=10)
    assert KernelRow("move", "case", scattered, 100, "rows are where indices say", {}).problems() == []


def test_the_page_shows_what_the_kernels_do(rows):
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0].strip()

    def counted(text: str) -> list[list[str]]:
        return [line.split("|")[1:8] for line in text.splitlines() if line.startswith("| `")]

    assert counted(table) == counted(markdown(rows)), "run `megazero kernels report --update docs/kernels.md`"
    assert "| registers 80 / 90 / 100 | spilled B 80 / 90 / 100 | occupancy 80 / 90 / 100 |" in table
    compiled = re.findall(
        r"\| \d+ / \d+ / \d+ \| (\d+) / (\d+) / (\d+) \| (\d+)% / (\d+)% / (\d+)% \|$", table, re.MULTILINE
    )
    assert [each[:3] for each in compiled] == [("0", "0", "0")] * len(rows)  # bytes spilled
    # Attention keeps its tiles in registers, and is bound by what it computes, not by memory.
    tiled = [name.startswith("| `attention_") for name in table.splitlines() if name.startswith("| `")]
    for shares, tiles in zip((each[3:] for each in compiled), tiled, strict=True):
        assert min(map(int, shares)) >= (12 if tiles else 50)


def test_a_kernel_that_is_not_compiled_for_an_architecture_has_a_dash_there():
    compiled = {"sm_80": CompiledKernel(32, 0, 1), "sm_90": CompiledKernel(64, 4, 1)}
    table = markdown([KernelRow("move", "case", counts(threads_per_block=128), 100, "", compiled)])
    assert table.splitlines()[-1].endswith("| 32 / 64 / - | 0 / 4 / - | 100% / 50% / - |")


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path, capsys):
    page = Path(tmp_path / "page.md")
    page.write_text("# A page\n", encoding="utf-8")
    assert main(["report", "--no-nvcc", "--update", str(page)]) == 2
    assert "must be a page with the lines" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "# A page\n"


@pytest.mark.slow
def test_json_has_a_line_per_row(rows, capsys):
    assert main(["report", "--no-nvcc", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["kernel"], line["case"]) for line in lines] == [(row.kernel, row.case) for row in rows]
    assert all(line["bytes_ratio"] <= 1.05 for line in lines)
