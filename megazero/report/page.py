"""The page: one file of HTML with its style, its scripts and its numbers, which asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from string import Template

from megazero.pictures.style import THEMES, Theme
from megazero.report.run import BINS, Json, Source
from megazero.version import VERSION

UPLOT = "1.6.32"
"""The version of uPlot (MIT) in `assets/`."""
_MANY = 4  # runs from which on each gets fewer bins, so that the page stays small


def read_runs(sources: Sequence[Source]) -> Json:
    """Read all runs; return what the page shows of them.

    Raises:
        DataError: the metrics of one cannot be read.
    """
    bins = max(100, min(BINS, BINS * _MANY // len(sources)))
    runs = [source.read(bins) for source in sources]
    counts = Counter(run["name"] for run in runs)
    for run in runs:
        if counts[run["name"]] > 1:
            run["name"] = run["path"]
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(r['name'] for r in runs)}"
    return {"title": title, "written": time.time(), "runs": runs}


def page_of(shown: Json, watch: str | None = None) -> str:
    """The page that shows runs; `watch` is the token with which it asks its server for news."""
    data = {
        "page": {**shown, "watch": watch},
        "themes": {name: asdict(theme) for name, theme in THEMES.items()},
    }
    library, script = _asset("uPlot.iife.min.js"), _asset("report.js")
    # Nothing is loaded from anywhere, and no script but these two runs, whatever a run's texts hold.
    hashes = " ".join(f"'sha256-{_digest(code)}'" for code in (library, script))
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    return Template(_asset("page.html")).substitute(
        POLICY=policy + ("; connect-src 'self'" if watch else ""),
        TITLE=re.sub("[<>&\ud800-\udfff]", "", shown["title"]),
        STYLE=_asset("uPlot.min.css") + "\n".join(map(_variables, THEMES.values())) + _asset("report.css"),
        # In a script, `<` could end it.
        DATA=encoded(data).decode().replace("<", "\\u003c"),
        LIBRARY=library,
        SCRIPT=script,
        VERSION=VERSION,
        UPLOT=UPLOT,
    )


def encoded(value: object) -> bytes:
    """A value as JSON, by orjson where it is installed, which is ten times as fast."""
    try:
        import orjson

        return orjson.dumps(value)
    except (ImportError, TypeError):  # it refuses numbers beyond 64 bits, and half characters
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _asset(name: str) -> str:
    return (files("megazero.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _variables(theme: Theme) -> str:
    values = {name: getattr(theme, name) for name in ("paper", "ink", "muted", "grid")}
    values |= {"accent": theme.series[0], "green": theme.series[2], "red": theme.series[3]}
    lines = "".join(f"--{name}:{value};" for name, value in values.items())
    return f":root[data-theme={theme.name}] {{ color-scheme: {theme.name}; {lines} }}\n"
