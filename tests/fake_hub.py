"""A hub on this machine: as much of the Hugging Face Hub's interface as an upload uses."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right0123456789"


class FakeHub:
    """What it was sent.  faults: part of a path -> status to answer, 0 to drop the connection."""

    def __init__(self, address: str, faults: dict[str, int]):
        self.address, self.faults = address, faults
        self.calls: list[str] = []
        self.made: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.commits: list[tuple[str, dict[str, Any], dict[str, bytes]]] = []

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


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        chunked = self.headers.get("Transfer-Encoding", "") == "chunked"
        length = int(self.headers["Content-Length"] or 0)
        body = self._chunks() if chunked else self.rfile.read(length)
        self.hub.calls.append(f"{self.command} {self.path}")
        fault = next((s for part, s in self.hub.faults.items() if part in self.path), None)
        if self.command == "GET":  # whether the repository is there
            fault = 404
        own = not self.path.startswith("/blob/")
        if own and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            fault = 401
        if fault == 0:
            self.close_connection = True
            self.connection.close()
            return
        found = {"error": "told off"} if fault else self.hub.answer(self.path, body)
        data = json.dumps(found).encode()
        self.send_response(fault or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_GET = do_POST  # noqa: N815

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
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
