"""Answers what scripts/setup.sh asks about the Python it sets up; runs before anything is installed.

`python scripts/setup_facts.py torch`: the installed torch if it is recent enough, else nothing.
`... constraints`: the constraints for pip. `... native`: the paths of the compiled modules that exist.
`... missing`: the paths of those that do not. `... key`: everything that the setup depends on, as one hash.
"""

import hashlib
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_TORCH = (2, 10)  # before it, torch's restricted unpickler could be made to run code
SCRIPTS = ("scripts/setup.sh", "scripts/setup_facts.py", "scripts/pip_progress.py")
INPUTS = ("setup.py", "pyproject.toml", "constraints.txt", *SCRIPTS)


def version(package):
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch():
    """The installed torch's version if megazero can use it, else an empty string."""
    found = version("torch")
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
        return ""
    return found


def constraints():
    """The pins. Beside a torch that was there and is not ours, whatever is installed keeps its version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    if not torch() or f"torch=={torch().partition('+')[0]}" in pins:
        return "\n".join(pins)
    free = [pin for pin in pins if version(re.split("[=;]", pin)[0]) is None]
    return "\n".join([f"torch=={torch()}", *free])


def modules():
    """Where the compiled modules for this Python belong."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [ROOT / "megazero" / package / f"_native{suffix}" for package in ("data", "ops")]


def native():
    """The compiled modules that exist, a line each."""
    return "\n".join(str(path) for path in modules() if path.is_file())


def missing():
    """The compiled modules that do not exist, a line each."""
    return "\n".join(str(path) for path in modules() if not path.is_file())


def key():
    """A hash of this checkout's path, this Python, torch, what is not compiled and all inputs."""
    digest = hashlib.sha256()
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    for path in [ROOT / name for name in INPUTS] + sources:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    for fact in (str(ROOT), sys.version, torch(), missing()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    facts = {"torch": torch, "constraints": constraints, "native": native, "missing": missing, "key": key}
    print(facts[sys.argv[1]]())
