"""The multipart uploads of a server that were begun and neither completed nor aborted."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import urllib.request

from tests.storage.small_server import KEY, REGION, SECRET


def unfinished_uploads(endpoint: str, bucket: str = "bucket") -> list[str]:
    """Ask a server for them, which no method of obstore does; the request is signed by hand."""
    now = datetime.datetime.now(datetime.timezone.utc)
    day, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    heads = {
        "host": endpoint.partition("://")[2],
        "x-amz-content-sha256": empty,
        "x-amz-date": moment,
    }
    lines = "".join(f"{name}:{value}\n" for name, value in heads.items())
    canonical = f"GET\n/{bucket}\nuploads=\n{lines}\n{';'.join(heads)}\n{empty}"
    scope = f"{day}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    sign = f"AWS4{SECRET}".encode()
    for part in (*scope.split("/"), text):
        sign = hmac.new(sign, part.encode(), hashlib.sha256).digest()
    heads["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={';'.join(sorted(heads))}, "
        f"Signature={sign.hex()}"
    )
    request = urllib.request.Request(f"{endpoint}/{bucket}?uploads=", headers=heads)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return re.findall("<UploadId>(.*?)</UploadId>", answer.read().decode())
