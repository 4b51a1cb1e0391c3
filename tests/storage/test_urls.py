"""URLs are told from paths; wrong ones are refused in a sentence that shows no secret."""

from __future__ import annotations

import pytest

from megazero.errors import StorageError
from megazero.storage.urls import Url, is_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/a/b_text_document", True),
        ("S4://typo/a", True),
        ("/data/s3:/a", False),
        ("data/a", False),
        ("C:/data/a", False),
        ("@blend.txt", False),
    ],
)
def test_a_url_is_told_from_a_path(text: str, url: bool) -> None:
    assert is_url(text) is url


def test_a_url_has_a_scheme_a_bucket_and_a_key() -> None:
    assert Url.parse("S3://bucket/run/a/") == Url("s3", "bucket", "run/a")
    assert str(Url.parse("gs://bucket") / "latest") == "gs://bucket/latest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s4://bucket/a", "but is s4://bucket/a; did you mean s3://?"),
        ("ftp://host/a", "but is ftp://host/a; "),
        ("s3:///a", "`URL` must name a bucket, but is s3:///a; write s3://BUCKET/PATH."),
        ("s3://key:secret@bucket/a", "must have no keys or passwords in it, but s3://...@bucket/a has"),
        ("https://host/a?sig=secret", "must have no keys or passwords in it, but https://host/a has"),
        ("xy://key:secret@bucket/a?sig=secret", "but is xy://...@bucket/a; "),
    ],
)
def test_a_wrong_url_is_refused(text: str, message: str) -> None:
    with pytest.raises(StorageError) as refused:
        Url.parse(text)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
