"""The page on inference: its examples run, and its table of families is that of the rows.

``python -m tests.deepspeed.test_inference_page`` writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from megazero.deepspeed.surface import Surface, read_names
from megazero.deepspeed.tensor_parallel.families import read_families

PAGE = Path(__file__).resolve().parents[2] / "docs/deepspeed/inference.md"
START, END = "<!-- families -->\n", "<!-- end -->\n"


def family_table() -> str:
    """The rows of the table of families, in Markdown."""
    lines = [
        "| Family | `model_type` | Outputs sliced | Inputs sliced, products summed | Fused |",
        "|---|---|---|---|---|",
    ]
    for row in read_families():
        columns = [
            row.types,
            (*row.names["query"], *row.names["key_value"], *row.names["up"], *row.names["tables"]),
            (
                *row.names["output"],
                *row.names["down"],
                *(f"{name}.down_proj" for name in row.names["experts"]),
            ),
            (*row.names["fused"], *(f"{name}=halves" for name in row.names["halves"])),
        ]
        columns[1] += tuple(f"{name}.gate_up_proj" for name in row.names["experts"])
        cells = [", ".join(f"`{name}`" for name in names) for names in columns]
        lines.append(f"| {row.family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page with the table as the rows say."""
    before, rest = text.split(START)
    return before + START + family_table() + END + rest.split(END)[1]


def test_the_table_is_that_of_the_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text


def test_its_examples_run():
    names: dict[str, object] = {"deepspeed": Surface(read_names()).as_module("deepspeed")}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, names)
    assert tuple(names["tokens"].shape) == (2, 12)  # type: ignore[attr-defined]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
