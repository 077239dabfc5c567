"""The configuration of each role: one frozen attrs class, from which everything else comes.

cyclopts turns the fields into flags (`page_size` → `--page-size`), environment variables (`PDSERVE_PAGE_SIZE`), keys
of the TOML file (`page-size` or `page_size`) and `--help`. A value that cannot be used raises `ConfigError` naming the
flag, however the value came in, also when the class is built by hand in a test.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path  # noqa: TC003  (cyclopts reads the annotations)
from secrets import token_hex
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen
from cyclopts import Parameter

from pdserve.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
SIM_MODEL = "sim-bytes"

_RANDOM = token_hex(4)
"""Of this process, for as long as it lives."""

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def flag(name: str) -> str:
    """The command-line spelling of a field: `kv_tokens` → `--kv-tokens`."""
    return "--" + name.replace("_", "-")


def _at_least(low: float) -> Validator:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not low <= value < math.inf:  # also refuses NaN
            raise ConfigError(f"{flag(attribute.name)} must be {low:g} or more, not {value:g}")

    return check


def _more_than(low: float, most: float = math.inf) -> Validator:
    def check(_: object, attribute: Attribute[Any], value: float) -> None:
        if not (low < value <= most and value < math.inf):
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise ConfigError(f"{flag(attribute.name)} must be more than {low:g}{limit}, not {value:g}")

    return check


def _port(_: object, attribute: Attribute[Any], value: int) -> None:
    if not 0 <= value <= 65535:
        raise ConfigError(f"{flag(attribute.name)} must be a port number (0 to 65535), not {value}")


def _not_empty(_: object, attribute: Attribute[Any], value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{flag(attribute.name)} must not be empty")


def _address(_: object, attribute: Attribute[Any], value: str) -> None:
    _not_empty(_, attribute, value.strip("[]"))


def _file(_: object, attribute: Attribute[Any], value: Path | None) -> None:
    if value is not None and not value.is_file():
        raise ConfigError(f"{flag(attribute.name)}: there is no file {value}")


def _deadline(_: object, attribute: Attribute[Any], value: float) -> None:
    if value == 0 or math.isnan(value):
        raise ConfigError(f"{flag(attribute.name)} must not be {value:g}: give seconds, or a negative number for none")


def _urls(_: object, attribute: Attribute[Any], value: str) -> None:
    for url in split_urls(value):
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port is not None
        except ValueError:  # a port that is no number
            usable = False
        if not usable:
            raise ConfigError(f"{flag(attribute.name)}: {url!r} is not of the form ws://HOST:PORT or wss://HOST:PORT")


def _faults(_: object, __: Attribute[Any], value: str) -> None:
    parse_faults(value)


def split_urls(masters: str) -> tuple[str, ...]:
    """The comma-separated list as a tuple, each URL once, in order."""
    return tuple(dict.fromkeys(url.strip() for url in masters.split(",") if url.strip()))


def process_name() -> str:
    """A name that no other process has: containers on the host's network share its name, and all have process id 1."""
    return f"{socket.gethostname()}-{os.getpid()}-{_RANDOM}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@frozen(kw_only=True)
class Faults:
    """Failures that tests provoke in a real worker. All off by default."""

    omit_first_token: bool = False
    transfer_delay: float = 0.0
    """Seconds added to every KV read."""
    transfer_fail: int = 0
    """How many KV reads fail, counted from the start; -1: all."""
    step_hang_after: int = 0
    """The engine hangs after so many steps; 0: never."""
    protocol_bump: bool = False
    fail_choice: int = -1
    """On Decode this choice of every request fails after its first token; -1: none."""


_FAULT_PARSERS: dict[str, tuple[str, Callable[[str], bool | float | int]]] = {
    "omit-first-token": ("omit_first_token", bool),
    "transfer-delay": ("transfer_delay", float),
    "transfer-fail": ("transfer_fail", int),
    "step-hang-after": ("step_hang_after", int),
    "protocol-bump": ("protocol_bump", bool),
    "fail-choice": ("fail_choice", int),
}


def parse_faults(text: str) -> Faults:
    """Parse `omit-first-token,transfer-delay=0.5`. Raises `ConfigError` for an unknown fault or an unusable value."""
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = item.partition("=")
        if name not in _FAULT_PARSERS:
            raise ConfigError(f"--faults: unknown fault {name!r}; known are {', '.join(_FAULT_PARSERS)}")
        key, parse = _FAULT_PARSERS[name]
        if (parse is bool) == bool(given):
            raise ConfigError(f"--faults: {name} takes {'no' if parse is bool else 'a'} value")
        try:
            found[key] = True if parse is bool else parse(value)
        except ValueError:
            raise ConfigError(f"--faults: {value!r} is not a usable value of {name}") from None
    return Faults(**found)


def _whole(_: object, value: str, *, delimiter: str | None = None) -> list[str]:
    """A variable is one value even if it is empty: cyclopts would split it into none, as if it were not there."""
    return [value]


_ApiKeys = Annotated[
    tuple[str, ...],
    Parameter(
        help="Keys that clients may send as bearer token; repeatable or separated by commas. None: open to all.",
        show_default=False,
        negative=(),
        env_var_split=_whole,
    ),
]


def _take_brackets_off(config: CommonConfig, *fields: str) -> None:
    """`[::1]` as in URLs is the address ::1. No converter: it would cost the field its annotation and help."""
    for name in fields:
        object.__setattr__(config, name, getattr(config, name).strip("[]"))


def _split_keys(given: _ApiKeys) -> tuple[str, ...]:  # attrs takes the annotation of the field from here
    """Keys contain neither commas nor spaces, so one variable can hold several of them.

    Whoever gives a value wants a key: one that holds none, such as a variable that is not set, is not "open to all".
    """
    keys = tuple(key for value in given for key in value.replace(",", " ").split())
    if given and not keys:
        raise ConfigError("--api-key was given but holds no key: give one, or leave it out for a service open to all")
    return keys


def _token(_: object, attribute: Attribute[Any], value: str) -> None:
    if value and not value.strip():
        raise ConfigError(f"{flag(attribute.name)} is nothing but white space")


@frozen(kw_only=True, slots=False)
class CommonConfig:
    """What every role has."""

    model: Annotated[
        str, Parameter(help="Model name or path: a GGUF file or a directory with safetensors. All nodes need the same.")
    ] = field(default=DEFAULT_MODEL, validator=_not_empty)
    max_seq_len: Annotated[int, Parameter(help="Longest sequence in tokens, prompt included; 0: the model's own.")] = (
        field(default=0, validator=_at_least(0))
    )
    cluster_token: Annotated[
        str, Parameter(help="Shared secret of Masters and workers; proved by HMAC, never sent.", show_default=False)
    ] = field(default="", repr=False, validator=_token)
    heartbeat_interval: Annotated[float, Parameter(help="Seconds between heartbeats on a node link.")] = field(
        default=2.0, validator=_more_than(0)
    )
    drain_timeout: Annotated[float, Parameter(help="Seconds that running requests get to finish in a drain.")] = field(
        default=30.0, validator=_at_least(0)
    )
    link_ca: Annotated[Path | None, Parameter(help="CA file to verify wss:// node links with.")] = field(
        default=None, validator=_file
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(help="Least severe level logged.")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], Parameter(help="Log lines to read, or one JSON object a line.")] = (
        "text"
    )


@frozen(kw_only=True, slots=False)
class AdmissionConfig(CommonConfig):
    """How a request is admitted by Decode: known to the Master too, which decides what it accepts from its nodes."""

    admission_timeout: Annotated[
        float,
        Parameter(
            help="Seconds a request may wait for a Decode slot; 0: no wait.", alias="--pd_node_decode_admission_timeout"
        ),
    ] = field(default=5.0, validator=_at_least(0))
    disable_admission: Annotated[
        bool,
        Parameter(
            help="Do without admission control on Decode: nodes accept whatever arrives. For migrations only.",
            alias=("--disable_pd_node_decode_admission", "--disable_pd_master_decode_capacity_limit"),
        ),
    ] = False


@frozen(kw_only=True, slots=False)
class MasterConfig(AdmissionConfig):
    """The HTTP front and the coordinator of requests."""

    host: Annotated[str, Parameter(help="Address of the HTTP service.")] = field(
        default="127.0.0.1", validator=_address
    )
    port: Annotated[int, Parameter(help="Port of the HTTP service.")] = field(default=8000, validator=_port)
    link_host: Annotated[
        str, Parameter(help="Address that workers dial. Other than loopback only with --cluster-token.")
    ] = field(default="127.0.0.1", validator=_address)
    link_port: Annotated[int, Parameter(help="Port that workers dial.")] = field(default=8100, validator=_port)
    api_key: _ApiKeys = field(default=(), converter=_split_keys, repr=False)
    reservation_ttl: Annotated[
        float, Parameter(help="Seconds that Decode keeps slots granted for n > 1 that the Master does not claim.")
    ] = field(default=5.0, validator=_more_than(0))
    request_timeout: Annotated[
        float,
        Parameter(
            help="Total deadline of a request in seconds; negative: none.",
            env_var=("PDSERVE_REQUEST_TIMEOUT", "LIGHTLLM_PD_REQUEST_TIMEOUT_SECONDS"),
        ),
    ] = field(default=1800.0, validator=_deadline)
    slow_reader_timeout: Annotated[
        float, Parameter(help="Seconds after which a client that stops reading is cut off.")
    ] = field(default=30.0, validator=_more_than(0))
    retry: Annotated[bool, Parameter(help="Retry once on other nodes when one is lost before the first delta.")] = True
    max_body_bytes: Annotated[int, Parameter(help="Largest request body in bytes; over it: 413.")] = field(
        default=8 * 1024 * 1024, validator=_at_least(1)
    )
    tls_cert: Annotated[Path | None, Parameter(help="Certificate chain for HTTPS (PEM).")] = field(
        default=None, validator=_file
    )
    tls_key: Annotated[Path | None, Parameter(help="Private key for HTTPS (PEM).")] = field(
        default=None, validator=_file
    )
    link_tls_cert: Annotated[
        Path | None, Parameter(help="Certificate chain for node links (PEM); makes them wss://.")
    ] = field(default=None, validator=_file)
    link_tls_key: Annotated[Path | None, Parameter(help="Private key for node links (PEM).")] = field(
        default=None, validator=_file
    )

    def __attrs_post_init__(self) -> None:
        _take_brackets_off(self, "host", "link_host")
        for cert, key in (("tls_cert", "tls_key"), ("link_tls_cert", "link_tls_key")):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise ConfigError(f"{flag(cert)} and {flag(key)} belong together: give both or neither")
        if not self.cluster_token and not is_loopback(self.link_host):
            raise ConfigError(
                f"--link-host {self.link_host} can be reached from other machines, and without --cluster-token any of "
                "them could register as a node and see every prompt: give the Master and all workers the same "
                "--cluster-token, or keep --link-host on 127.0.0.1"
            )

    @property
    def total_deadline(self) -> float:
        """Seconds that a request may take in all; `inf` where there is no limit."""
        return math.inf if self.request_timeout < 0 else self.request_timeout


@frozen(kw_only=True, slots=False)
class WorkerConfig(CommonConfig):
    """What Prefill and Decode nodes share."""

    masters: Annotated[
        str, Parameter(help="Masters to serve, ws://HOST:PORT or wss://HOST:PORT, separated by commas.")
    ] = field(default="ws://127.0.0.1:8100", validator=[_not_empty, _urls])
    resolve_interval: Annotated[float, Parameter(help="Seconds between lookups of the names in --masters.")] = field(
        default=30.0, validator=_more_than(0)
    )
    node_id: Annotated[str, Parameter(help="Name of this node; empty: ROLE-HOSTNAME-PID-RANDOM.")] = ""
    engine: Annotated[
        Literal["torch", "sim"], Parameter(help="`torch` runs the model; `sim` only takes the time of one.")
    ] = "torch"
    device: Annotated[str, Parameter(help="torch device: cpu, cuda, cuda:1; auto: a GPU where there is one.")] = field(
        default="auto", validator=_not_empty
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Parameter(help="Number type of weights and KV cache.")
    ] = "auto"
    threads: Annotated[int, Parameter(help="CPU threads of the engine; 0: all cores (under `up`: an equal share).")] = (
        field(default=0, validator=_at_least(0))
    )
    page_size: Annotated[int, Parameter(help="Tokens in one KV page; the same on all nodes.")] = field(
        default=16, validator=_at_least(1)
    )
    kv_tokens: Annotated[int, Parameter(help="Size of the KV pool in tokens.")] = field(
        default=16384, validator=_at_least(1)
    )
    max_running_requests: Annotated[
        int, Parameter(help="Request slots; on Decode this is its capacity.", alias="--running_max_req_size")
    ] = field(default=16, validator=_at_least(1))
    chunk_tokens: Annotated[int, Parameter(help="Most prompt tokens in one engine step.")] = field(
        default=512, validator=_at_least(1)
    )
    status_host: Annotated[str, Parameter(help="Address of the node's own status pages.")] = field(
        default="127.0.0.1", validator=_address
    )
    status_port: Annotated[int, Parameter(help="Port of the status pages; 0: any free one, which is logged.")] = field(
        default=0, validator=_port
    )
    step_timeout: Annotated[
        float, Parameter(help="Seconds after which an engine step or NIXL call counts as hung; the process then exits.")
    ] = field(default=60.0, validator=_more_than(0))
    transfer_timeout: Annotated[float, Parameter(help="Seconds that one KV transfer may take.")] = field(
        default=30.0, validator=_more_than(0)
    )
    confirm_timeout: Annotated[float, Parameter(help="Seconds within which Prefill must confirm a transfer.")] = field(
        default=5.0, validator=_more_than(0)
    )
    nixl_device: Annotated[
        str, Parameter(help="Network device of KV transfers (UCX_NET_DEVICES); empty: lo if all Masters are local.")
    ] = ""
    sim_prefill_tokens_per_s: Annotated[float, Parameter(help="Prefill speed of the sim engine.")] = field(
        default=50000.0, validator=_more_than(0)
    )
    sim_decode_ms: Annotated[float, Parameter(help="Duration of one decode step of the sim engine, milliseconds.")] = (
        field(default=5.0, validator=_at_least(0))
    )
    faults: Annotated[str, Parameter(help="Provoked failures, for tests.", show=False)] = field(
        default="", validator=_faults
    )

    def __attrs_post_init__(self) -> None:
        _take_brackets_off(self, "status_host")
        if self.kv_tokens < self.page_size:
            raise ConfigError(f"--kv-tokens {self.kv_tokens} is less than one page (--page-size {self.page_size})")

    @property
    def master_urls(self) -> tuple[str, ...]:
        """The Masters to dial, each once."""
        return split_urls(self.masters)

    @property
    def ucx_net_devices(self) -> str:
        """What UCX may listen on; empty: its own choice. Local Masters mean local transfers, so nothing leaves `lo`."""
        local = all(is_loopback(urlsplit(url).hostname or "") for url in self.master_urls)
        return self.nixl_device or ("lo" if local else "")

    def node_name(self, role: str) -> str:
        """The configured node id, or one that no other process on this network has."""
        return self.node_id or f"{role}-{process_name()}"


@frozen(kw_only=True, slots=False)
class PrefillConfig(WorkerConfig):
    """A node that computes prompts and holds their KV pages until Decode has pulled them."""

    prefill_queue_tokens: Annotated[
        int, Parameter(help="Most prompt tokens waiting on one Prefill node; over it: 429.")
    ] = field(default=65536, validator=_at_least(1))
    hold_timeout: Annotated[float, Parameter(help="Seconds that Prefill keeps pages nobody has pulled or renewed.")] = (
        field(default=30.0, validator=_at_least(2))  # the Master renews every second
    )
    hold_share: Annotated[float, Parameter(help="Largest share of the Prefill KV pool that held pages may take.")] = (
        field(default=0.5, validator=_more_than(0, 1))
    )


@frozen(kw_only=True, slots=False)
class DecodeConfig(WorkerConfig, AdmissionConfig):
    """A node that admits requests, pulls their KV pages and generates."""

    admission_queue_size: Annotated[
        int,
        Parameter(
            help="Decode slots that may be waited for, n for n choices; -1: as many as there are.",
            alias="--pd_node_decode_admission_queue_size",
        ),
    ] = field(default=-1, validator=_at_least(-1))
    first_token_timeout: Annotated[
        float, Parameter(help="Seconds for Decode to compute a first token that is missing.")
    ] = field(default=30.0, validator=_more_than(0))

    @property
    def queue_size(self) -> int:
        """The bound of the admission queue, with -1 resolved to the capacity."""
        return self.max_running_requests if self.admission_queue_size < 0 else self.admission_queue_size


@frozen(kw_only=True, slots=False)
class UpConfig(MasterConfig, PrefillConfig, DecodeConfig):
    """A whole service on one machine: every flag of every role, and how many of each."""

    model: Annotated[
        str, Parameter(help=f"Model name or path; empty: {DEFAULT_MODEL}, with `--engine sim` {SIM_MODEL}.")
    ] = ""
    masters: Annotated[str, Parameter(help="More Masters for the workers to serve besides the one started here.")] = (
        field(default="", validator=_urls)
    )
    prefill: Annotated[int, Parameter(help="Number of Prefill processes.")] = field(default=1, validator=_at_least(1))
    decode: Annotated[int, Parameter(help="Number of Decode processes.")] = field(default=1, validator=_at_least(1))
    restart_intensity: Annotated[
        int, Parameter(help="Restarts of children within --restart-window that are one too many: then all stops.")
    ] = field(default=5, validator=_at_least(0))
    restart_window: Annotated[float, Parameter(help="Seconds over which restarts are counted.")] = field(
        default=60.0, validator=_more_than(0)
    )

    def __attrs_post_init__(self) -> None:
        MasterConfig.__attrs_post_init__(self)
        WorkerConfig.__attrs_post_init__(self)

    @property
    def model_name(self) -> str:
        """The model that the children are started with."""
        return self.model or (SIM_MODEL if self.engine == "sim" else DEFAULT_MODEL)
