"""Scripts that the tests launch. Each is short, and imports no torch."""

SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT".split()
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "given": os.environ.get("GIVEN"),
                  "devices": os.environ["CUDA_VISIBLE_DEVICES"],
                  **{name: os.environ[name] for name in names}}))
"""

WAIT = """
import os, signal, sys, time
def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if "--save" in sys.argv:
        print("saved", flush=True)
        sys.exit(0)
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), note)
print("pid", os.getpid(), flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    time.sleep(0.05)
"""

WITH_CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--child-of-a-rank"])
print("pid", os.getpid(), child.pid, flush=True)
child.wait()
"""
