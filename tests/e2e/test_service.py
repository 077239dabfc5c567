"""Real processes, real NIXL, real HTTP: the service as `python -m pdserve` runs it."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from pdserve.engine.sim import expected_tokens
from pdserve.wire.messages import SamplingParams

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
READY_TIMEOUT = 180.0


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def children(pid: int) -> set[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(word) for word in path.read_text().split()} if path.exists() else set()


def wait_until(what, timeout: float, message: str) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


class Service:
    """`python -m pdserve up …` on free ports, until the block ends; ends with no child left."""

    def __init__(self, log: Path, *flags: str) -> None:
        port, link_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdserve", "up", "--port", str(port), "--link-port", str(link_port), *flags],
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def __enter__(self) -> Service:
        assert self.process.stdout is not None
        killer = threading.Timer(READY_TIMEOUT, self.process.kill)
        killer.start()
        line = self.process.stdout.readline()
        killer.cancel()
        assert "curl -N" in line, f"no ready line:\n{self.log}"
        assert self.url in line
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        ended = self.process.poll() is not None
        pids = children(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert ended or code == 0, f"exit {code}:\n{self.log}"
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a child was left behind"
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def log(self) -> str:
        return self._log.read_text()[-8000:]

    def pid(self, role: str) -> int:
        """The newest process of a role."""
        return int(re.findall(rf"{role}-?\d* starts: pid (\d+)", self._log.read_text())[-1])

    def nodes(self) -> list[dict]:
        return self.client.get("/readyz").json()["nodes"]

    def gauge(self, url: str, name: str) -> float:
        text = httpx.get(f"{url}/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        assert values, f"there is no metric {name}"
        return sum(map(float, values))

    def in_use(self) -> dict[str, float]:
        """Everything that must be zero when nothing runs."""
        used = {"requests": len(self.client.get("/debug/tree").json()["requests"])}
        for node in self.nodes():
            text = httpx.get(f"{node['status_url']}/metrics").text
            for name in ("pdserve_slots_used", "pdserve_transfers_running", "pdserve_holds"):
                used[f"{node['role']} {name}"] = float(re.search(rf"^{name} (\S+)$", text, re.M)[1])
            used[f"{node['role']} leases"] = float(re.search(r'^pdserve_leases{state="used"} (\S+)$', text, re.M)[1])
            for state in ("pinned", "quarantined"):
                used[f"{node['role']} {state}"] = float(
                    re.search(rf'^pdserve_kv_pages{{state="{state}"}} (\S+)$', text, re.M)[1]
                )
        return used

    def wait_quiet(self, timeout: float = 5.0) -> float:
        began = time.monotonic()
        wait_until(lambda: not any(self.in_use().values()), timeout, f"still in use: {self.in_use()}")
        return time.monotonic() - began

    def stream(self, body: dict) -> list[dict | str]:
        """All events of a streamed completion, `[DONE]` as a string; or the one error that came instead."""
        events: list[dict | str] = []
        with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                return [json.loads(response.read())]
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]))
        return events


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("up") / "log", "--kv-tokens", "8192", "--dtype", "float32") as it:
        yield it


@pytest.fixture
def sim(tmp_path):
    def start(*flags: str) -> Service:
        return Service(tmp_path / "log", "--engine", "sim", *flags)

    return start


def ids_of(events: list) -> list[int]:
    return [
        token
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", [])
        for token in choice.get("token_ids", [])
    ]


def text_of(events: list) -> str:
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in event.get("choices", []))


def test_the_openai_client_gets_chat_and_completions_streamed_and_not(service):
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    text = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=2)
    assert len(text.choices[0].logprobs.tokens) == 12
    streamed = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed if c.choices) == text.choices[0].text


@pytest.mark.parametrize(
    "extra",
    [{}, {"stop": ["\n", " and"]}, {"max_tokens": 1}, {"temperature": 0.8, "seed": 7}],
    ids=["greedy", "stop", "one", "seeded"],
)
@pytest.mark.parametrize(
    "prompt", ["The sea is", "🎉🎊🥳 emoji: 🎉🎊", "北京是中国的首都，"], ids=["en", "emoji", "zh"]
)
def test_streamed_and_whole_text_are_the_same_string(service, prompt, extra):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, **extra}
    whole = service.client.post("/v1/completions", json=body).json()["choices"][0]
    events = service.stream(body)
    assert text_of(events) == whole["text"]
    assert events[-1] == "[DONE]"
    assert not any(stop in whole["text"] for stop in extra.get("stop", ()))


def test_greedy_output_through_both_nodes_equals_the_reference_cold_and_cached(service):
    fixture = Path(__file__).parent.parent / "engine" / "torch_engine" / "reference.json"
    cases = json.loads(fixture.read_text())["prompts"]
    differing = 0
    for case in [case for case in cases if len(case["ids"]) <= 50]:
        body = {
            "model": MODEL,
            "prompt": case["ids"],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in range(2):
            ids = ids_of(service.stream(body))
            if ids != case["output"][:16]:
                differing += 1
    assert differing <= 2


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_prompts_around_page_borders_give_the_same_output_with_and_without_cache(service, length):
    prompt = [(7 * i + 13 * length) % 30000 + 100 for i in range(length)]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    cold, cached = ids_of(service.stream(body)), ids_of(service.stream(body))
    assert len(cold) == 8
    assert cold == cached
    usage = service.client.post("/v1/completions", json={**body, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16


def test_sixteen_streams_complete_and_leave_nothing(service):
    def one(i: int) -> int:
        body = {
            "model": MODEL,
            "prompt": f"Number {i}:",
            "max_tokens": 128,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        events = service.stream(body)
        assert events[-1] == "[DONE]"
        return len(ids_of(events))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [128] * 16
    service.wait_quiet()


def test_a_client_that_leaves_gives_everything_back(service):
    times = []
    for i in range(5):
        body = {"model": MODEL, "prompt": f"Leave {i}", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with service.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(3):
                next(lines)
        times.append(service.wait_quiet())
    print("seconds until everything was back:", sorted(times))
    assert sorted(times)[2] < 1.0


def test_the_same_request_id_twice_is_two_answers(service):
    def one(prompt: str) -> tuple[str, str]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        response = service.client.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        return response.headers["x-request-id"], response.json()["choices"][0]["text"]

    alone = [one("The sun"), one("A cat")]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, ["The sun", "A cat"])) == alone
    assert alone[0][0] == "same"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"prompt": [5] * 9000}, 400, "prompt"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": "x"}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_a_bad_request_names_the_parameter_and_reaches_no_worker(service, change, status, param):
    steps = [service.gauge(node["status_url"], "pdserve_steps_total") for node in service.nodes()]
    response = service.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 4, **change})
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert [service.gauge(node["status_url"], "pdserve_steps_total") for node in service.nodes()] == steps
    assert service.client.post("/v1/completions", content=b"{nonsense").status_code == 400


def test_the_master_needs_neither_torch_nor_nixl_and_idle_processes_are_idle(service):
    assert not re.search("libtorch|nixl", Path(f"/proc/{service.pid('master')}/maps").read_text())
    assert children(service.process.pid) == {service.pid(role) for role in ("master", "prefill", "decode")}

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    service.wait_quiet()
    time.sleep(1)
    before = {role: ticks(service.pid(role)) for role in ("master", "prefill", "decode")}
    time.sleep(5)
    shares = {role: (ticks(service.pid(role)) - n) / os.sysconf("SC_CLK_TCK") / 5 for role, n in before.items()}
    print("idle share of a core:", shares)
    assert shares["master"] < 0.06
    # The targets are 0.02 and 0.04 on a quiet machine; these limits leave room for a noisy one.
    assert shares["prefill"] < 0.1
    assert shares["decode"] < 0.1


def test_a_killed_decode_process_ends_streams_with_one_error_and_the_service_heals(sim):
    with sim("--sim-decode-ms", "20") as it:
        ended = []

        def one(i: int) -> list:
            events = it.stream({"model": "sim-bytes", "prompt": f"kill {i}", "max_tokens": 2000})
            ended.append(time.monotonic())
            return events

        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(one, i) for i in range(8)]
            wait_until(lambda: it.in_use()["decode leases"] == 8, 20, "the streams did not start")
            killed = time.monotonic()
            os.kill(it.pid("decode"), signal.SIGKILL)
            for stream in streams:
                events = stream.result()
                assert sum("error" in event for event in events if event != "[DONE]") == 1
                assert "error" in events[-1]
        print("seconds until the last stream ended:", max(ended) - killed)
        assert max(ended) - killed < 5
        wait_until(lambda: it.client.get("/readyz").status_code == 200, 60, f"not healed:\n{it.log}")
        assert it.stream({"model": "sim-bytes", "prompt": "again", "max_tokens": 3})[-1] == "[DONE]"
        it.wait_quiet()


def test_a_hung_step_ends_the_process_and_the_service_heals(sim):
    with sim("--faults", "step-hang-after=6", "--step-timeout", "1") as it:
        events = it.stream({"model": "sim-bytes", "prompt": "hang", "max_tokens": 100})
        assert "error" in events[-1]
        wait_until(lambda: it.client.get("/readyz").status_code == 200, 60, f"not healed:\n{it.log}")
        assert it.stream({"model": "sim-bytes", "prompt": "again", "max_tokens": 2})[-1] == "[DONE]"


@pytest.mark.parametrize("fault", ["omit-first-token", "protocol-bump", "transfer-delay=0.3"])
def test_faults_that_change_no_output(sim, fault):
    with sim("--faults", fault) as it:
        prompt = list(range(40, 90))
        body = {"model": "sim-bytes", "prompt": prompt, "max_tokens": 10, "temperature": 0, "return_token_ids": True}
        assert ids_of(it.stream(body)) == expected_tokens(prompt, SamplingParams(max_tokens=10, temperature=0.0))


def test_a_transfer_that_fails_after_the_first_token_is_an_error(sim):
    with sim("--faults", "transfer-fail=-1") as it:
        for max_tokens in (2, 20):
            events = it.stream({"model": "sim-bytes", "prompt": "x" * 40, "max_tokens": max_tokens})
            assert "error" in events[-1]
            assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])
        body = {"model": "sim-bytes", "prompt": "x" * 40, "max_tokens": 2}
        assert it.client.post("/v1/completions", json=body).status_code == 502
        assert it.stream({**body, "max_tokens": 1})[-1] == "[DONE]"


def test_when_up_is_killed_no_child_is_left(sim):
    it = sim()
    with it:
        pids = children(it.process.pid)
        assert len(pids) == 3
        it.process.kill()
        it.process.wait(10)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "a child was left behind")


def test_a_drain_lets_a_running_stream_finish(sim):
    with sim("--sim-decode-ms", "20") as it, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(it.stream, {"model": "sim-bytes", "prompt": "drain", "max_tokens": 100})
        wait_until(lambda: it.in_use()["decode leases"] == 1, 20, "the stream did not start")
        it.process.send_signal(signal.SIGINT)
        assert stream.result()[-1] == "[DONE]"
        assert it.process.wait(60) == 0
