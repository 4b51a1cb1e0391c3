"""What pages claim is what the parser, the registries and the table of features say.

Sentences that were once in a page and had become false are the offenders on which each check is tried.
"""

from __future__ import annotations

import re

import pytest

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.formats.hf.architectures import ARCHITECTURES, LACKING
from tests.docs.claims import HISTORY, OTHER_WORDS, TRUE, choices, lacks, refusals, taken_flags, verbs
from tests.docs.pages import ROOT, Document, documents
from tests.tables import over_table

PAGES = {page.path: page for page in documents() if not page.path.startswith(HISTORY)}
EVERY_PAGE = over_table("page", PAGES.values(), ids=lambda page: page.path)
OF_OTHERS = ("docs/foreign_flags.md", "docs/dialects.md", "docs/launch_lines.md")
"""Pages of flags that are refused."""
STEMS = {
    "GPT2": "GPT-2",
    "Bloom": "BLOOM",
    "OPT": "OPT",
    "GPTNeoX": "GPT-NeoX",
    "Falcon": "Falcon",
    "Llama": "Llama",
    "Mistral": "Mistral",
    "Mixtral": "Mixtral",
    "Qwen2": "Qwen2",
    "Qwen2Moe": "Qwen2 .*MoE",
    "Qwen3": "Qwen3",
    "Qwen3Moe": "Qwen3 .*MoE",
    "Olmo2": "OLMo-2",
    "Olmoe": "OLMoE",
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 2 and 3",
    "Phi3": "Phi-3",
    "GptOss": "gpt-oss",
    "Granite": "Granite",
    "DeepseekV2": "DeepSeek-V2",
    "DeepseekV3": "DeepSeek-V2 and V3",
    "Mamba2": "Mamba-2",
    "NemotronH": "Nemotron-H",
    "Bamba": "Bamba",
    "Cohere": "Cohere",
    "Cohere2": r"Cohere \(1 and 2\)",
    "SmolLM3": "SmolLM3",
    "Apertus": "Apertus",
    "T5": "T5",
    "Bert": "BERT",
    "MegatronBert": "BERT",
}
"""The beginning of a class of transformers -> how pages that list models write it."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
HEADS = r"(?:ForCausalLM|LMHeadModel|ForPreTraining|ForMaskedLM|For\w+)$"


@over_table(
    ("text", "problem"),
    [
        ("Weights of any sizes; optimizer states are not imported.", "optimizer states"),
        ("| T5, multimodal models | not built; refused by name |", "t5"),
        (
            "| `--o-groups` | refused | linear and sparse attention are not built; leave it out |",
            "sparse attention",
        ),
        ("| `--tile-factor` | refused | layers are not computed in tiles; cut them |", "tiles"),
        ("leave it: neither settings nor tokenizers are kept in checkpoints", "tokenizers"),
        ("The folders of these models are not all\nread yet: some are refused.", "folders of these models"),
        ("| `msamp` | | refused unless false: fp8 is not offered here |", "fp8"),
        (
            "## Features not built\n\n| Feature | Lines |\n| --- | --- |\n| multi-token prediction | 2 |\n",
            "multi-token",
        ),
        ("Vision models are not offered. `--mlp-tiles` computes MLPs in tiles.", None),
        ("```\nT5 is not built\n```", None),
    ],
)
def test_what_is_said_to_lack(text: str, problem: str | None) -> None:
    problems = [*lacks(Document("page.md", f"# page\n\n{text}\n"))]
    assert (problems == []) if problem is None else (problems and problem in problems[0])


@over_table(
    ("text", "problem"),
    [
        (
            "Index files (`--train-doc-idx-path` and its like) are refused.",
            "`--train-doc-idx-path` is called refused",
        ),
        ("`--vision-pretraining` is refused.", None),
        ("Give `--vision-pretraining` and wait.", "`--vision-pretraining` is shown"),
        ("Save it with Megatron-LM's `--ckpt-convert-format torch_dist`.", None),
        ("`--lr 1` is a setting.", None),
    ],
)
def test_what_is_said_to_be_refused(text: str, problem: str | None) -> None:
    problems = [*refusals(Document("page.md", f"# page\n\n{text}\n"))]
    assert (problems == []) if problem is None else (problems and problem in problems[0])


@EVERY_PAGE
def test_nothing_that_there_is_is_said_to_lack(page: Document) -> None:
    assert [*lacks(page)] == []


@EVERY_PAGE
def test_flags_are_refused_or_taken_as_the_page_says(page: Document) -> None:
    if page.path not in OF_OTHERS:
        assert [*refusals(page)] == []


def test_what_the_checks_excuse_is_there() -> None:
    text = " ".join(" ".join(page.text.replace("|", " ").split()) for page in PAGES.values())
    assert [words for words in TRUE if words not in text] == []
    assert [name for name in OTHER_WORDS.values() if name not in taken_flags() and name not in verbs()] == []


def test_the_page_of_hugging_face_has_a_row_for_each_class() -> None:
    rows = "\n".join(
        re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGES["docs/huggingface.md"].text, re.MULTILINE)
    )
    assert {*re.findall(r"`(\w+(?:LM|LMHeadModel|For\w+))`", rows)} == {a.name for a in ARCHITECTURES}
    held = re.search(
        r"\*\*Not held\*\* are (.+?): their classes", PAGES["docs/huggingface.md"].text, re.DOTALL
    )
    assert held is not None
    for name in LACKING:
        stem = re.sub(HEADS, "", name).removesuffix("2").replace("FalconH1", "Falcon-H1")
        assert stem in held[1], name


@pytest.mark.parametrize("path", ["docs/features.md", "docs/guides/convert.md"])
def test_a_list_of_models_has_all(path: str) -> None:
    (line,) = re.findall(r"[^\n|]*\bGPT-NeoX, Falcon, .+?(?=\||\n\n|directions)", PAGES[path].text, re.DOTALL)
    line = line.replace("\n", " ")
    stems = {re.sub(HEADS, "", a.name) for a in ARCHITECTURES}
    assert stems == {*STEMS}
    assert [stem for stem in sorted(stems) if not re.search(STEMS[stem], line)] == []


def test_no_script_names_a_few_of_the_models() -> None:
    """One said "GPT-2 or Llama" when thirty were read."""
    for path in (ROOT / "scripts").glob("*.sh"):
        for listed in re.findall(r"Hugging Face model \(([^)]*)\)", path.read_text(encoding="utf-8")):
            assert all(re.search(name, listed) for name in STEMS.values()), f"{path.name}: {listed}"


def test_the_page_of_verbs_has_all() -> None:
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", PAGES["docs/commands.md"].text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == {*verbs()}
    said = {
        (p.path, verb) for p in PAGES.values() for verb in re.findall(r"`megazero ([a-z][a-z-]+)", p.text)
    }
    assert {(path, verb) for path, verb in said if verb not in verbs()} == set()


@over_table(
    ("path", "pattern"),
    [
        ("setup.py", r'description="(.*)"'),
        ("mkdocs.yml", r"site_description: (.*)"),
        ("CITATION.cff", r"title: (.*)"),
        ("README.md", r"^# megazero\n\n(.*?)\n\n"),
        ("docs/index.md", r"^# megazero\n\n(.*?)\n\n"),
        ("docs/guides/coming_from_deepspeed.md", r"(A [^.]*) can also be trained by"),
    ],
)
def test_every_family_is_named(path: str, pattern: str) -> None:
    described = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)
    if described is None:
        assert path == "README.md"  # it may begin otherwise
    else:
        families = [family.upper() for family in choices("model", "family")]
        assert [family for family in families if family not in described[1].partition("\n\n")[0]] == []


def test_schedules_optimizers_and_rates_are_all_listed() -> None:
    features = PAGES["docs/features.md"].text
    schedules = [kind for kind in choices("parallel", "pipeline_schedule") if kind != "auto"]
    for page, text in [
        ("features", features),
        ("plan", PAGES["docs/plan.md"].text),
        ("guide", PAGES["docs/guides/from_megatron.md"].text),
    ]:
        assert [kind for kind in schedules if kind.lower() not in text.lower()] == [], page
    plain = (
        features.lower()
        .replace("1-bit ", "onebit-")
        .replace("0/1 adam", "zero-one-adam")
        .replace("adamw", "adam")
    )
    assert [name for name in choices("optimizer", "optimizer") if name not in plain] == []
    rates = plain.replace("cosine (with restarts", "cosine-restarts cosine").replace(
        "warmup-stable-decay", "wsd"
    )
    assert [name for name in choices("optimizer", "lr_decay_style") if name.lower() not in rates] == []


def test_deepspeeds_autotuning_and_imports_are_said_as_they_are() -> None:
    row = re.search(r"^\| Tune \|.*$", PAGES["docs/guides/coming_from_deepspeed.md"].text, re.MULTILINE)
    assert row is not None
    assert "megazero tune" in row[0]
    assert [path for path, page in PAGES.items() if re.search(r"changed\s+import\b", page.text)] == []


def test_numbers_in_pages() -> None:
    """Each is counted again; README may say them or not."""
    corpora = ("megatron_deepspeed", "megatron_lm_examples", "megatron_lm_tests")
    folder = ROOT / "tests/config/compat/corpus"
    lines = sum(len((folder / f"{name}.tsv").read_text(encoding="utf-8").splitlines()) for name in corpora)
    judged = re.findall(
        r"^\| Megatron[^|]*\| (\d+) \| (\d+) \|", PAGES["docs/launch_lines.md"].text, re.MULTILINE
    )
    studies = [path for path in (ROOT / "examples_3d/moe").glob("*.yaml") if not path.name.startswith("base")]
    schedules = len(choices("parallel", "pipeline_schedule")) - 1
    megatron = "docs/guides/from_megatron.md"
    for path, pattern, number in [
        (megatron, r"a row for each of some (\w+)", round(len(FOREIGN_FLAGS), -1)),
        (megatron, r"Of (\w+) launch lines", lines),
        (megatron, r"(\w+) are accepted as they are", sum(int(accepted) for _, accepted in judged)),
        ("docs/guides/experts.md", r"has (\w+) commented configurations", len(studies)),
        ("docs/index.md", r"(\w+) pipeline schedules", schedules),
        ("README.md", r"(\w+) pipeline schedules", schedules),
    ]:
        for said in re.findall(pattern, PAGES[path].text):
            assert said in (str(number), NUMBERS[number] if number < len(NUMBERS) else ""), (
                path,
                pattern,
                said,
            )


def test_examples_that_the_guide_lists_are_there_and_all() -> None:
    table = PAGES["docs/guides/coming_from_deepspeed.md"].text.partition("## Scripts to start from")[2]
    listed = {
        name
        for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+\.py)`", row)
    }
    assert listed == {path.name for path in (ROOT / "examples_3d/deepspeed").glob("*.py")}


def test_files_that_pages_name_exist() -> None:
    """Of Python alone, and of this project: data are the reader's."""
    folders = ("megazero", "tests", "data_tools", "scripts", "proofs", "benchmarks", "examples_3d")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    there = {path.name for path in [*paths, *ROOT.glob("*.py")]}
    theirs = {"analyze_data.py", "zero_to_torch.py", "pretrain_mamba.py", "pretrain_t5.py", "main.py"}
    named = {
        (path, name)
        for path, page in PAGES.items()
        if path not in ("docs/guides/coming_from_deepspeed.md", "docs/launch_lines.md")
        for name in re.findall(r"`(?:[\w.-]+/)*(\w+\.py)`", page.text)
    }
    assert {(path, name) for path, name in named if name not in there | theirs} == set()
    assert theirs <= {name for _, name in named} | {"pretrain_t5.py"}
