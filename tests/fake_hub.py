"""A hub on this machine: what uploads and downloads use of the Hugging Face Hub's interface."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_right0123456789"
NOWHERE = "http://127.0.0.1:9"  # nothing listens there
REPO = "me/Tiny_1.5-it"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
UNREAD = {
    "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit", "README.md": b"# Tiny",
    "tokenizer_tiny.py": b"raise SystemExit", "onnx/model.safetensors": b"x", ".gitattributes": b"",
    "consolidated.safetensors": b"the same again", "../../config.json": b"{}", "tokenizer.bin": b"",
}  # fmt: skip


class FakeHub:
    """What it was sent, and what it holds.

    faults: part of a path -> status to answer, 0 to drop the connection.  asked: each file asked
    for, with its Range header.  cuts: file -> bytes after which answers break off, one each.
    served: file -> what comes in place of what is listed.  closed: repositories for TOKEN alone;
    gated: those whose files are.
    """

    def __init__(self, address: str, faults: dict[str, int]):
        self.address, self.faults = address, faults
        self.calls: list[str] = []
        self.made: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.commits: list[tuple[str, dict[str, Any], dict[str, bytes]]] = []
        self.held: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.cuts: dict[str, list[int]] = {}
        self.served: dict[str, bytes] = {}
        self.closed: set[str] = set()
        self.gated: set[str] = set()
        self.ranges = True
        self.changes: dict[str, Any] = {}  # of a repository's description

    def hold(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch; its name."""
        commits = self.held.setdefault(repo, {})
        commit = hashlib.sha1(f"{repo} {len(commits)}".encode()).hexdigest()
        commits[commit] = dict(files)
        self.branches[f"{repo}@{branch}"] = commit
        return commit

    def find(self, path: str, token: str | None) -> tuple[int, str, bytes | dict[str, Any] | str]:
        """What a GET gets: status, the hub's word for an error, and JSON, bytes or an address."""
        path = path.partition("?")[0]
        if path.startswith("/cdn/"):
            assert token is None  # it is another host's
            _, _, repo, commit, name = path.split("/", 4)
            return 200, "", self.held[unquote(repo)][commit][unquote(name)]
        words = path.removeprefix("/api/models").split("/")
        repo, rest = "/".join(words[1:3]), [unquote(word) for word in words[3:]]
        if token not in (None, f"Bearer {TOKEN}"):
            return 401, "", {"error": "Invalid credentials in Authorization header"}
        if repo not in self.held or (repo in self.closed and token is None):
            return (404 if token else 401), "RepoNotFound", {"error": "Repository not found"}
        revision = rest[1] if rest else "main"
        commit = self.branches.get(f"{repo}@{revision}", revision)
        if commit not in self.held[repo]:
            return 404, "RevisionNotFound", {"error": f"Invalid rev id: {revision}"}
        if path.startswith("/api/models"):
            return 200, "", self._describe(repo, commit)
        if repo in self.gated and token is None:
            return 403, "GatedRepo", {"error": "Access to model is restricted"}
        if rest[2].endswith(".safetensors"):
            at = self.address.replace("127.0.0.1", "localhost")
            quoted = path.rpartition("/")[2]
            return (
                302,
                "",
                f"{at}/cdn/{repo.replace('/', '%2F')}/{commit}/{quoted}?Signature=secret",
            )
        return 200, "", self.held[repo][commit]["/".join(rest[2:])]

    def _describe(self, repo: str, commit: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.held[repo][commit].items():
            of = {"rfilename": name, "size": len(data)}
            if name.endswith((".safetensors", ".bin", ".gguf")):
                digest = hashlib.sha256(data).hexdigest()
                of["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(of | {"blobId": git_digest(data)})
        return {"id": repo, "sha": commit, "siblings": siblings} | self.changes

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """What a call gets; ``body`` is JSON but for blobs."""
        name = path.partition("?")[0]
        if name.startswith("/blob/"):
            self.blobs[name.removeprefix("/blob/")] = body
            return {}
        if "/commit/" in name:
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        sent = json.loads(body)
        if name == "/api/repos/create":
            self.made.append(sent)
            whole = f"{sent.get('organization', 'me')}/{sent['name']}"
            return {"url": f"{self.address}/{whole}", "name": whole}
        if name == "/api/validate-yaml":
            assert sent["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if "/preupload/" in name:
            mode = {"safetensors": "lfs", "png": "lfs"}
            files = [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": mode.get(f["path"].rpartition(".")[2], "regular")}
                for f in sent["files"]
            ]  # fmt: skip
            return {"files": files}
        if name.endswith("/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._place(o) for o in sent["objects"]]}
        if name == "/verify":
            assert len(self.blobs[sent["oid"]]) == sent["size"]
            return {}
        raise AssertionError(path)

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.address}/blob/{wanted['oid']}?signature=secret"}
        return {
            **wanted,
            "actions": {"upload": upload, "verify": {"href": f"{self.address}/verify"}},
        }

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                blob = self.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"]
                files[value["path"]] = blob
            else:
                assert line["key"] == "file"
                files[value["path"]] = base64.b64decode(value["content"])
        self.commits.append((name, lines[0]["value"], files))
        return {
            "commitUrl": f"{self.address}/me/head/commit/{'0' * 40}", "commitOid": "0" * 40,
        }  # fmt: skip


def git_digest(data: bytes) -> str:
    """What git calls a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, token = self.hub, self.headers.get("Authorization")
        hub.calls.append(f"GET {self.path}")
        fault = next((s for part, s in hub.faults.items() if part in self.path), None)
        if fault == 0:
            self._drop()
            return
        status, word, found = (fault, "", {}) if fault else hub.find(self.path, token)
        if not isinstance(found, bytes):
            data = b"" if isinstance(found, str) else json.dumps(found).encode()
            more = {"Location": found} if isinstance(found, str) else {"X-Error-Code": word}
            self._send(status, data, more if word or not data else {})
            return
        name = unquote(self.path.partition("?")[0].rpartition("/")[2])
        asked = self.headers.get("Range")
        hub.asked.append((name, asked))
        data = hub.served.get(name, found)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and hub.ranges else 0
        if start and start >= len(data):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        more = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        cut = hub.cuts[name].pop(0) if hub.cuts.get(name) else None
        self._send(206 if start else 200, data[start:], more, cut)

    def _send(self, status: int, data: bytes, more: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **more}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[:cut])
        if cut is not None:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def do_POST(self) -> None:
        chunked = self.headers.get("Transfer-Encoding", "") == "chunked"
        length = int(self.headers["Content-Length"] or 0)
        body = self._chunks() if chunked else self.rfile.read(length)
        self.hub.calls.append(f"{self.command} {self.path}")
        fault = next((s for part, s in self.hub.faults.items() if part in self.path), None)
        own = not self.path.startswith("/blob/")
        if own and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            fault = 401
        if fault == 0:
            self._drop()
            return
        found = {"error": "told off"} if fault else self.hub.answer(self.path, body)
        data = json.dumps(found).encode()
        self.send_response(fault or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST  # noqa: N815

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running(faults: dict[str, int] | None = None) -> Iterator[FakeHub]:
    """A hub that listens until the end."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = hub = FakeHub(f"http://127.0.0.1:{server.server_port}", faults or {})
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
