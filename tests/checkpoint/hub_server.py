# SPDX-License-Identifier: Apache-2.0
"""A small hub on this machine: a folder's files, with ranges, under the paths that huggingface_hub asks."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(root: Path) -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """(endpoint, log) of a server for root/<owner>/<name>/<file>; the log has (method, path, bytes sent)."""
    log: list[tuple[str, str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_HEAD = do_GET

        def _answer(self) -> None:
            parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
            if parts[:2] == ["api", "models"]:
                return self._repository("/".join(parts[2:4]))
            repository, name = root / "/".join(parts[:2]), "/".join(parts[4:])
            if repository.name == "forbidden":
                return self._fail("", 403)
            if not repository.is_dir():
                return self._fail("RepoNotFound", 401)
            if parts[3] not in ("main", COMMIT):
                return self._fail("RevisionNotFound")
            if not (repository / name).is_file():
                return self._fail("EntryNotFound")
            data = (repository / name).read_bytes()
            wanted = self.headers.get("range", "")
            if wanted.startswith("bytes="):
                first, last = wanted.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1]
                span = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                return self._send(206, part, {"Content-Range": span})
            return self._send(200, data)

        def _repository(self, name: str) -> None:
            folder = root / name
            if not folder.is_dir():
                return self._fail("RepoNotFound", 401)
            files = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0"} for p in folder.iterdir()]
            listed: Any = files
            if "/tree/" not in self.path:
                siblings = [{"rfilename": file["path"]} for file in files]
                listed = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

        def _fail(self, code: str, status: int = 404) -> None:
            self._send(status, b"", {"X-Error-Code": code})

        def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            common = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{sha256(data).hexdigest()}"',
                "Content-Length": str(len(data)),
            }
            for key, value in (common | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)
            log.append((self.command, self.path, len(data) if self.command == "GET" else 0))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
