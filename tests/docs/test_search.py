"""What the search of the site shows first; the engine itself is asked in test_site.py."""

from __future__ import annotations

from scripts.docs_search import brief, flag_entries, searchable, titled, weight, with_flag_anchors
from tests.tables import over_table

TABLE = """<h2 id="zero">ZeRO</h2>
<table>
<tr>
<th>Flag</th>
<th>Meaning</th>
</tr>
<tr>
<td><code>--zero-stage</code>, <code>--fsdp</code> = 3</td>
<td>what is sharded; <code>--fsdp</code> is all</td>
</tr>
</table>
<table>
<tr>
<td>nothing</td>
<td>else</td>
</tr>
</table>"""


def test_flags_get_anchors_and_their_tables_are_left_out() -> None:
    page = with_flag_anchors(TABLE)
    assert page.count('data-search-exclude="true"') == 1
    assert '<td><code id="--zero-stage">--zero-stage</code>, <code id="--fsdp">--fsdp</code> = 3</td>' in page
    assert "<code>--fsdp</code> is all" in page
    assert with_flag_anchors(TABLE[TABLE.rindex("<table>") :]) == TABLE[TABLE.rindex("<table>") :]


def test_every_flag_is_an_entry_with_its_row() -> None:
    row = "<code>--zero-stage</code>, <code>--fsdp</code> = 3 what is sharded; <code>--fsdp</code> is all"
    assert [*flag_entries("configuration/", with_flag_anchors(TABLE))] == [
        {"location": f"configuration/#{name}", "title": name, "text": f"<p>{row}</p>", "tags": tags}
        for name, tags in (("--zero-stage", ["z", "s"]), ("--fsdp", ["f"]))
    ]


def test_the_reference_is_brief() -> None:
    text = "<pre><code>f(\n  x: int)</code></pre> <p>Return it.</p> <p>More of it.</p>"
    entry = {"location": "reference/mpu/#f", "title": "f", "text": text}
    assert brief(entry) == {**entry, "text": "<p>Return it.</p>"}
    assert brief({**entry, "text": ""})["text"] == ""


@over_table(
    ("heading", "called", "title"),
    [
        ("inference", "Generate text", "Generate text (inference)"),
        ("pipeline", "Pipelines", "Pipelines"),
        ("env: what a machine has", "Check a machine", "Check a machine (env)"),
        ("How it works", "Overview", "How it works"),
    ],
)
def test_titles(heading: str, called: str, title: str) -> None:
    assert titled({"location": "p/", "title": heading, "text": ""}, called)["title"] == title


def test_guides_come_before_pages_and_pages_before_the_reference() -> None:
    order = ["guides/resume/", "checkpoint/", "foreign_flags/#s", "reference/train/#megazero.train.resume"]
    weights = [weight(place) for place in order]
    assert weights == sorted(weights, reverse=True)
    assert len({*weights}) == 4
    assert weight("configuration/#--bf16") == 2.0
    assert weight(f"configuration/#-{16 * '-a'}") == 1.0


def test_the_index_has_all_of_it() -> None:
    entries = [
        {"location": "reference/x/", "title": "x", "text": "<p>a</p><p>b</p>"},
        {"location": "report/", "title": "report", "text": "<p>c</p><p>d</p>"},
    ]
    assert searchable(entries, {"report/": "Read reports"}) == [
        {"location": "reference/x/", "title": "x", "text": "<p>a</p>", "boost": 0.05},
        {"location": "report/", "title": "Read reports", "text": "<p>c</p><p>d</p>", "boost": 1.0},
    ]
