"""Checkpoints from the hub: with a stub of the package, and with the package itself against a server on this host."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import LLAMA_JSON, assert_one_line, llama_parameters, write_folder

from samelogits.checkpoints import open_checkpoint
from samelogits.checkpoints.hub import download
from samelogits.errors import CheckpointError, InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ERRORS = ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError")


class Stub(types.ModuleType):
    """A package huggingface_hub that has one folder, or one error."""

    def __init__(self, folder: Path, fail: str | None = None):
        super().__init__("huggingface_hub")
        self.errors = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in ERRORS})
        self.folder, self.fail, self.calls = folder, fail, []

    def snapshot_download(self, name: str, **settings: Any) -> str:
        self.calls.append((name, settings))
        if self.fail:
            raise getattr(self.errors, self.fail, ConnectionError)("line one\nline two")
        return str(self.folder)


def stub(monkeypatch: pytest.MonkeyPatch, folder: Path, fail: str | None = None) -> Stub:
    module = Stub(folder, fail)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


@pytest.mark.parametrize(
    ("reference", "revision"), [("hf://owner/na.me-2", None), ("hf://owner/na.me-2@refs/pr/1", "refs/pr/1")]
)
def test_only_json_and_safetensors_are_asked_for(
    reference: str, revision: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = stub(monkeypatch, tmp_path)
    assert download(reference) == tmp_path
    [(name, settings)] = module.calls
    assert (name, settings["revision"]) == ("owner/na.me-2", revision)
    assert settings["allow_patterns"] == ["*.json", "*.safetensors"]
    assert settings["ignore_patterns"] == ["*/*"]


def test_open_by_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(monkeypatch, write_folder(tmp_path / "a", LLAMA_JSON, llama_parameters()))
    assert open_checkpoint("hf://owner/name").metadata["family"] == "llama"


BAD_REFERENCES = [
    "hf://", "hf://name", "hf://a/b/c", "hf://../b", "hf://a/..", "hf://a/b@", "hf://a/b@../c", "hf://a/b@c@d", "hf:///b",
    "hf://a b/c", "hf://a/b\n", "hf://-a/b", "hf://a/b--c", "hf://a/b?x=1", "hf://" + "a" * 200 + "/b", "hf://a/b@x..y",
    "hf://é/b",
]  # fmt: skip


@pytest.mark.parametrize("reference", BAD_REFERENCES)
def test_malformed_reference(reference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = stub(monkeypatch, tmp_path)
    with pytest.raises(InputError) as error:
        open_checkpoint(reference)
    assert_one_line(error.value, "expected hf://owner/name", "found")
    assert module.calls == []


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("GatedRepoError", "gated"), ("RepositoryNotFoundError", "no such repository"),
        ("RevisionNotFoundError", "no such revision 'v1'"), ("LocalEntryNotFoundError", "neither a connection"),
        ("ConnectionError", "ConnectionError: line one line two"),
    ],
)  # fmt: skip
def test_errors_are_one_line(fail: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(monkeypatch, tmp_path, fail)
    with pytest.raises(CheckpointError) as error:
        download("hf://owner/name@v1")
    assert_one_line(error.value, "hf://owner/name@v1", "expected", words)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError) as error:
        download("hf://owner/name")
    assert_one_line(error.value, "huggingface_hub", "samelogits[hf]")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Address of a server that has owner/name, and the paths of the files that were fetched from it."""
    folder = write_folder(tmp_path / "served", LLAMA_JSON, llama_parameters())
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    info = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
    tree = [{"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40} for name in names]
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/name/tree"):
                self.answer(200, json.dumps(tree).encode())
            elif path.startswith("/api/models/owner/name"):
                self.answer(200, json.dumps(info).encode())
            elif path.startswith("/owner/name/resolve/"):
                name = path.split("/", 5)[5]
                if self.command == "GET":
                    fetched.append(name)
                self.answer(200, (folder / name).read_bytes())
            else:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT, **(headers or {})}
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", fetched
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import sys
from samelogits.checkpoints import open_checkpoint
from samelogits.errors import SamelogitsError
try:
    print(float(open_checkpoint(sys.argv[1]).parameters()["lm_head.weight"].sum()))
except SamelogitsError as error:
    sys.exit(str(error))
"""


def test_with_the_package_itself(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="downloads with huggingface_hub")
    address, fetched = hub

    def run(reference: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", "PATH": "", **settings}
        command = [sys.executable, "-c", PROGRAM, reference]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    done = run("hf://owner/name")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(float(done.stdout), llama_parameters()["lm_head.weight"].sum())
    assert sorted(set(fetched)) == ["config.json", "model.safetensors"]

    again = run("hf://owner/name", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    offline = run("hf://owner/other", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "neither a connection to the hub nor a local copy" in offline.stderr
    unknown = run("hf://owner/other")
    assert unknown.returncode == 1
    assert "no such repository" in unknown.stderr
    assert unknown.stderr.strip().count("\n") == 0
