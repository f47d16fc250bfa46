"""Files and folders appear whole or not at all, and what was there is never destroyed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import assert_one_line

from samelogits.checkpoints.atomic import atomic_directory, atomic_file
from samelogits.errors import CheckpointError


class Interrupted(BaseException):
    """Like KeyboardInterrupt, not an Exception."""


def write(kind: str, path: Path, fail: BaseException | None = None) -> None:
    """Write half, fail or not, write the other half."""
    if kind == "file":
        with atomic_file(path) as file:
            file.write(b"first")
            assert not path.exists()
            if fail:
                raise fail
            file.write(b"second")
    else:
        with atomic_directory(path) as folder:
            (folder / "a").write_bytes(b"first")
            assert not path.exists() or not list(path.iterdir())
            if fail:
                raise fail
            with atomic_file(folder / "b") as file:
                file.write(b"second")


@pytest.fixture(params=["file", "folder"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_whole(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(kind, path)
    assert os.listdir(tmp_path) == ["out"]
    if kind == "file":
        assert path.read_bytes() == b"firstsecond"
    else:
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {"a": b"first", "b": b"second"}


@pytest.mark.parametrize("fail", [ValueError("x"), Interrupted(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_nothing_is_left_after_an_exception(kind: str, fail: BaseException, tmp_path: Path) -> None:
    expected = CheckpointError if isinstance(fail, OSError) else type(fail)
    with pytest.raises(expected) as error:
        write(kind, tmp_path / "out", fail)
    assert os.listdir(tmp_path) == []
    if isinstance(fail, OSError):
        assert_one_line(error.value, "out", "No space left")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_nothing_is_left_when_the_system_refuses(
    kind: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(kind, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_what_is_there_is_kept(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name in ("file", "full", "link"):
        with pytest.raises(CheckpointError) as error:
            write(kind, tmp_path / name)
        assert_one_line(error.value, name, "expected", "found")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "full" / "a").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "link"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write("folder", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]


def test_folder_to_write_in_must_exist(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected an existing folder"):
        write(kind, tmp_path / "absent" / "out")


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write("file", tmp_path / "file")
        write("folder", tmp_path / "folder")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


def test_kill_in_the_middle_leaves_nothing_under_the_name(kind: str, tmp_path: Path) -> None:
    function = {"file": "atomic_file", "folder": "atomic_directory"}[kind]
    program = f"""
import os, signal, sys
from pathlib import Path
from samelogits.checkpoints.atomic import {function}
with {function}(Path(sys.argv[1])) as target:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert all(name.endswith(".partial") for name in os.listdir(tmp_path))
    write(kind, tmp_path / "out")  # and the leftover is in nobody's way
