#!/usr/bin/env bash
# Builds the documentation site in build/site, from docs/ and the docstrings. A broken link, an anchor that no heading has or
# a page outside the navigation is an error, and so is anything that a reader's browser would load from elsewhere.
#
#   bash scripts/build_docs.sh
#   python -m http.server --directory build/site    # and read it at http://localhost:8000
#
# It makes build/docs-venv with what constraints.txt pins (the extra `docs` of setup.py) when they change; nothing else is
# installed, because the docstrings are read and not imported. PYTHON is the Python (>= 3.10) to make it from.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} venv=build/docs-venv

pins=$(sed -n '/^# \[docs\]/,/^$/p' constraints.txt && grep '^ruff==' constraints.txt) # ruff lays signatures out
if [[ $(cat "$venv/pins" 2>/dev/null) != "$pins" ]]; then
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install -q -r <(echo "$pins")
    echo "$pins" >"$venv/pins"
fi

rm -rf build/site
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict # with --quiet, mkdocs counts no warnings
if grep -rnoE --include='*.html' '<(script|link|img|iframe|source)[^>]* (src|href)="?(https?:)?//[^ >]*' build/site ||
    grep -rnoE --include='*.css' '(url\(|@import )["'\'' ]*(https?:)?//[^)]*' build/site ||
    grep -rlE --include='*.html' 'class="?[^">]*mermaid' build/site; then
    echo "error: the site must load nothing from elsewhere, but loads what is listed above." >&2
    exit 1
fi
echo "docs: $(find build/site -name '*.html' | wc -l) pages in build/site"
