"""The laws of the house, held over the sources: who imports whom, no hidden state, legible sizes.

Each check is a function from sources to violations, tried on a small offender first, then on the project.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from types import ModuleType

import pytest

from tests import house
from tests.house import PAGE, annex_violations, budget, core_lines, lines_by_room, room_of, rooms
from tests.source_tree import ROOT, Source, find_cycle, sources
from tests.tables import over_table

pytestmark = pytest.mark.fast

# A package imports from lower numbers only; of its own number, itself.
LEVELS = {
    **dict.fromkeys(("door", "errors", "file_lock", "host_memory", "regular_file", "version"), -2),
    "storage": -1,
    **dict.fromkeys(("config", "kernels", "loss", "pictures"), 0),
    **dict.fromkeys(("mpu", "ops", "data", "spec"), 1),
    **dict.fromkeys(("data_efficiency", "layers", "moe", "optim", "zero", "pipeline"), 2),
    **dict.fromkeys(("account", "models", "checkpoint", "formats", "report"), 3),
    "train": 4,
    **dict.fromkeys(
        (
            *("ablate", "data_tools", "deepspeed", "env", "harness", "inference", "launch", "plan"),
            *("post_training", "quantize", "serving", "verify"),
        ),
        5,
    ),
    "commands": 6,
    "cli": 7,
}
FACADE = 8  # megazero itself, whose names are those of a DeepSpeed script; nothing below may use them.
SAME_LEVEL = {
    ("moe", "layers"),
    ("zero", "optim"),
    ("models", "account"),
    ("formats", "checkpoint"),
    ("deepspeed", "inference"),
    ("harness", "inference"),
    ("harness", "serving"),
    ("serving", "inference"),
    ("deepspeed", "serving"),
    ("post_training", "data_tools"),
    ("post_training", "inference"),
    ("post_training", "serving"),
}
# A module of the core -> the module of an annex whose names it shows, and imports when one is asked for.
EXTRAS = {
    "lm_eval",
    "starlette",
    "uvicorn",
}  # libraries that modules import at once, and that CI does without
DOORS = {
    "megazero.inference": "megazero.harness.lm",
    "megazero.moe.layer": "megazero.deepspeed.moe.layer",
    "megazero.moe.utils": "megazero.deepspeed.moe.utils",
    "megazero.zero": "megazero.deepspeed.zero",
}
TOOLS_MAY_IMPORT = {"data_tools", "errors", "regular_file", "config", "data", "data_efficiency", "pictures"}
LONGEST_FILE = 400
LONGEST_FUNCTION = 75
MOST_METHODS = 12
# dropout only says what to drop; the numbers and their reference are counter_random's.
# Extension modules: no source of Python, so no part of an import cycle.
COMPILED = {"megazero.data._native", "megazero.ops._native"}
PACKAGES = sorted(path.parent.name for path in (ROOT / "megazero").glob("*/__init__.py"))
MODULES = [source.module for source in sources("megazero")]


def unit_of(module: str) -> str | None:
    """The package or top-level module of megazero that a dotted name lies in."""
    parts = module.split(".")
    return parts[1] if parts[0] == "megazero" and len(parts) > 1 else None


def level_of(module: str) -> int | None:
    """The level of a dotted name; None outside of megazero."""
    inside = module.split(".")[0] == "megazero"
    return LEVELS.get(unit_of(module), FACADE) if inside else None


def import_violations(source: Source) -> Iterator[str]:
    """Imports that go up, lazy ones included, or sideways without being an exception."""
    unit, own = unit_of(source.module), level_of(source.module)
    for each in source.imports():
        target, level = unit_of(each.target), level_of(each.target)
        if own is None or level is None or (unit == target and unit is not None):
            continue
        if level >= own and (unit, target) not in SAME_LEVEL:
            yield f"{source.module}:{each.line} imports {each.target} (level {level} from {own})"


def tool_violations(source: Source) -> Iterator[str]:
    """Imports of data_tools beyond what it has command lines for."""
    for each in source.imports():
        target = unit_of(each.target)
        if target is not None and target not in TOOLS_MAY_IMPORT:
            yield f"{source.module}:{each.line} imports {each.target}"


def distributed_violations(source: Source) -> Iterator[str]:
    """Mentions of torch.distributed outside mpu and the room that shows it to DeepSpeed's scripts."""
    if unit_of(source.module) == "mpu" or source.module.startswith("megazero.deepspeed.comm."):
        return
    for each in source.imports():
        if f"{each.target}.".startswith("torch.distributed."):
            yield f"{source.module}:{each.line} imports {each.target}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield f"{source.module}:{node.lineno} names torch.distributed"


def global_violations(source: Source) -> Iterator[str]:
    """`global` statements."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.module}:{node.lineno} says global {', '.join(node.names)}"


def docstring_violations(source: Source) -> Iterator[str]:
    """Modules and public top-level functions and classes that say nothing of themselves."""
    nodes = [
        node
        for node in source.tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    for node in [source.tree, *nodes]:
        if not (ast.get_docstring(node) or "").strip():
            yield f"{source.module}: {getattr(node, 'name', 'the module')} has no docstring"


def size_violations(source: Source) -> Iterator[str]:
    """Files and functions too long to be read in one go."""
    lines = source.text.count("\n")
    if lines >= LONGEST_FILE:
        yield f"{source.module} has {lines} lines"
    for node in source.functions():
        length = node.end_lineno - node.lineno + 1
        if length >= LONGEST_FUNCTION:
            yield f"{source.module}:{node.lineno} {node.name} has {length} lines"
    for node in source.classes():
        public = public_methods(node)
        if len(public) > MOST_METHODS:
            yield f"{source.module}:{node.lineno} {node.name} has {len(public)} public methods"


def public_methods(node: ast.ClassDef) -> set[str]:
    """Names of the methods and properties that a class defines itself."""
    defined = (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {each.name for each in defined if not each.name.startswith("_")}


def disguised_folders(files: Iterable[Source]) -> Iterator[str]:
    """Folders within folders that are written as prefixes: three modules `x_*`, with or without an `x`."""
    for folder, names in sorted(modules_by_folder(files).items()):
        sizes = Counter(name.partition("_")[0] for name in names if not name.startswith("_"))
        for prefix, size in sorted(sizes.items()):
            if size >= 3:
                yield f"{folder} has {size} modules `{prefix}_*`"


def modules_by_folder(files: Iterable[Source]) -> dict[str, set[str]]:
    """Package -> the names of its modules, its packages left out."""
    found = defaultdict(set)
    for source in files:
        if not source.package:
            folder, _, name = source.module.rpartition(".")
            found[folder].add(name)
    return found


def class_of(numbers: Iterable[int]) -> str:
    """The text of a class with a property and methods."""
    methods = "".join(f"    def m{number}(self): pass\n" for number in numbers)
    return f"class C:\n    @property\n{methods}"


@over_table(
    ("check", "module", "text", "offends"),
    [
        (import_violations, "megazero.ops.x", "from megazero.layers import linear", True),
        (import_violations, "megazero.ops.x", "def f():\n    import megazero.layers.linear", True),
        (import_violations, "megazero.ops.x", "import megazero.mpu", True),
        (import_violations, "megazero.optim.x", "import megazero.zero", True),
        (import_violations, "megazero.zero.x", "import megazero.optim", False),
        (import_violations, "megazero.ops.x", "from megazero.ops.y import z", False),
        (import_violations, "megazero.ops.x", "from ..layers import z", True),
        (import_violations, "megazero.errors", "import megazero.config", True),
        (import_violations, "megazero.train.x", "def f():\n    from megazero import cli", True),
        (import_violations, "megazero.train.x", "if TYPE_CHECKING:\n    import megazero.inference", True),
        (import_violations, "megazero.train.x", "import_module('megazero.inference')", True),
        (import_violations, "megazero.train.x", "importlib.import_module('megazero.mpu')", False),
        (import_violations, "megazero.env.x", "import megazero", True),
        (import_violations, "megazero.cli", "def f():\n    from megazero import initialize", True),
        (
            import_violations,
            "megazero.cli",
            "def f():\n    from megazero.commands.plan import main",
            False,
        ),
        (import_violations, "megazero", "def f():\n    import_module('megazero.deepspeed')", False),
        (tool_violations, "megazero.data_tools.x", "from megazero.mpu import y", True),
        (tool_violations, "megazero.data_tools.x", "from megazero.data.cache import y", False),
        (distributed_violations, "megazero.zero.x", "import torch.distributed as dist", True),
        (distributed_violations, "megazero.zero.x", "from torch import distributed", True),
        (distributed_violations, "megazero.zero.x", "from torch.distributed.fsdp import x", True),
        (distributed_violations, "megazero.zero.x", "torch.distributed.barrier()", True),
        (distributed_violations, "megazero.mpu.x", "import torch.distributed", False),
        (distributed_violations, "megazero.deepspeed.comm.x", "import torch.distributed", False),
        (distributed_violations, "megazero.zero.x", "import torch.distributions", False),
        (global_violations, "megazero.ops.x", "def f():\n    global y\n    y = 1", True),
        (global_violations, "megazero.ops.x", "def f():\n    nonlocal_y = 1", False),
        (docstring_violations, "megazero.ops.x", "def f(): pass", True),
        (docstring_violations, "megazero.ops.x", '"""Module."""\nclass C: pass', True),
        (docstring_violations, "megazero.ops.x", '"""Module."""\ndef _f(): pass', False),
        (size_violations, "megazero.ops.x", "x = 1\n" * 400, True),
        (size_violations, "megazero.ops.x", "x = 1\n" * 399, False),
        (size_violations, "megazero.ops.x", class_of(range(13)), True),
        (size_violations, "megazero.ops.x", "@dataclass\n" + class_of(range(13)), True),
        (size_violations, "megazero.ops.x", class_of(range(12)), False),
        (size_violations, "megazero.ops.x", class_of(range(12)) + "    def _m(self): pass\n", False),
        (size_violations, "megazero.ops.x", "def f():\n" + "    x = 1\n" * 74, True),
        (size_violations, "megazero.ops.x", "def f():\n" + "    x = 1\n" * 73, False),
    ],
)
def test_each_check_tells_an_offender_from_a_neighbour(check, module, text, offends):
    assert bool(list(check(Source(module, text)))) is offends


@pytest.mark.parametrize(
    "check",
    [import_violations, global_violations, docstring_violations, size_violations, distributed_violations],
)
def test_megazero_keeps_it(check):
    assert [violation for source in sources("megazero") for violation in check(source)] == []


@pytest.mark.parametrize(
    "check",
    [tool_violations, global_violations, docstring_violations, size_violations, distributed_violations],
)
def test_data_tools_keep_it(check):
    assert [violation for source in sources("megazero/data_tools") for violation in check(source)] == []


@over_table(
    ("files", "offends"),
    [
        (dict.fromkeys(("megazero.p.x_1", "megazero.p.x_2", "megazero.p.x_3"), ""), True),
        (dict.fromkeys(("megazero.p.x", "megazero.p.x_1", "megazero.p.x_2"), ""), True),
        (dict.fromkeys(("megazero.p.x", "megazero.p.x_1", "megazero.q.x_2"), ""), False),
        (dict.fromkeys(("megazero.p.x", "megazero.p.x1", "megazero.p.x_2"), ""), False),
    ],
)
def test_a_folder_written_as_a_prefix_is_found(files, offends):
    assert bool(list(disguised_folders([Source(module, text) for module, text in files.items()]))) is offends


def test_no_folder_is_written_as_a_prefix():
    assert list(disguised_folders(sources("megazero"))) == []


def test_every_package_has_a_level_and_every_level_a_package():
    units = {unit_of(module) for module in MODULES} - {None}
    assert units == set(LEVELS)
    assert {*TOOLS_MAY_IMPORT, *(unit for pair in SAME_LEVEL for unit in pair)} <= units


def import_graph(files: Iterable[Source]) -> dict[str, set[str]]:
    """Module -> the modules that it imports, in functions and for types too.

    A name imported from a package is that package's.
    """
    known = {source.module for source in files}

    def module_of(target: str) -> str:
        return target if target in known else target.rpartition(".")[0]

    return {
        source.module: known
        & {module_of(each.target) for each in source.imports() if each.target not in COMPILED}
        for source in files
    }


@pytest.mark.parametrize(
    "back",
    ["import megazero.a", "def f():\n    import megazero.a", "if TYPE_CHECKING:\n    import megazero.a"],
)
def test_a_cycle_of_imports_is_found(back):
    files = [Source("megazero.a", "from megazero.b import x"), Source("megazero.b", back)]
    assert find_cycle(import_graph(files)) == ["megazero.a", "megazero.b", "megazero.a"]


def test_imports_have_no_cycle():
    assert find_cycle(import_graph(sources("megazero"))) == []


def test_only_assemble_knows_all_parts():
    """No other file imports every package of level 1 to 3."""
    parts = {unit for unit in PACKAGES if 1 <= LEVELS[unit] <= 3}
    for source in sources("megazero"):
        met = parts & {unit_of(each.target) for each in source.imports()}
        assert (met == parts) <= (source.module == "megazero.train.assemble"), source.module


# The rooms of `train`, from the lowest; modules at its top are between guards and tasks.
ROOMS = ("step", "parts", "observe", "resume", "guards", "", "finetuning")


def room_violations(source: Source) -> Iterator[str]:
    """Imports within `train` that go up from one room to another."""
    own = train_room_of(source.module)
    for each in source.imports():
        room = train_room_of(each.target)
        if own is not None and room is not None and ROOMS.index(room) > ROOMS.index(own):
            yield f"{source.module}:{each.line} imports {each.target}"


def train_room_of(module: str) -> str | None:
    """The room of a dotted name within `train`, "" for its top; None outside."""
    parts = module.split(".")
    if parts[:2] != ["megazero", "train"] or len(parts) < 3:
        return None
    return parts[2] if parts[2] in ROOMS else ""


@over_table(
    ("module", "text", "offends"),
    [
        ("megazero.train.step.x", "from megazero.train.parts.y import z", True),
        ("megazero.train.guards.x", "from megazero.train.loop import Loop", True),
        ("megazero.train.loop", "from megazero.train.guards.x import y", False),
        ("megazero.train.resume.x", "from megazero.train.resume.y import z", False),
    ],
)
def test_an_import_to_a_higher_room_is_found(module, text, offends):
    assert bool(list(room_violations(Source(module, text)))) is offends


def test_rooms_import_downwards():
    assert [violation for source in sources("megazero/train") for violation in room_violations(source)] == []


FAMILY_WORDS = re.compile(r"\b(GPT|BERT|T5)(?![-\w])|megazero\.models\.(gpt|bert|t5)\b")


def family_violations(source: Source) -> Iterator[str]:
    """Code that names a model family where a table does: docstrings and messages may tell of one."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and FAMILY_WORDS.fullmatch(node.id):
            yield f"{source.module}:{node.lineno} names {node.id}"
    for each in source.imports():
        if FAMILY_WORDS.search(each.target) or FAMILY_WORDS.fullmatch(each.target.rpartition(".")[2]):
            yield f"{source.module}:{each.line} imports {each.target}"


@over_table(
    ("text", "offends"),
    [
        ("from megazero.models import GPT", True),
        ("from megazero.models.gpt import gpt_blocks", True),
        ("def f(x): return isinstance(x, GPT)", True),
        ("from megazero.models import Batch", False),
        ("from megazero.formats.hf.gpt2 import GPT2", False),
        ("x = 'a GPT'", False),
    ],
)
def test_a_family_named_in_code_is_found(text, offends):
    assert bool(list(family_violations(Source("megazero.train.x", text)))) is offends


def test_only_the_table_names_a_family():
    allowed = {"models", "data"}
    found = [v for s in sources("megazero") if unit_of(s.module) not in allowed for v in family_violations(s)]
    assert {violation.partition(":")[0] for violation in found} == {"megazero.train.parts.families"}


def imported(module: str) -> ModuleType | None:
    """A module of the package; None if it needs a library of an extra that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return None


def test_doors_are_known_and_lead_to_what_they_show():
    opened = [(s.module, annex, names) for s in sources("megazero") for annex, names in s.doors()]
    assert {room: annex for room, annex, _ in opened} == DOORS
    for room, annex, names in opened:
        for name in names if imported(annex) else ():
            shown = getattr(importlib.import_module(room), name)
            assert shown is getattr(importlib.import_module(annex), name)
        with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'missing'"):
            _ = importlib.import_module(room).missing


def test_doors_open_nothing_before_they_are_asked():
    code = f"import {', '.join(DOORS)}, sys; sys.exit('megazero.deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@over_table(
    ("module", "text", "offends"),
    [
        ("megazero.zero.x", "from megazero.deepspeed.zero import Init", True),
        ("megazero.ops.x", "def f():\n    import megazero.inference", True),
        ("megazero.config.tree", "from megazero.config.deepspeed import x", True),
        ("megazero.config.resolve", "from megazero.config.deepspeed import x", False),
        ("megazero.train.x", "from megazero.train.guards.guard import x", False),
        ("megazero.inference.x", "from megazero.formats.hf import x", False),
    ],
)
def test_a_core_room_that_imports_an_annex_is_found(module, text, offends):
    assert bool(list(annex_violations(Source(module, text)))) is offends


def test_a_name_of_an_annex_is_found_behind_a_facade(monkeypatch):
    monkeypatch.setattr(house, "facades", lambda: {"megazero.mpu.X": "megazero.mpu.watch.X"})
    assert list(annex_violations(Source("megazero.pipeline.x", "from megazero.mpu import X")))


def test_no_core_room_imports_an_annex():
    """But at the sockets that docs/house.md names."""
    assert [violation for source in sources("megazero") for violation in annex_violations(source)] == []


def test_every_module_is_in_a_room_of_the_house():
    assert [module for module in MODULES if room_of(module) is None] == []
    assert {room.name for room in rooms()} == lines_by_room().keys()


def test_the_figures_of_the_house_are_about_right():
    counts = lines_by_room()
    wrong = [room.name for room in rooms() if abs(counts[room.name] - room.lines) > max(50, room.lines / 10)]
    assert wrong == [], f"figures in {PAGE.name} are old; `python -m tests.house` writes them anew"


def test_each_annex_keeps_to_its_budget():
    counts = lines_by_room()
    over = {room.name: counts[room.name] - room.lines for room in rooms() if room.annex}
    over = {name: lines for name, lines in over.items() if lines > 0}
    assert over == {}, (
        f"annexes are over their budgets in {PAGE.name}, by so many lines; delete as many, or raise the "
        "budget in a decision record that says what the lines are for and which others left"
    )


def test_the_core_keeps_to_its_budget():
    lines = core_lines()
    assert lines <= budget(), (
        f"the core has {lines:,} lines, its budget in {PAGE.name} is {budget():,}; move what a run can do "
        "without to an annex, or raise the budget in a decision record that says what the lines are for"
    )
    assert lines > budget() - 1000, "the core has shrunk: `python -m tests.house` lowers its budget"


def mutable(value: object) -> bool:
    """Whether a module-level value could carry state from one call to another."""
    if isinstance(value, tuple):
        return any(mutable(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return not value.__dataclass_params__.frozen
    if isinstance(value, (type, enum.Enum)):
        return False
    if callable(getattr(value, "cache_clear", None)):
        return True
    return type(value).__name__ in {
        *("list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"),
        *("ndarray", "Tensor", "Parameter", "Generator", "ContextVar", "local", "WeakKeyDictionary"),
        *("WeakValueDictionary", "count", "iterator", "generator", "ChainMap", "array", "SimpleNamespace"),
    }


def names_bound_by(source: Source) -> Iterator[str]:
    """The names a module's own statements bind at its level, imports left out."""
    for node in source.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
    for node in source.tree.body:
        for target in (
            ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.If, ast.Try)) else ()
        ):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                yield target.id


@over_table("value", [[], {}, set(), ([],), importlib.import_module("functools").cache(len)])
def test_a_mutable_value_is_known(value):
    assert mutable(value)


@over_table("value", [1, "x", (), frozenset(), len, int])
def test_an_immutable_value_is_known(value):
    assert not mutable(value)


def test_nothing_mutable_lives_at_module_level():
    found = []
    for source in sources("megazero"):
        module = imported(source.module)
        for name in set(names_bound_by(source)) - {"__all__"}:
            if hasattr(module, name) and mutable(getattr(module, name)):
                found.append(f"{source.module}.{name}")
    assert found == []


def test_a_configuration_and_a_launch_need_no_torch():
    imported = {each.target.split(".")[0] for s in sources("megazero/config") for each in s.imports()}
    assert "torch" not in imported
    doors = "megazero.config, megazero.errors, megazero.cli, megazero.commands.launch"
    code = f"import {doors}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_start_waits_for_no_compiler_and_no_library_of_a_few_commands():
    """torch's compiler alone takes a second; who compiles, plots or converts imports it then."""
    late = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "matplotlib", "pandas")
    modules = "megazero.train.pretraining, megazero.deepspeed"
    code = f"import {modules}, sys; print(*(name for name in {late} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_operator_is_one_file():
    """Its formula, kernels, table and examples; attention is a folder, and `update` knows no optimizer."""
    folders = {path.parent.name for path in (ROOT / "megazero/ops").glob("*/*.py")}
    assert folders == {"attention"}
    for operator in importlib.import_module("megazero.ops").operators():
        module = inspect.getmodule(inspect.unwrap(operator.reference))
        if module.__name__.split(".")[2] not in folders:
            assert operator in vars(module).values(), operator.name
            assert list(operator.examples()) or operator.name == "update", operator.name


def test_every_flag_is_documented():
    from megazero.config.fields import FIELDS

    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    flags = {name for spec in FIELDS for name in (spec.flag, *spec.aliases, *spec.switches)}
    assert {flag for flag in flags if f"`{flag}`" not in page} == set()


@over_table("package", PACKAGES)
def test_every_package_has_its_page(package):
    page = (ROOT / "docs" / f"{package}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {package}")
    assert f"({package}.md)" in (ROOT / "docs/packages.md").read_text(encoding="utf-8")


def text_files() -> Iterator[tuple[str, str]]:
    """The project's own texts, by path."""
    folders = (
        "megazero",
        "data_tools",
        "csrc",
        "scripts",
        "examples_3d",
        "tests",
        "benchmarks",
        "proofs",
        "docs",
        ".ci",
    )
    suffixes = {".py", ".md", ".sh", ".yaml", ".txt", ".toml", ".hpp", ".cpp", ".cu", ".h", ".json", ""}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    for path in sorted(paths):
        # A worktree's .git is a file that says where the repository is.
        ours = path.name != ".git" and "__pycache__" not in path.parts
        if ours and path.is_file() and path.suffix in suffixes:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_no_text_names_a_place_of_one_machine():
    """Taken apart here so that this file does not match."""
    places = ["/" + "work" + "/", "/" + "tmp" + "/mz", "/" + "root" + "/", "/" + "home" + "/"]
    found = [f"{path}: {place}" for path, text in text_files() for place in places if place in text]
    assert found == []
