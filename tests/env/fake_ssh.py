"""Stands in for ssh, as ``fake_ssh.py HOST COMMAND``: a greeting, then a report of a folder or a command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

host, command = sys.argv[1:]
canned = Path(os.environ.get("CANNED", "/nowhere")) / host
if host in ("gone", "lost"):
    sys.exit(f"ssh: connect to host {host} port 22: No route to host")
print(f"Welcome to {host}! {{not json}}", flush=True)
if canned.exists():
    print(canned.read_text())
    sys.exit()
if host == "odd":
    command = command.replace("env ", "env NCCL_DEBUG=TRACE ", 1)
os.execv("/bin/sh", ["/bin/sh", "-c", command])
