"""Files and folders that appear under their name whole, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from samelogits.errors import CheckpointError


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Write to the file given, which takes the name `path` once every byte is on the disk.

    overwrite: a file under that name is replaced, in one step; otherwise it raises CheckpointError, as an error of the
    system does. Nothing is left behind.
    """
    path = Path(os.path.abspath(path))
    check_file(path, overwrite)
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill the folder given, which takes the name `path` once it is complete; write its files with atomic_file.

    An empty folder may be there already. Anything else under that name, or an error of the system, raises
    CheckpointError; nothing is left behind.
    """
    path = Path(os.path.abspath(path))
    check_directory(path)
    temporary = _beside(path)
    try:
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        os.rename(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_file(path: Path, overwrite: bool = False) -> None:
    """Raise CheckpointError if atomic_file would refuse the path: worth knowing before long work."""
    expected = "a name for a file" if overwrite else "no such file yet"
    _refuse(path, os.path.lexists(path) and not (overwrite and path.is_file()), expected)


def check_directory(path: Path) -> None:
    """Raise CheckpointError if atomic_directory would refuse the path: worth knowing before long work."""
    _refuse(path, os.path.lexists(path) and not _is_empty_folder(path), "nothing or an empty folder")


def _beside(path: Path) -> Path:
    # In the same folder, since a rename is atomic only within one file system.
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")


def _refuse(path: Path, occupied: bool, expected: str) -> None:
    path = Path(os.path.abspath(path))
    if occupied:
        raise CheckpointError(f"{path}: expected {expected}, found something that writing would destroy")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: expected an existing folder {path.parent}, found none")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path}: expected a folder {path.parent} that can be written to, found one that can't")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
