"""What is told of an installation under way."""

from __future__ import annotations

from scripts.pip_progress import Progress, largest_file


def test_large_downloads_are_told_with_their_size(tmp_path):
    progress = Progress(tmp_path, tmp_path)
    assert progress.line("Collecting torch==2.13.0\n") is None
    assert (
        progress.line("  Downloading torch-2.13.0-cp311-none-linux.whl (189.2 MB)\n")
        == "downloading torch-2.13.0-cp311-none-linux.whl, 189 MB"
    )
    assert progress.line("  Downloading mpmath-1.3.0-py3-none-any.whl (536 kB)\n") is None


def test_the_share_of_a_download_is_that_of_the_largest_file(tmp_path):
    progress = Progress(tmp_path, tmp_path)
    assert progress.now() == "looking for packages"
    progress.line("  Preparing editable metadata (pyproject.toml): started\n")
    assert progress.now() == "pip: Preparing editable metadata (pyproject.toml): started"
    progress.line("Downloading https://example.invalid/x/torch-2.13.0.whl (20.0 MB)")
    (tmp_path / "pip-unpack-1").mkdir()
    (tmp_path / "pip-unpack-1/small").write_bytes(b"x")
    (tmp_path / "pip-unpack-1/torch.whl").write_bytes(bytes(5_000_000))
    assert progress.now() == "downloading torch-2.13.0.whl: 25% of 20 MB"
    progress.line("Collecting sympy")
    assert progress.now() == "pip: Collecting sympy"


def test_installed_packages_are_counted(tmp_path):
    (tmp_path / "pip-1.dist-info").mkdir()
    progress = Progress(tmp_path / "none", tmp_path)
    assert progress.line("Installing collected packages: mpmath, sympy, torch\n") == "installing 3 packages"
    (tmp_path / "mpmath-1.dist-info").mkdir()
    assert progress.now() == "installed 1 of 3 packages"
    assert progress.line("Successfully installed mpmath-1\n") is None


def test_files_that_come_and_go_are_no_fault(tmp_path, monkeypatch):
    """pip moves a download away while it is looked at; the reports went on no more."""
    (tmp_path / "a.whl").write_bytes(b"abc")
    (tmp_path / "gone.whl").symlink_to(tmp_path / "nowhere")
    stat = type(tmp_path).stat

    def vanishing(path, **others):
        if path.name == "a.whl":
            raise FileNotFoundError(path)
        return stat(path, **others)

    assert largest_file(tmp_path) == 3
    monkeypatch.setattr(type(tmp_path), "stat", vanishing)
    assert largest_file(tmp_path) == 0
