"""The conventions of CONTRIBUTING.md, held over the sources: constructors, words, annotations, Protocols.

Each check is a function from sources to violations, tried on a small offender first, then on the project.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest

from tests.class_tree import ClassTree
from tests.source_tree import ROOT, Source, sources
from tests.tables import over_table

pytestmark = pytest.mark.fast

MOST_PARAMETERS = 7
# Constructors with more parameters: each is a table's row, a file's record or a set of tensors of which no
# part is a thing by itself. The list only shrinks: a count may be lowered, a class taken off.
LARGE_CONSTRUCTORS = {
    "megazero.formats.hf.architecture.Architecture": 20,
    "megazero.commands.checkpoint.summary.Summary": 9,  # printed as JSON, as are the facts of a machine
    "megazero.config.deepspeed.extras.Extras": 15,
    "megazero.config.deepspeed.read.DeepSpeedSettings": 12,
    "megazero.config.deepspeed.section.KeyRow": 13,
    "megazero.config.fields.FieldSpec": 23,  # with what a setting says it is for, which 46 lists said before
    "megazero.config.flags.Scan": 11,
    "megazero.data.t5.dataset.T5Settings": 9,
    "megazero.deepspeed.config.settings.UserSettings": 11,
    "megazero.env.facts.Environment": 15,
    "megazero.env.facts.Versions": 12,
    "megazero.layers.linear.ColumnParallelLinear": 8,
    "megazero.models.pairs.layers.PairInputs": 12,
    "megazero.mpu.param_spec.ParamSpec": 11,
    "megazero.mpu.watch.report.Report": 9,
    "megazero.serving.engine.Counters": 8,  # shown as they are, under the names that dashboards know
    "megazero.serving.wanted.Wanted": 11,  # what a request may ask for, by the names that clients know
}
MOST_LARGE = 17
# Signatures of DeepSpeed's, which its users' scripts call by position and by name: they are not ours to
# divide. Each is that of the class of this name in DeepSpeed 0.18.2, parameter for parameter.
FOREIGN_SIGNATURES = {
    "megazero.deepspeed.optimizers.adam.DeepSpeedCPUAdam": 9,
    "megazero.deepspeed.optimizers.adam.FusedAdam": 9,
    "megazero.deepspeed.optimizers.fused.FusedLamb": 12,  # with apex's `use_nvlamb`
    "megazero.deepspeed.models.linear.OptimizedLinear": 8,
    "megazero.deepspeed.moe.layer.MoE": 15,
    "megazero.deepspeed.schedules.one_cycle.OneCycle": 14,
    "megazero.deepspeed.pipe.module.PipelineStage": 12,  # there `PipelineModule`
    # With the seed and the layer of random blocks, which are keywords.
    "megazero.deepspeed.legacy.sparse.configs.BSLongformerSparsityConfig": 9,
    "megazero.deepspeed.legacy.sparse.configs.BigBirdSparsityConfig": 9,
    "megazero.deepspeed.legacy.sparse.configs.FixedSparsityConfig": 10,
    "megazero.deepspeed.legacy.sparse.configs.VariableSparsityConfig": 11,
    "megazero.deepspeed.legacy.transformer.DeepSpeedTransformerConfig": 20,
    "megazero.deepspeed.zero.init.Init": 16,
    "megazero.deepspeed.zero.tiling.TiledLinear": 10,
}

# A class of the package with this name, a leading underscore aside, is in this module and nowhere else.
OWNERS = {
    "Batch": "megazero.models.batch",
    "Block": "megazero.models.chunk",
    "Bucket": "megazero.zero.bucket",
    "Chunk": "megazero.pipeline.chunk",
    "Group": "megazero.mpu.group",
    "MicroBatch": "megazero.models.batch",
    "Placement": "megazero.layers.placement",
    "Program": "megazero.pipeline.actions",
    "Progress": "megazero.config.steps",
    "Schedule": "megazero.pipeline.actions",
    "Step": "megazero.config.steps",
    "Unit": "megazero.zero.unit",
}
# Words of this project's past that the field does not use; no class or module is named by one of them again.
RETIRED = {
    *("asleep", "board", "crew", "dealing", "ending", "examination", "horizon", "inquest", "lane", "lesson"),
    *("lessons", "milestone", "papertier", "party", "presence", "resident", "rise", "rung", "rungs"),
    *("stretch", "taught", "traveller", "visits", "wire", "wires", "wishes"),
}
VAGUE_OPENINGS = {"What", "That", "Those", "Of"}
VAGUE_NAMES = {"found", "each", "told"}
CODE = re.compile(r"(`+).+?\1|^ {4}[^\n]+", re.DOTALL | re.MULTILINE)
MARKDOWN_REFERENCE = re.compile(r"\[[^\[\]]+\]\s?\[[^\[\]]*\]")  # `[text][target]`, also `[PAD] [UNK]`
FAMILY_NAMES = {"gpt", "bert", "t5"}
# Where a family's name decides: its own code, the configuration and its rules, the table of families, and
# the corpora that ablations make for it.
MAY_NAME_FAMILIES = (
    "megazero.ablate.corpus",
    "megazero.config",
    "megazero.data",
    "megazero.models",
    "megazero.spec",
    "megazero.train.parts.families",
)
# Classes that have the members of a Protocol without being meant for it.
LOOK_ALIKES = {
    "megazero.mpu.group.Work": {
        "megazero.launch.child.Child",
        "megazero.mpu.thread_turns.Ticket",
        "megazero.pipeline.executor._Sent",
        "megazero.zero.bucket.Bucket",
        "megazero.zero.reduce._BucketSums",
        "megazero.zero.store.disk._Requests",
    },
}


def constructor_sizes(tree: ClassTree) -> dict[str, int]:
    """Class -> the number of its constructor's parameters; only classes with a constructor of their own."""
    sizes = {}
    for name, node in tree.nodes.items():
        init = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
        if isinstance(init, ast.FunctionDef):
            sizes[name] = len(parameters(init)) - 1
        elif is_record(node):
            records = (tree.nodes[base] for base in tree.ancestors(name) if is_record(tree.nodes[base]))
            sizes[name] = len({field for record in records for field in fields_of(record)})
    return sizes


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass or a NamedTuple."""
    decorated = any(re.match(r"(dataclasses\.)?dataclass\b", ast.unparse(d)) for d in node.decorator_list)
    return decorated or "NamedTuple" in map(ast.unparse, node.bases)


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a dataclass that its constructor takes."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            kind, default = ast.unparse(part.annotation), ast.unparse(part.value) if part.value else ""
            if "ClassVar" not in kind and kind != "KW_ONLY" and "init=False" not in default:
                yield ast.unparse(part.target)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All parameters of a function, `self` included."""
    args = node.args
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]


def large_constructors(sizes: dict[str, int], listed: dict[str, int]) -> Iterator[str]:
    """Constructors that are larger than they may be, and entries of the list that are out of date."""
    for name, size in sorted(sizes.items()):
        if size > max(MOST_PARAMETERS, listed.get(name, 0)):
            yield f"{name} takes {size} parameters: a concept is missing"
    for name, limit in sorted(listed.items()):
        size = sizes.get(name, 0)
        if size <= MOST_PARAMETERS:
            yield f"{name} takes {size} parameters; take it off the list"
        elif size < limit:
            yield f"{name} takes {size} parameters; lower its count on the list"


def glossary_violations(source: Source) -> Iterator[str]:
    """Classes that take a word from its owner, and retired words in the names of classes and modules."""
    for node in source.classes():
        owner = OWNERS.get(node.name.lstrip("_"))
        if owner not in (None, source.module):
            yield f"{source.module}:{node.lineno} {node.name} is a word of {owner}"
    names = [*source.module.split("."), *(node.name for node in source.classes())]
    for name in names:
        for word in words_of(name) & RETIRED:
            yield f"{source.module}: {name} says {word}, which the field does not"


def words_of(name: str) -> set[str]:
    """The words of a class's or a module's name, and their pairs, in lower case."""
    name = name.replace("TensorBoard", "Tensorboard")
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
    return {*words, *(first + second for first, second in pairwise(words))}


def annotation_violations(source: Source) -> Iterator[str]:
    """Functions of which a parameter or the result has no type."""
    for node in source.functions():
        bare = [parameter.arg for parameter in parameters(node) if parameter.annotation is None]
        missing = [name for name in bare if name not in ("self", "cls")]
        missing += ["the result"] if node.returns is None and node.name != "__init__" else []
        if missing:
            yield f"{source.module}:{node.lineno} {node.name} does not annotate {', '.join(missing)}"


def word_violations(source: Source) -> Iterator[str]:
    """Docstrings without a subject or that the site would misread, and names that say nothing."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text, name = ast.get_docstring(node) or "", getattr(node, "name", "the module")
            words = text.split()
            if words and words[0] in VAGUE_OPENINGS:
                yield f"{source.module}: the docstring of {name} begins with {' '.join(words[:3])}"
            for reference in MARKDOWN_REFERENCE.findall(CODE.sub("", text)):
                yield f"{source.module}: the site takes {reference} in the docstring of {name} for a link"
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else None
        bound = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if bound and name in VAGUE_NAMES:
            yield f"{source.module}:{node.lineno} binds `{name}`"


def family_name_violations(source: Source) -> Iterator[str]:
    """Decisions by the name of a model family: comparisons, cases of a match, keys of a table."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Compare():
                deciding = [node.left, *node.comparators]
            case ast.match_case():
                deciding = [node.pattern]
            case ast.Dict():
                deciding = [key for key in node.keys if key is not None]
            case _:
                continue
        for part in (part for operand in deciding for part in ast.walk(operand)):
            if isinstance(part, ast.Constant) and part.value in FAMILY_NAMES:
                yield f"{source.module}:{part.lineno} decides by the family's name {part.value!r}"


def undeclared_followers(files: Iterable[Source]) -> Iterator[str]:
    """Classes with all public members of a Protocol that are not declared to follow it, or one with more."""
    tree = ClassTree(files)
    protocols = {name: tree.members(name) for name in tree.nodes if tree.is_protocol(name)}
    for name in sorted(tree.nodes.keys() - protocols.keys()):
        declared = tree.protocols_of(name)
        for protocol, members in sorted(protocols.items()):
            follows = members and members <= tree.members(name)
            known = any(members <= tree.members(other) for other in declared)
            if follows and not known and name not in LOOK_ALIKES.get(protocol, ()):
                yield f"{name} must be declared to follow {protocol}"


def late_paths(name: str, text: str) -> Iterator[str]:
    """Scripts of the repository that import its modules before they say where these are."""
    numbered = list(enumerate(text.splitlines(), 1))
    imports = [n for n, line in numbered if re.match(r"from (tests|proofs|benchmarks)\b", line)]
    paths = [n for n, line in numbered if line.startswith("sys.path.insert")]
    if f"python {name}" in text and imports and min(paths, default=len(numbered)) > imports[0]:
        yield f"{name}:{imports[0]} imports before it extends the path"


def unheld(check: Callable[[Source], Iterable[str]], *folders: str) -> list[str]:
    """All violations of a check in these folders of the project."""
    return [violation for source in sources(*folders) for violation in check(source)]


@over_table(
    ("check", "text", "offends"),
    [
        (glossary_violations, "class Bucket: pass", True),
        (glossary_violations, "class _Bucket: pass", True),
        (glossary_violations, "class BucketLayout: pass", False),
        (glossary_violations, "class Wire: pass", True),
        (glossary_violations, "class ExactWire: pass", True),
        (glossary_violations, "class PaperTier: pass", True),
        (glossary_violations, "class WireTransfer: pass", True),
        (glossary_violations, "class Rewired: pass", False),
        (glossary_violations, "class TensorBoardMonitor: pass", False),
        (annotation_violations, "def f(x): return x", True),
        (annotation_violations, "def f(x: int): return x", True),
        (annotation_violations, "def f(*x, y: int) -> int: return y", True),
        (annotation_violations, "class C:\n    def f(self) -> int: return 1", False),
        (annotation_violations, "class C:\n    def __init__(self, x: int): pass", False),
        (annotation_violations, "f = lambda x: x", False),
        (word_violations, '"""What a unit is."""', True),
        (word_violations, 'def f():\n    """Of a unit, its size."""', True),
        (word_violations, 'class C:\n    """That of a unit."""', True),
        (word_violations, 'def f():\n    """Whatever a unit holds."""', False),
        (word_violations, 'def f():\n    """The ids of [PAD] [UNK]."""', True),
        (word_violations, 'def f():\n    """The ids of `[PAD] [UNK]`, of [CLS] and [SEP]."""', False),
        (word_violations, "def f():\n    found = 1", True),
        (word_violations, "def f(told): pass", True),
        (word_violations, "[each for each in ()]", True),
        (word_violations, "def f(x):\n    return x.found", False),
        (family_name_violations, "x = model.family == 'bert'", True),
        (family_name_violations, "x = model.family in ('bert', 't5')", True),
        (family_name_violations, "match family:\n    case 'gpt' | 't5': pass", True),
        (family_name_violations, "x = {'gpt': 1}[family]", True),
        (family_name_violations, "x = family_of(model, 'gpt')", False),
        (family_name_violations, "x = name == 'gpt2'", False),
    ],
)
def test_each_check_tells_an_offender_from_a_neighbour(check, text, offends):
    assert bool(list(check(Source("megazero.train.x", text)))) is offends


def test_the_name_of_a_module_is_looked_at():
    assert list(glossary_violations(Source("megazero.zero.wires.exact", "")))
    assert list(glossary_violations(Source("megazero.config.horizon", "")))


MANY = ", ".join(f"x{number}" for number in range(8))
FIELDS = "\n".join(f"    x{number}: int" for number in range(8))


@over_table(
    ("text", "size"),
    [
        (f"class C:\n    def __init__(self, {MANY}): pass", 8),
        (f"class C:\n    def __init__(self, *, {MANY}): pass", 8),
        ("class C:\n    def __init__(self, x, *y, **z): pass", 3),
        (f"@dataclass(frozen=True)\nclass C:\n{FIELDS}\n    y: ClassVar[int] = 1", 8),
        (f"@dataclass\nclass B:\n{FIELDS}\n@dataclass\nclass C(B):\n    x0: int\n    y: int", 9),
        (f"class C(NamedTuple):\n{FIELDS}", 8),
    ],
)
def test_the_parameters_of_a_constructor_are_counted(text, size):
    tree = ClassTree([Source("megazero.train.x", text)])
    assert constructor_sizes(tree)["megazero.train.x.C"] == size


@over_table(
    ("size", "listed", "says"),
    [
        (7, None, ""),
        (8, None, "a concept is missing"),
        (8, 8, ""),
        (9, 8, "a concept is missing"),
        (8, 9, "lower its count"),
        (7, 8, "take it off the list"),
    ],
)
def test_the_list_of_large_constructors_only_shrinks(size, listed, says):
    violations = list(large_constructors({"C": size}, {} if listed is None else {"C": listed}))
    assert bool(violations) is bool(says)
    assert all(says in violation for violation in violations)


PROTOCOL = "class Reader(Protocol):\n    size: int\n    def read(self): ...\n"
BODY = "    def __init__(self):\n        self.size = 1\n    def read(self): pass\n"


@over_table(
    ("text", "offends"),
    [
        (f"class C:\n{BODY}", True),
        (f"class C(Reader):\n{BODY}", False),
        (f"class C(Reader[int]):\n{BODY}", False),
        (f"class B(Reader):\n{BODY}class C(B): pass\n", False),
        (f"class C:\n{BODY}_: type[Reader] = C", False),
        (f"class C:\n{BODY}if TYPE_CHECKING:\n    _: tuple[type[Reader], ...] = (C,)", False),
        (f"class More(Reader, Protocol):\n    name: str\nclass C(More):\n{BODY}    name = ''\n", False),
        ("class C:\n    def read(self): pass\n", False),
    ],
)
def test_a_class_that_follows_a_protocol_in_silence_is_found(text, offends):
    files = [
        Source("megazero.a", PROTOCOL),
        Source("megazero.b", f"from megazero.a import Reader\n{text}"),
    ]
    assert bool(list(undeclared_followers(files))) is offends


def test_words_have_one_owner_and_retired_ones_stay_away():
    tree = ClassTree(sources("megazero"))
    assert {f"{module}.{name}" for name, module in OWNERS.items()} - tree.nodes.keys() == set()
    assert unheld(glossary_violations, "megazero") == []


def test_constructors_are_small():
    tree = ClassTree(sources("megazero"))
    listed = {**LARGE_CONSTRUCTORS, **FOREIGN_SIGNATURES}
    # A spec has a field for each fact of its part of a model, and functions make it by name.
    sizes = {n: size for n, size in constructor_sizes(tree).items() if not n.startswith("megazero.spec.")}
    assert list(large_constructors(sizes, listed)) == []
    assert len(LARGE_CONSTRUCTORS) <= MOST_LARGE


def test_every_function_is_annotated():
    assert unheld(annotation_violations, "megazero") == []


def test_docstrings_and_names_say_what_they_mean():
    assert unheld(word_violations, "megazero", "data_tools") == []


def test_who_follows_a_protocol_says_so():
    assert list(undeclared_followers(sources("megazero"))) == []


def test_only_the_table_decides_by_a_family():
    violations = unheld(family_name_violations, "megazero")
    assert [line for line in violations if not line.startswith(MAY_NAME_FAMILIES)] == []


def test_scripts_find_the_modules_of_the_repository():
    path, needs = "sys.path.insert(0, str(ROOT))", "from tests.layouts import layout"
    assert list(late_paths("proofs/a.py", f"# python proofs/a.py\n{needs}\n{path}"))
    assert not list(late_paths("proofs/a.py", f"# python proofs/a.py\n{path}\n{needs}"))
    for folder in ("proofs", "benchmarks", "scripts"):
        for script in (ROOT / folder).glob("*.py"):
            assert list(late_paths(f"{folder}/{script.name}", script.read_text(encoding="utf-8"))) == []
