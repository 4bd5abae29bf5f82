"""A server on the loopback address that answers W&B's library as far as runs and reports need it.

It keeps what it is told: runs with config, tags, summary and history, files, and views (W&B's word for reports). What
it cannot show: how W&B's own pages draw them, and what W&B's server refuses.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import wandb

ENTITY = "someone"
_PROJECT = {"id": "project", "entityName": ENTITY, "createdAt": "", "isBenchmark": False, "user": None}


@dataclass
class StoredRun:
    """A run, as the server stores it."""

    project: str
    config: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    job_type: str | None = None
    history: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        return [json.loads(line)["_step"] for line in self.history]


@dataclass
class StandIn:
    """The state of the server. Each answer takes `delay` seconds; `asked` are the operations, in order."""

    url: str = ""
    delay: float = 0.0
    runs: dict[str, StoredRun] = field(default_factory=dict)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "Viewer":
            return {
                "viewer": {"id": "user", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}
            }
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self._upsert_run(variables), "inserted": True}}
        if operation == "RunResumeStatus":
            return {
                "model": {
                    "id": "model",
                    "name": variables["project"],
                    "entity": {"name": ENTITY},
                    "bucket": self._resumed(variables["name"]),
                }
            }
        if operation == "CreateRunFiles":
            files = [
                {"name": name, "uploadUrl": f"{self.url}/put/{variables['run']}/{name}"} for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        if operation == "upsertView":
            return {"upsertView": self._upsert_view(variables)}
        if operation == "GetProjects":
            names = dict.fromkeys(run.project for run in self.runs.values())
            projects = [{"node": {**_PROJECT, "name": name}} for name in names]
            return {"models": {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": projects}}
        if operation == "ProjectInternalId":
            return {"project": {"id": "project", "internalId": "1"}}
        return {}

    def _upsert_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(variables["name"], StoredRun(variables["project"]))
        run.config |= json.loads(variables["config"] or "{}")
        run.tags = variables["tags"] or run.tags
        run.group = variables["groupName"] or run.group
        run.job_type = variables["jobType"] or run.job_type
        return self._bucket(variables["name"], run)

    def _resumed(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        return None if run is None else self._bucket(name, run)

    def _bucket(self, name: str, run: StoredRun) -> dict[str, Any]:
        tail = run.history[-1:]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "config": json.dumps(run.config),
            "summaryMetrics": json.dumps(run.summary),
            "tags": run.tags,
            "project": {"id": "project", "name": run.project, "entity": {"id": "entity", "name": ENTITY}},
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "history": "[]",
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "wandbConfig": json.dumps({"t": 1}),
        }

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = variables["id"] is None
        view_id = f"view{len(self.views)}" if inserted else variables["id"]
        view = {
            "id": view_id,
            "type": variables["type"],
            "name": variables["name"],
            "displayName": variables["displayName"],
            "description": variables["description"],
            "project": {"id": "project", "name": variables["projectName"], "entityName": variables["entityName"]},
            "spec": variables["spec"],
            "updatedAt": None,
        }
        self.views[view_id] = view
        return {"view": view, "inserted": inserted}

    def stream(self, name: str, files: dict[str, Any]) -> None:
        run = self.runs[name]
        if history := files.get("wandb-history.jsonl"):
            run.history[history["offset"] :] = history["content"]
        if summary := files.get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            time.sleep(stand_in.delay)
            value: dict[str, Any] = {}
            if self.path == "/graphql":
                asked = json.loads(body)
                found = re.search(r"\b(?:query|mutation)\s+(\w+)", asked["query"])
                operation = found.group(1) if found else ""
                stand_in.asked.append(operation)
                value = {"data": stand_in.answer(operation, asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                stand_in.asked.append("file_stream")
                stand_in.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
            self._reply(json.dumps(value).encode())

        def do_PUT(self) -> None:
            _, _, run, name = self.path.split("/", 3)
            stand_in.runs[run].files[name] = self._body()
            self._reply(b"")

        def do_GET(self) -> None:
            self._reply(b"{}")

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
            """Print nothing."""

    return Handler


@contextmanager
def stand_in_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Run the server, and log this process and its children in to it."""
    stand_in = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stand_in))
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", stand_in.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()  # the library remembers which server it is logged in to
    try:
        yield stand_in
    finally:
        wandb.teardown()
        server.shutdown()
        server.server_close()
        thread.join()
