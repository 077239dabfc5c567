"""The real app under the real server on loopback; only the Master behind it follows a script."""

import itertools
from contextlib import asynccontextmanager

import attrs
import httpx
import pytest
import trio

from pdserve.http.app import build_app
from pdserve.master.service import Readiness
from pdserve.telemetry.listener import open_listener
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.telemetry.serving import serve_asgi
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.text.template import ChatTemplate
from pdserve.wire.messages import Delta, ModelCard, TokenLogprob


def words(*texts, finish="stop", logprobs=False, choice=0, logprob=-0.5):
    """A script that says `texts`, one delta each, as a byte model would. A text may be bytes of half a character."""
    script = []
    index = 0
    for number, text in enumerate(texts):
        ids = tuple(text if isinstance(text, bytes) else text.encode())
        script.append(
            Delta(
                id="r",
                epoch=0,
                start_index=index,
                token_ids=ids,
                text="" if isinstance(text, bytes) else text,
                finish=finish if number == len(texts) - 1 else None,
                logprobs=tuple(TokenLogprob(i, logprob, ((i, logprob), (98, float("-inf")))) for i in ids)
                if logprobs
                else (),
                choice=choice,
            )
        )
        index += len(ids)
    return script


def interleaved(*scripts):
    """The steps of several scripts in turn, until each is at its end."""
    return [step for turn in itertools.zip_longest(*scripts) for step in turn if step is not None]


class ScriptedGeneration:
    prompt_tokens = 11
    cached_tokens = 4

    def __init__(self, script):
        self._script = iter(script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        for step in self._script:
            if isinstance(step, trio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                await trio.lowlevel.checkpoint()
                return step
        raise StopAsyncIteration


@attrs.define
class ScriptedMaster:
    """A Master's stand-in: deltas and failed choices to yield, errors to raise, events to wait for."""

    script: object = attrs.field(factory=lambda: words("hel", "lo"))
    card: ModelCard = attrs.field(factory=lambda: ModelCard("sim-bytes", "w", "v", 1000))
    max_capacity: int = 4
    room: int = 10_000
    ready: Readiness = attrs.field(factory=lambda: Readiness(True, ()))
    requests: list = attrs.field(factory=list)
    entered: trio.Event = attrs.field(factory=trio.Event)
    left: trio.Event = attrs.field(factory=trio.Event)
    exit_error: Exception | None = None

    @asynccontextmanager
    async def generate(self, request):
        self.requests.append(request)
        self.entered.set()
        try:
            yield ScriptedGeneration(self.script)
        finally:
            self.left.set()
            if self.exit_error is not None:
                raise self.exit_error

    def output_room(self, prompt_tokens, n):
        return self.room // n

    def readiness(self):
        return self.ready

    def tree(self):
        return {"name": "master", "odd": trio.Event}


@attrs.define
class Server:
    master: ScriptedMaster
    metrics: MasterMetrics
    client: httpx.AsyncClient
    host: str
    port: int
    stop: trio.Event
    stopped: trio.Event
    draining: bool = False

    @property
    def base_url(self):
        return f"http://{self.host}:{self.port}"

    def counted(self, endpoint, outcome):
        labels = {"endpoint": endpoint, "outcome": outcome}
        return self.metrics.registry.get_sample_value("pdserve_requests_total", labels) or 0

    async def settled(self, endpoint, outcome, times=1):
        """Wait until so many requests have ended this way: they end after their last byte."""
        with trio.fail_after(5):
            while self.counted(endpoint, outcome) != times:
                await trio.sleep(0.005)

    async def connect(self, data=b"", **options):
        sock = trio.socket.socket()
        for option, value in options.items():
            sock.setsockopt(trio.socket.SOL_SOCKET, getattr(trio.socket, option), value)
        await sock.connect((self.host, self.port))
        stream = trio.SocketStream(sock)
        await stream.send_all(data)
        return stream

    async def talk(self, data):
        """Send, and everything that comes back until the server closes."""
        async with await self.connect(data) as stream:
            return b"".join([chunk async for chunk in stream])


@asynccontextmanager
async def running(*, graceful=1.0, user_timeout=30.0, template=True, **options):
    tokenizer = ByteTokenizer()
    metrics = MasterMetrics()
    master = ScriptedMaster()
    listener = open_listener("127.0.0.1", 0, user_timeout=user_timeout)
    host, port = listener.getsockname()
    stop, stopped = trio.Event(), trio.Event()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            server = Server(master, metrics, client, host, port, stop, stopped)
            app = build_app(
                master,
                tokenizer=tokenizer,
                template=ChatTemplate(tokenizer.chat_template, bos="", eos="") if template else None,
                model_name="sim-bytes",
                metrics=metrics,
                is_draining=lambda: server.draining,
                **options,
            )

            async def serve(task_status):
                await serve_asgi(app, [listener], stop=stop, graceful=graceful, task_status=task_status)
                stopped.set()

            await nursery.start(serve)
            yield server
            stop.set()
            await client.aclose()
            await stopped.wait()


@pytest.fixture(name="words")
def words_fixture():
    return words


@pytest.fixture(name="interleaved")
def interleaved_fixture():
    return interleaved


@pytest.fixture(name="running")
def running_fixture():
    return running


@pytest.fixture(name="post")
def post_fixture():
    return post


@pytest.fixture
async def server():
    async with running() as server:
        yield server


def post(path, body, *, close=False, extra=b""):
    """The bytes of an HTTP/1.1 request."""
    connection = b"Connection: close\r\n" if close else b""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%s%sContent-Length: %d\r\n\r\n"
    return head % (path.encode(), connection, extra, len(body)) + body
