"""The tables of forks: families take no flag that does something, and no row is dead."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.compat.rows import DIALECTS, SYNONYMS, of_family
from megazero.config.flags import FLAGS, scan
from megazero.config.tables import blocks
from megazero.config.words import dashed
from tests.tables import over_table

MISSPELLED = {
    "--dataloader-ttype cyclic": "--dataloader-type",
    "--ckpt-steps 100": "--ckpt-step",
    "--no-bias-geelu-fusion": "--no-bias-gelu-fusion",
    "--exit-inerval 100": "--exit-interval",
    "--exit-inter 100": "--exit-interval",
    "--no-save-opptim": "--no-save-optim",
    "--recompute-granuularity full": "--recompute-granularity",
}


@over_table("argv", MISSPELLED)
def test_a_family_takes_no_flag_that_is_misspelled(argv: str) -> None:
    """Each was accepted without effect, as one about checkpoints, kernels or data loaders."""
    flag = argv.split()[0]
    assert f"unknown flag `{flag}`; did you mean `{MISSPELLED[argv]}`?" in scan(argv.split()).problems


@over_table(
    "name",
    [
        "--sync-every-n-steps", "--stop-iter", "--restart-warmup-steps", "--ft-lr", "--elastic-batch",
        "--persist-momentum", "--swap-norms", "--fused-lr", "--no-fused-qkv-bias", "--dataloader-shuffle",
        "--mamba-conv-kernel", "--async-update-steps", "--bucket-by-length", "--ckpt-convert-formats",
        "--dataloader-inter-document-maskings", "--use-te-activation-funcs",
        "--use-new-init", "--use-legacy-mlp", "--quant-tp-comm-bits", "--tp-comm-fp8", "--local-sgd-replicas",
        "--use-batch-statistics", "--swap-activation-function",
    ],
)  # fmt: skip
def test_a_family_takes_no_flag_that_may_change_numbers(name: str) -> None:
    assert any(f"unknown flag `{name}`" in problem for problem in scan([name, "3"]).problems)


def _misspelled(name: str, positions: Iterable[int]) -> set[str]:
    """The flag with one letter dropped, and with one doubled."""
    return {name[:i] + name[i] * times + name[i + 1 :] for i in positions for times in (0, 2)}


def test_no_misspelled_flag_is_accepted_silently() -> None:
    refused = [name for name, row in FOREIGN_FLAGS.items() if row.accepted is None]
    names = [dashed(name) for name in (*FLAGS, *refused)]
    known = {dashed(name) for name in (*FLAGS, *FOREIGN_FLAGS)}
    every = {other for name in names for other in _misspelled(name, range(3, len(name)))} - known
    some = {other for name in names for other in _misspelled(name, (len(name) // 2, len(name) - 1))} - known
    patterns = [pattern for _, words in blocks("families.txt") for pattern in words]
    assert every.isdisjoint(patterns)
    fitting = [other for other in some if any(fnmatchcase(other, pattern) for pattern in patterns)]
    assert len(fitting) > 100
    assert [other for other in fitting if not scan([other]).problems] == []


def test_no_row_is_dead() -> None:
    """Rows of forks said what synonyms, families or the flags here say anyway."""
    known = {dashed(name): name for name in (*FLAGS, *FOREIGN_FLAGS)}
    forks = [(name, row) for rows in DIALECTS.values() for name, several in rows.items() for row in several]
    assert [name for name, row in forks if row in SYNONYMS.get(name, ())] == []
    free = {name for name, row in forks if row.accepted and not row.when.values and name not in known}
    assert [name for name in free if of_family(name, known)] == []
    synonyms = [(name, row) for name, several in SYNONYMS.items() for row in several]
    assert [name for name, row in synonyms if name in known and not row.when.values] == []
    for rows in (SYNONYMS, *DIALECTS.values()):
        for name, several in rows.items():
            assert all(row.when.values or row.when.beside for row in several[:-1]), name
