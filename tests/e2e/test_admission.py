"""Admission and several choices over real processes, real NIXL and real HTTP, with the simulated engine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from statistics import median

import httpx
import openai
import pytest

from pdserve.engine.sim import expected_tokens
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.wire.messages import SamplingParams

pytestmark = pytest.mark.e2e

PROMPT = list(range(40, 80))
SAMPLED = {"temperature": 1.0, "seed": 5}


def expected(n: int, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, **SAMPLED)
    eos = ByteTokenizer().eos_token_ids
    return [expected_tokens(PROMPT, params, choice, eos, vocab_size=258) for choice in range(n)]


def by_choice(stream) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    for choice in stream.choices:
        mine = ids.setdefault(choice["index"], [])
        assert not choice["token_ids"] or choice["start_index"] == len(mine)
        mine += choice["token_ids"]
    return ids


@contextmanager
def running(service, count: int, **more):
    """So many streams that each hold a slot while the block runs."""
    stop, threads, started = threading.Event(), [], [threading.Event() for _ in range(count)]

    def read(number: int) -> None:
        body = service.body([60 + number] * 5, max_tokens=3000, stream=True, ignore_eos=True, **more)
        with service.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            for _ in response.iter_lines():
                started[number].set()
                if stop.is_set():
                    return

    for number in range(count):
        threads.append(threading.Thread(target=read, args=(number,)))
        threads[-1].start()
        assert started[number].wait(30)
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, make_sim):
    """Shared by the tests that leave it as they found it."""
    with make_sim(tmp_path_factory.mktemp("plain") / "sim.log") as service:
        yield service


def test_three_choices_streamed_and_whole_are_reproducible(plain):
    want = expected(3, 20)
    stream = plain.stream(PROMPT, n=3, max_tokens=20, **SAMPLED)
    assert (stream.status, stream.done, sorted(stream.finish)) == (200, True, ["length"] * 3)
    assert by_choice(stream) == dict(enumerate(want))
    whole = plain.complete(PROMPT, n=3, max_tokens=20, return_token_ids=True, **SAMPLED)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in whole["choices"]] == want
    for usage in (stream.usage, whole["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 60)
    plain.wait_quiet()


def test_three_choices_through_the_openai_client(plain):
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none") as client:
        asked = {"model": plain.model, "messages": [{"role": "user", "content": "Hello"}], "n": 3, "max_tokens": 12}
        whole = client.chat.completions.create(**asked, **SAMPLED)
        texts = {choice.index: choice.message.content for choice in whole.choices}
        assert sorted(texts) == [0, 1, 2]
        assert len(set(texts.values())) > 1
        streamed: dict[int, str] = {}
        roles = []
        for chunk in client.chat.completions.create(**asked, **SAMPLED, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
                roles += [choice.index] if choice.delta.role else []
        assert streamed == texts
        assert sorted(roles) == [0, 1, 2]
        plain.wait_quiet()


def test_the_best_of_four_is_one_of_them(plain):
    whole = plain.complete(PROMPT, n=1, best_of=4, max_tokens=8, return_token_ids=True, **SAMPLED)
    (best,) = whole["choices"]
    assert best["token_ids"] in expected(4, 8)
    assert whole["usage"]["completion_tokens"] == 32
    refused = plain.client.post("/v1/completions", json=plain.body(PROMPT, best_of=4, stream=True))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_one_failing_choice_is_named_in_the_stream_and_fails_a_whole_answer(sim):
    with sim("--faults", "fail-choice=1") as service:
        stream = service.stream(PROMPT, n=3, max_tokens=20, **SAMPLED)
        want = expected(3, 20)
        ids = by_choice(stream)
        assert (ids[0], ids[2], ids[1]) == (want[0], want[2], want[1][: len(ids[1])])
        assert stream.finish == ["length", "length"]
        assert not stream.done
        assert [error["param"] for error in stream.errors] == ["choices[1]"]
        whole = service.client.post("/v1/completions", json=service.body(PROMPT, n=3))
        assert whole.status_code == 502
        service.wait_quiet()


def test_more_choices_than_slots_are_invalid(sim):
    with sim("--max-running-requests", "2") as service:
        answer = service.client.post("/v1/completions", json=service.body(PROMPT, n=3))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert "2" in answer.json()["error"]["message"]


@pytest.mark.parametrize("decodes", [1, 2])
def test_a_full_service_answers_429_as_fast_as_it_would_have_begun(sim, decodes):
    flags = ("--decode", str(decodes), "--max-running-requests", "2", "--admission-queue-size", "0")
    with sim(*flags, "--sim-decode-ms", "20") as service:
        unloaded = []
        for salt in range(10):
            began = time.monotonic()
            stream = service.stream([90 + salt] * 20, max_tokens=1)
            unloaded.append(stream.times[0] - began)
        with running(service, 2 * decodes):
            took = []
            for salt in range(50):
                streamed, choices = bool(salt % 2), 1 + salt % 2
                body = service.body([100 + salt] * 20, stream=streamed, n=choices)
                began = time.monotonic()
                answer = service.client.post("/v1/completions", json=body)
                took.append(time.monotonic() - began)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "ServerBusyError"
            assert median(took) <= median(unloaded) + 0.05
            assert service.metrics()['pdserve_admission_refusals_total{reason="queue_full"}'] == 50
        service.wait_quiet(10)


def test_a_client_with_three_choices_that_leaves_in_any_phase_leaves_nothing(sim):
    flags = ("--sim-prefill-tokens-per-s", "400", "--faults", "transfer-delay=0.1")
    with sim(*flags) as service:
        for salt, seconds in enumerate((0.02, 0.08, 0.12, 0.15, 0.2, 0.25, 0.4)):
            body = service.body([50 + salt] * 37, n=3, max_tokens=400, stream=True, ignore_eos=True)
            with httpx.Client(base_url=service.url, timeout=seconds, trust_env=False) as client:
                with pytest.raises(httpx.ReadTimeout):
                    with client.stream("POST", "/v1/completions", json=body) as response:
                        until = time.monotonic() + seconds
                        for _ in response.iter_raw():
                            if time.monotonic() > until:
                                raise httpx.ReadTimeout("left")
            service.wait_quiet(5)


class SecondMaster:
    """`python -m pdserve master` beside the one of `up`."""

    def __init__(self, log, port: int, link_port: int) -> None:
        words = [sys.executable, "-m", "pdserve", "master", "--model", "sim-bytes"]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*words, "--port", str(port), "--link-port", str(link_port)], stderr=errors, stdout=errors
            )

    def __enter__(self) -> SecondMaster:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.mark.failure(29)
def test_a_killed_master_gives_everything_back_within_a_second_and_the_other_never_notices(
    sim, tmp_path, free_ports, await_true
):
    port, link_port = free_ports(2)
    with SecondMaster(tmp_path / "second.log", port, link_port) as second:
        flags = ("--max-running-requests", "4", "--masters", f"ws://127.0.0.1:{link_port}", "--admission-timeout", "30")
        with sim(*flags) as service:
            await_true(
                lambda: httpx.get(f"{second.url}/readyz", trust_env=False).status_code == 200, 60, "no second Master"
            )
            other = httpx.Client(base_url=second.url, timeout=60, trust_env=False)
            body = {"prompt": [70] * 9, "max_tokens": 3000, "stream": True, "ignore_eos": True, "n": 3}
            with other.stream("POST", "/v1/completions", json=body) as doomed:
                lines = doomed.iter_lines()  # dropped, it would close the response
                next(lines)
                service.wait_leases(3)
                events = service.stream([71] * 9, max_tokens=10)
                assert events.done
                with running(service, 1):
                    service.wait_leases(4)
                    second.process.send_signal(signal.SIGKILL)
                    began = time.monotonic()
                    service.wait_leases(1)
                    assert time.monotonic() - began < 1.0
                    # The idle Master's slots are all there for the one that is left.
                    with running(service, 3):
                        service.wait_leases(4)
                with pytest.raises(httpx.HTTPError):
                    for _ in lines:
                        pass
            other.close()
            assert service.nodes()
            service.wait_quiet(10)


def test_the_deprecated_alias_works_and_warns(sim):
    with sim("--disable_pd_master_decode_capacity_limit") as service:
        stream = service.stream(PROMPT, n=3, max_tokens=20, **SAMPLED)
        assert by_choice(stream) == dict(enumerate(expected(3, 20)))
        assert re.search("--disable_pd_master_decode_capacity_limit is deprecated", service.log)
        service.wait_quiet()


def test_a_decode_node_without_admission_is_refused_by_a_master_that_wants_it(sim, tmp_path, free_ports, await_true):
    port, link_port = free_ports(2)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    with SecondMaster(tmp_path / "second.log", port, link_port) as second:
        words = [sys.executable, "-m", "pdserve", "decode", "--model", "sim-bytes", "--engine", "sim"]
        words += ["--disable-admission", "--masters", f"ws://127.0.0.1:{link_port}", "--node-id", "old"]
        log = tmp_path / "old.log"
        with log.open("w") as errors:
            node = subprocess.Popen(words, stderr=errors, stdout=errors, env=environment)
        try:

            def reasons() -> list[str]:
                try:
                    return httpx.get(f"{second.url}/readyz", trust_env=False).json()["reasons"]
                except httpx.TransportError:
                    return []

            await_true(lambda: any("decode_admission" in why and "old" in why for why in reasons()), 60, "not named")
            await_true(lambda: "decode_admission" in log.read_text(), 10, "the node's log does not say why")
            assert "decode_admission" in (tmp_path / "second.log").read_text()
        finally:
            node.kill()
            node.wait(30)
