"""Record what DeepSpeed itself answers to the checks of ``tests/deepspeed/checks``.

    python proofs/deepspeed_answers.py FOLDER [AREA...]

FOLDER holds the package `deepspeed` (``pip install --target FOLDER --no-deps deepspeed==0.19.8`` and what
it imports). ``tests/deepspeed/checks/answers/AREA.json`` is written; checks that DeepSpeed fails, or where it
and megazero differ on purpose, are listed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "tests/deepspeed/checks"


def answers_of(area: str, ranks: int, site: str) -> dict[str, dict[str, object]]:
    """Check -> ``value`` or ``error``, for the area's checks of so many ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), site, os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = ["-m", "tests.deepspeed.checks", area, str(ranks), folder, "--real"]
        command = [sys.executable, *(launcher if ranks > 1 else []), *words]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
        path = Path(folder) / f"{area}-{ranks}.json"
        if not path.exists():
            raise SystemExit(f"{area}, {ranks} ranks: {done.stderr}")
        return json.loads(path.read_text())


def main() -> None:
    """Record the areas that are named, or all."""
    sys.path.insert(0, str(ROOT))
    from tests.deepspeed.checks import checks_of

    site, *areas = sys.argv[1:]
    for area in areas or sorted(p.stem for p in CHECKS.glob("*.py") if not p.stem.startswith("_")):
        checks = checks_of(importlib.import_module(f"tests.deepspeed.checks.{area}"))
        found: dict[str, dict[str, object]] = {}
        for ranks in sorted({check.ranks for check in checks.values()}):
            found |= answers_of(area, ranks, site)
        for name, check in checks.items():
            answer = found.get(name, {"error": "DeepSpeed's process ended before it"})
            if "error" in answer:
                last = str(answer["error"]).strip().splitlines()[-1]
                found[name] = {"error": last}
                print(f"{area}.{name}: DeepSpeed fails: {last}{'' if check.why else '  <-- says no `why`'}")
        ordered = {name: found[name] for name in checks}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in ordered.items())
        (CHECKS / f"answers/{area}.json").write_text(f"{{\n{lines}\n}}\n")
        own = sum(bool(check.why) for check in checks.values())
        print(f"{area}: {len(checks)} checks, of which {own} differ on purpose")


if __name__ == "__main__":
    main()
