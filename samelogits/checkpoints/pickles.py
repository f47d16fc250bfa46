"""What torch.save writes: a pickle, opened only where the user allows it, and by PyTorch's loader of weights alone."""

from __future__ import annotations

import importlib
import mmap
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samelogits.checkpoints.atomic import atomic_file
from samelogits.checkpoints.json_file import impostor, open_regular
from samelogits.checkpoints.safetensors_file import HEADER_LIMIT, NAME, Entry
from samelogits.checkpoints.tensors import DTYPES, SPELLED, StoredTensor
from samelogits.errors import BackendError, CheckpointError, shown
from samelogits.parameters import raise_faults

SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
NOT_READ = "not read without --allow-pickle (in Python allow_pickle=True)"
RELEASE = (2, 6)  # before it, weights_only did not keep a file from running code (CVE-2025-32434)
_NAMES = {f"torch.{theirs}": ours for ours, theirs in SPELLED.items()}
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class PickledEntry:
    """A tensor of an opened pickle. data: PyTorch's tensor over the mapped file, which has `size` bytes."""

    path: Path
    size: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    def read(self) -> StoredTensor:
        """A read-only view of the mapped bytes. A dtype outside DTYPES or a shrunken file raises CheckpointError."""
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {self.name}: expected dtype {', '.join(DTYPES)}, found {self.dtype}")
        try:
            size = self.path.stat().st_size
        except OSError:
            size = self.size  # the bytes of a file that was removed stay mapped
        if size < self.size:  # touching a page past the end would kill the process
            raise CheckpointError(f"{self.path}: expected at least {self.size} bytes, found {size} by now")
        array = self.data.view(_torch().uint16).numpy() if self.dtype == "BF16" else self.data.numpy()
        if not array.flags.aligned:  # torch.save aligns; another program may not have
            array = array.copy()
        array.flags.writeable = False
        return StoredTensor(self.dtype, array)


class PickleFile:
    """values: the tensors and plain values of an archive that torch.save wrote; the tensors stay on the disk."""

    def __init__(self, path: Path):
        """Open it. Whatever else is in it, or asks to be run, raises CheckpointError; nothing of it is ever run."""
        torch = _torch()
        self.path = path
        self._size, self._records = _check_archive(path)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what it then reads, or refuses
                self.values: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # PyTorch's reader raises whatever a broken file makes of it
            raise CheckpointError(f"{path}: expected tensors and plain values, found {_found(error)}") from None

    def entries(self, values: object, where: str = "") -> dict[str, Entry]:
        """Tensor name to entry, for a dict of tensors in the values; `where` names it in messages."""
        path = f"{self.path}: {where}" if where else str(self.path)
        if not isinstance(values, dict) or not values:
            raise CheckpointError(f"{path}: expected tensors by name, found {shown(type(values).__name__)}")
        faults, found, storages = [], {}, set()
        for name, value in values.items():
            if not isinstance(name, str) or not NAME.fullmatch(name):
                faults.append(f"expected plain tensor names, found {shown(name)}")
            elif reason := _unsound(value):
                faults.append(f"{name}: expected a tensor with elements of its own, found {reason}")
            else:
                storage = value.untyped_storage()
                storages.add((storage.data_ptr(), storage.nbytes()))
                dtype = str(value.dtype)
                found[name] = PickledEntry(
                    self.path, self._size, name, _NAMES.get(dtype, dtype), tuple(value.shape), value.detach()
                )
        raise_faults(faults, path)
        if not self._are_records({(address, size) for address, size in storages if size}):
            raise CheckpointError(f"{path}: expected tensors of the sizes that are stored, found others: cut short")
        return dict(found)

    def _are_records(self, storages: Set[tuple[int, int]]) -> bool:
        """Whether storages, address and bytes, are whole records of the archive, which is mapped from a page on."""
        first, length = next(iter(storages), (0, 0))
        starts = [first - begin for begin, size in self._records.items() if size == length]
        return not storages or any(
            start % mmap.PAGESIZE == 0 and all(self._records.get(a - start) == size for a, size in storages)
            for start in starts
        )


def check_allowed(path: Path | str, allow_pickle: bool) -> None:
    """Raise CheckpointError unless the user allows this file, which is a pickle, to be opened."""
    if not allow_pickle:
        raise CheckpointError(f"{path}: expected safetensors or GGUF, found a pickle, {NOT_READ}")


def write_pickle(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a dict of tensors that torch.load(path, weights_only=True) gives back; all are held in memory at once."""
    torch = _torch()
    with atomic_file(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # nor is it written to
        written = {}
        for name, stored in tensors.items():
            tensor = torch.from_numpy(np.ascontiguousarray(stored.array, DTYPES[stored.dtype]))
            written[name] = tensor.view(getattr(torch, SPELLED[stored.dtype]))
        try:
            torch.save(written, file)
        except RuntimeError as error:  # what PyTorch's writer makes of a full disk
            cause = error.__context__
            reason = cause.strerror if isinstance(cause, OSError) else shown(str(error))
            raise CheckpointError(f"{path}: cannot be written: {reason}") from error


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise BackendError("pickle: expected PyTorch, found none: pip install 'samelogits[torch]'") from error
    release = tuple(int(digits) for digits in re.findall(r"\d+", torch.__version__)[:2])
    if release < RELEASE:
        wanted = ".".join(map(str, RELEASE))
        raise BackendError(
            f"pickle: expected PyTorch {wanted} or later, which reads it safely, found {torch.__version__}"
        )
    return torch


def _check_archive(path: Path) -> tuple[int, dict[int, int]]:
    """Size of the file, and of each record by where its bytes begin. What torch.save doesn't write raises
    CheckpointError."""

    def refuse(found: str) -> CheckpointError:
        return CheckpointError(f"{path}: expected an archive as torch.save writes it since PyTorch 1.6, found {found}")

    with open_regular(path) as file:
        head = file.read(512)
        if not head.startswith(_ZIP):
            raise refuse(impostor(head) or "a file of another kind")
        size = file.seek(0, 2)
        try:
            records = zipfile.ZipFile(file).infolist()
            begins = [_begin(file, record.header_offset) for record in records]
        except Exception as error:  # a broken one makes the reader raise more than BadZipFile
            raise refuse(f"a broken one, perhaps cut short: {shown(str(error))}") from None
    names = [record.filename.partition("/")[2].lower() for record in records]  # PyTorch finds them in any case
    if len(set(names)) < len(names) or names.count("data.pkl") != 1:
        raise refuse("one without one data.pkl, or with a name twice")
    if "constants.pkl" in names:
        raise refuse("a TorchScript program")
    pickle = records[names.index("data.pkl")]
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise refuse("compressed records")
    ends = [begin + record.file_size for begin, record in zip(begins, records, strict=True)]
    if max(ends) > size or sum(record.file_size for record in records) > size or pickle.file_size > HEADER_LIMIT:
        raise refuse("records larger than the file, or a pickle too large to be that of a model")
    return size, {begin: record.file_size for begin, record in zip(begins, records, strict=True)}


def _begin(file: BinaryIO, header: int) -> int:
    """Where a record's bytes begin: behind 30 bytes of header, its name and what else stands there."""
    file.seek(header + 26)
    lengths: tuple[int, int] = struct.unpack("<2H", file.read(4))
    return header + 30 + sum(lengths)


def _unsound(value: Any) -> str | None:
    """Why this is no tensor whose elements all lie in the file."""
    torch = _torch()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return type(value).__name__
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        return f"a {value.layout} one on {value.device}" if not value.is_quantized else "a quantised one"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"shape {tuple(value.shape)} over {value.untyped_storage().nbytes()} bytes"
    return None


def _found(error: Exception) -> str:
    """The reason in a few words; PyTorch's own advice, to load the file unsafely, is left out."""
    text = str(error)
    if match := re.search(r"GLOBAL ([\w.]+)", text):
        return f"{match[1]}, which could run code"
    if match := re.search(r"WeightsUnpickler error:\s*(\S.*)", text):
        return shown(match[1])
    return shown(f"{type(error).__name__}: {text.partition('. ')[0]}", 160)
