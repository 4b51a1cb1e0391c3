"""A notebook as a page of the site: its text, its code, and what the code printed and drew when it last ran.

Jupyter's own converters load scripts from elsewhere into the page; nothing here does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

Json = dict[str, object]


def notebook_page(source: str) -> str:
    """The Markdown of a notebook (`.ipynb`, format 4)."""
    pieces: list[str] = []
    for cell in json.loads(source)["cells"]:
        text = joined(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(text)
        elif cell["cell_type"] == "code" and text.strip():
            pieces.append(fenced(text, "python"))
            pieces += [shown for output in cell["outputs"] for shown in shown_output(output)]
    return "\n\n".join(pieces) + "\n"


def shown_output(output: Json) -> Iterator[str]:
    """What one output of a cell shows: a picture if it has one, else text."""
    if output["output_type"] == "stream":
        yield fenced(joined(output["text"]), "text")
        return
    data = output.get("data")
    if not isinstance(data, dict):
        return
    if "image/png" in data:
        yield f"![picture](data:image/png;base64,{joined(data['image/png']).replace(chr(10), '')})"
    elif "text/plain" in data:
        yield fenced(joined(data["text/plain"]), "text")


def joined(text: object) -> str:
    """The text of a field, which is one text or a list of lines."""
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def fenced(text: str, language: str) -> str:
    """A text as a block of code."""
    return f"````{language}\n{text.rstrip()}\n````"
