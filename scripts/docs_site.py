"""The parts of the documentation site that no file of docs/ holds; mkdocs calls them (`hooks` in mkdocs.yml).

- A reference page for each package, from its docstrings: what is imported from it, then its modules.
- A page for each file outside docs/ that a page links to, such as CONTRIBUTING.md, so that one link serves
  GitHub and the site. A link to the folder of a package leads to its reference.
- `decisions/*.md` and `reference/*.md` in the navigation stand for all such pages that no other line names.
- A page for each notebook in docs/.
- What the search shows (`scripts/docs_search.py`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from scripts.docs_notebook import notebook_page
from scripts.docs_search import flag_entries, searchable, with_flag_anchors

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FLAGS = "configuration.md"
NOTEBOOK = ".ipynb"
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".jsonl": "json"}


def reference_pages() -> dict[str, str]:
    """The pages of the reference: path on the site -> Markdown."""
    whole = ROOT / "megazero"
    pages = {"reference/megazero.md": reference_page(whole, whole.glob("*.py"))}
    for package in sorted(path.parent for path in whole.glob("*/__init__.py")):
        pages[f"reference/{package.name}.md"] = reference_page(package, modules_below(package))
    return pages


def modules_below(package: Path) -> Iterator[Path]:
    """The sources of a package, without those in folders that are no package."""
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).parents
        if all((package / folder / "__init__.py").exists() for folder in inside):
            yield path


def reference_page(package: Path, paths: Iterable[Path]) -> str:
    """The reference of a package: its docstring, what it exports, and the modules at `paths`."""
    name = dotted(package)
    inits, modules = [], []
    for path in sorted(paths):
        if path.name != "__init__.py" and not path.name.startswith("_"):
            modules.append(f"::: {dotted(path)}")
        elif path.name == "__init__.py" and path.parent != package:
            inits.append(f"::: {dotted(path.parent)}\n    options: {{members: false}}")
    own = f"::: {name}\n    options: {{members: false, show_root_heading: false}}"
    exports = ", ".join(linked(home, export) for home, export in exported(package))
    return "\n\n".join([f"# {name}", own, *([f"Exports {exports}."] if exports else []), *inits, *modules])


def dotted(path: Path) -> str:
    """The dotted name of the module or package at a path."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def exported(package: Path) -> Iterator[tuple[str, str]]:
    """The names that a package imports from its own modules, each as (module, name)."""
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(dotted(package) + "."):
            yield from ((node.module, alias.name) for alias in node.names if alias.name[0] != "_")


def linked(module: str, name: str) -> str:
    """A name as code, with a link to its entry where it has one: classes and functions do."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        homes = [home for home, export in exported(path) if export == name]
        return linked(homes[0], name) if homes else f"`{name}`"
    body = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")).body
    has_entry = any(
        isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name and ast.get_docstring(node)
        for node in body
    )
    return f"[`{name}`][{module}.{name}]" if has_entry else f"`{name}`"


def place_on_site(path: str) -> str:
    """Where a file of the repository is on the site, as the Markdown page that it is made from."""
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
        return page.removesuffix(NOTEBOOK) + ".md" if page.endswith(NOTEBOOK) else page
    folder, _, package = path.partition("/")
    if folder == "megazero" and package and (ROOT / path / "__init__.py").is_file() and "/" not in package:
        return f"reference/{package}.md"
    return f"repository/{path}" + ("" if path.endswith(".md") else ".md")


def is_elsewhere(target: str) -> bool:
    """Whether a link leads out of the repository, or holds what it shows."""
    return "://" in target or target.startswith(("mailto:", "data:"))


def linked_paths(path: str, text: str) -> Iterator[str]:
    """The files of the repository that the Markdown file `path` links to."""
    for _, target, _ in LINK.findall(text):
        if not is_elsewhere(target):
            yield normpath(str(PurePosixPath(path).parent / target))


def with_site_links(path: str, text: str) -> str:
    """The text of the Markdown file `path`, with its links to files led to pages of the site."""
    home = str(PurePosixPath(place_on_site(path)).parent)

    def changed(match: re.Match[str]) -> str:
        start, target, end = match.groups()
        if is_elsewhere(target):
            return match[0]
        outside = normpath(str(PurePosixPath(path).parent / target))
        return f"{start}{relpath(place_on_site(outside), home)}{end}"

    return LINK.sub(changed, text)


def page_of(path: str) -> str:
    """The Markdown of a file or folder outside docs/; a missing one raises FileNotFoundError."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(f"{child.name}/" if child.is_dir() else child.name for child in file.iterdir())
        links = (f"- [{name}]({file.name}/{name})" for name in names if not name.startswith(("_", ".")))
        return with_site_links(path, "\n".join([f"# {path}", "", *links]))
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return with_site_links(path, text)
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def notebook_pages() -> dict[str, str]:
    """The pages of the notebooks in docs/: path on the site -> Markdown."""
    pages = {}
    for file in (ROOT / "docs").rglob(f"*{NOTEBOOK}"):
        path = file.relative_to(ROOT).as_posix()
        pages[place_on_site(path)] = with_site_links(path, notebook_page(file.read_text(encoding="utf-8")))
    return pages


def outside_pages(files: Files) -> dict[str, str]:
    """The pages of all files outside docs/ that pages link to, directly or through one another."""
    queue = [
        target
        for file in files.documentation_pages()
        if file.abs_src_path is not None
        for target in linked_paths(f"docs/{file.src_uri}", file.content_string)
    ]
    pages: dict[str, str] = {}
    while queue:
        path = queue.pop()
        place = place_on_site(path)
        if not place.startswith("repository/") or place in pages or not (ROOT / path).exists():
            continue
        pages[place] = page_of(path)
        if (ROOT / path).is_dir():
            children = (child.name for child in (ROOT / path).iterdir())
            queue += [f"{path}/{name}" for name in children if name[0] not in "_."]
        elif path.endswith(".md"):
            queue += linked_paths(path, (ROOT / path).read_text(encoding="utf-8"))
    return pages


def named_in(nav: object) -> Iterator[str]:
    """The paths and patterns of the navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, (dict, list)):
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from named_in(item)


def expanded(nav: object, paths: list[str]) -> object:
    """The navigation, with the paths that match in place of each pattern."""
    if isinstance(nav, dict):
        return {title: expanded(item, paths) for title, item in nav.items()}
    if isinstance(nav, list):
        return [
            item
            for entry in nav
            for item in (
                [path for path in paths if fnmatch(path, entry)]
                if isinstance(entry, str) and "*" in entry
                else [expanded(entry, paths)]
            )
        ]
    return nav


def is_source(path: str) -> bool:
    """Whether a page of the site shows a file or folder that is no Markdown."""
    return path.startswith("repository/") and not (ROOT / path.removeprefix("repository/")).is_file()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ holds, and complete the navigation."""
    for path, text in {**reference_pages(), **notebook_pages()}.items():
        files.append(File.generated(config, path, content=text))
    for path, text in outside_pages(files).items():
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    pages = {file.src_uri for file in files.documentation_pages()}
    config.nav = expanded(config.nav, sorted(pages - set(named_in(config.nav))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the pages of those files, and set how the theme treats some pages."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if is_source(page.file.src_uri):
        page.meta["search"] = {"exclude": True}
    written = page.file.generated_by is None
    return with_site_links(f"docs/{page.file.src_uri}", markdown) if written else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give each flag of the configuration an anchor, and remember what the navigation calls the page."""
    config.extra.setdefault("titles", {})[page.url] = page.title
    return with_flag_anchors(html) if page.file.src_uri == FLAGS else html


def on_post_build(config: MkDocsConfig) -> None:
    """Put the search index in order; the theme has written it."""
    site = Path(config.site_dir)
    page = FLAGS.removesuffix(".md") + "/"
    flags = flag_entries(page, (site / page / "index.html").read_text(encoding="utf-8"))
    path = site / "search/search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = searchable([*index["docs"], *flags], config.extra["titles"])
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
