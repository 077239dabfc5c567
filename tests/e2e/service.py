"""The service as `python -m pdserve up` runs it: real processes, real NIXL, real HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

READY_TIMEOUT = 120.0
EXIT_TIMEOUT = 60.0
MODEL = "smollm2-135m-instruct"
SIM_MODEL = "sim-bytes"

running_logs: list[Path] = []
"""Of the services that run now; shown with a test that fails."""

OF_REQUESTS = (
    'pdserve_leases{state="used"}',
    "pdserve_slots_used",
    "pdserve_slots_queued",
    "pdserve_slots_reserved",
    "pdserve_transfers_running",
    "pdserve_holds",
    'pdserve_kv_pages{state="pinned"}',
    'pdserve_kv_pages{state="quarantined"}',
)
"""Series of a worker that are zero when nothing runs."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def wait_until(done: Callable[[], bool], timeout: float, message: str) -> float:
    """Seconds until `done()` held."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < timeout, f"{message}, after {timeout:g} s"
        time.sleep(0.01)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Stream:
    """What came over one streamed request: `events` in order, the time of each in `times`."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.events: list[dict] = []
        self.times: list[float] = []
        self.done = False
        """Whether `[DONE]` was the last that came."""
        self.headers: httpx.Headers | None = None

    def add(self, data: str) -> None:
        self.done = data == "[DONE]"
        if not self.done:
            self.events.append(json.loads(data))
            self.times.append(time.monotonic())

    @property
    def choices(self) -> list[dict]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def errors(self) -> list[dict]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def ids(self) -> list[int]:
        """The token ids; asserts that none is missing and none came twice."""
        ids: list[int] = []
        for choice in self.choices:
            assert not choice["token_ids"] or choice["start_index"] == len(ids)
            ids += choice["token_ids"]
        return ids

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    @property
    def finish(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"] is not None]

    @property
    def usage(self) -> dict:
        return next(event["usage"] for event in reversed(self.events) if event.get("usage"))

    def assert_failed(self) -> None:
        """An explicit error at the end and nothing that looks like a clean finish."""
        assert len(self.errors) == 1, self.events[-3:]
        assert "error" in self.events[-1]
        assert not self.done
        assert self.finish == []


class Service:
    """One `up` and its children on free ports while the block runs; leaving it asserts a clean end."""

    def __init__(self, log: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.flags = flags
        self.model = SIM_MODEL if "sim" in flags else MODEL
        self._log = log
        self._env = env
        self.port, self.link_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = [
            sys.executable,
            "-m",
            "pdserve",
            "up",
            "--port",
            str(self.port),
            "--link-port",
            str(self.link_port),
            *flags,
        ]

    def __enter__(self) -> Service:
        self.client = httpx.Client(
            base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=256), trust_env=False
        )
        running_logs.append(self._log)
        with self._log.open("w") as errors:
            self.process = subprocess.Popen(
                self._words, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._env
            )
        assert self.process.stdout is not None
        watchdog = threading.Timer(READY_TIMEOUT, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if not line.startswith(f"pdserve is ready at {self.url} "):
            self._end()
            pytest.fail(f"no ready line but {line!r}:\n{self.log}")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        ended = self.process.poll() is not None
        pids = self.children()
        self.process.terminate()
        try:
            code = self.process.wait(EXIT_TIMEOUT)
            left = [pid for pid in pids if alive(pid)]
        finally:
            self._end()
        if kind is None:  # a failure of the test itself says more
            assert ended or code == 0, f"exit code {code}"
            assert not left, "children were left behind"

    def _end(self) -> None:
        self.process.kill()
        self.process.wait(EXIT_TIMEOUT)
        self.process.stdout.close()
        self.client.close()
        running_logs.remove(self._log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pid(self, role: str) -> int:
        """The newest process of a role."""
        return int(re.findall(rf"{role}(?:-\d+)? starts: pid (\d+)", self.log)[-1])

    def children(self) -> set[int]:
        """The processes that `up` has started and not yet seen the end of."""
        pid = self.process.pid
        tasks = Path(f"/proc/{pid}/task").glob("*/children") if alive(pid) else ()
        return {int(word) for path in tasks for word in path.read_text().split()}

    def ready(self) -> bool:
        """Also False while there is no Master to ask."""
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def nodes(self) -> list[dict]:
        return self.client.get("/readyz").json()["nodes"]

    def metrics(self, url: str = "") -> dict[str, float]:
        """All series by `name{labels}`, of the Master or of the worker whose status pages are at `url`."""
        response = self.client.get(f"{url}/metrics")
        assert response.status_code == 200
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def worker_metrics(self) -> dict[str, dict[str, float]]:
        """By role; of one node each."""
        return {node["role"]: self.metrics(node["status_url"]) for node in self.nodes()}

    def in_use(self) -> dict[str, float]:
        """Everything that must be zero when nothing runs, and is not."""
        used = {"requests": float(len(self.client.get("/debug/tree").json()["requests"]))}
        for name, value in self.metrics().items():
            if name.startswith("pdserve_requests_in_flight"):
                used[name] = value
        workers = self.worker_metrics()
        assert set(workers) == {"prefill", "decode"}
        for role, series in workers.items():
            for name in OF_REQUESTS:
                used[f"{role} {name}"] = series[name]
        return {name: value for name, value in used.items() if value}

    def wait_quiet(self, timeout: float = 5.0) -> float:
        """Seconds until no request, lease, slot, pinned page, hold or transfer is left."""
        began = time.monotonic()
        while used := self.in_use():
            assert time.monotonic() - began < timeout, f"still in use after {timeout:g} s: {used}"
        return time.monotonic() - began

    def wait_leases(self, count: int) -> None:
        """Until Decode serves so many requests."""
        name = 'pdserve_leases{state="used"}'
        wait_until(lambda: self.worker_metrics()["decode"][name] == count, 30, f"there are not {count} leases")

    def wait_healed(self, dead: int) -> None:
        """Until another process than `dead` is Decode, and the service is ready."""
        wait_until(lambda: self.pid("decode") != dead and self.ready(), 60, "the service has not healed")

    def body(self, prompt: object, **more: object) -> dict:
        return {"model": self.model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}

    def complete(self, prompt: object, **more: object) -> dict:
        response = self.client.post("/v1/completions", json=self.body(prompt, **more))
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt: object, *, request_id: str | None = None, **more: object) -> Stream:
        """A streamed completion, read to its end. The token ids come along, and the usage."""
        more = {"return_token_ids": True, "stream_options": {"include_usage": True}, **more, "stream": True}
        headers = {"X-Request-Id": request_id} if request_id else {}
        path = "/v1/completions"
        with self.client.stream("POST", path, json=self.body(prompt, **more), headers=headers) as response:
            stream = Stream(response.status_code)
            stream.headers = response.headers
            if response.status_code != 200:
                stream.add(response.read().decode())
                return stream
            for line in response.iter_lines():
                if line.startswith("data: "):
                    stream.add(line[6:])
        return stream

    def cpu_seconds(self, role: str) -> float:
        fields = Path(f"/proc/{self.pid(role)}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self, role: str) -> int:
        """SIGKILL for the process of a role; its pid."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid
