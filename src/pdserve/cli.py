"""The command line: parses it, sets logging up, runs one role, turns what went wrong into one line and an exit code.

Exit codes: 0 after a drain, 1 when `up` gave up restarting, 2 for an unusable flag or file, 3 when something is not
installed, 70 when the process could not go on, 130 after an interrupt that was not a drain.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path  # noqa: TC003  (cyclopts reads the annotations)
from typing import TYPE_CHECKING, Annotated, NoReturn

import trio
from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict, Env

from pdserve import __version__, control, doctor
from pdserve.config import CommonConfig, DecodeConfig, MasterConfig, PrefillConfig, UpConfig, WorkerConfig
from pdserve.errors import ConfigError, FatalError, MissingDependencyError
from pdserve.flags import ROLES, flags_of, load_file, markdown_table, variables
from pdserve.logs import say, setup_logging
from pdserve.nurseries.groups import leaves
from pdserve.nurseries.supervisor import IntensityExceeded
from pdserve.ports import check_ports
from pdserve.up import ChildRefusedError, run_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger("pdserve.cli")

_DEPRECATED = {"--disable_pd_master_decode_capacity_limit": "--disable-admission"}
_OWN_VARIABLES = {control.CONTROL_FD, control.UNDER_UP, control.UP_PID, control.RESTARTS, "PDSERVE_CONFIG"}
_EVERYTHING = Parameter(name="*")
_UP, _MASTER, _PREFILL, _DECODE = UpConfig(), MasterConfig(), PrefillConfig(), DecodeConfig()
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 130),
    (ConfigError, 2),
    (CycloptsError, 2),
    (MissingDependencyError, 3),
    (IntensityExceeded, 1),
    (FatalError, 70),
)
_ADDRESS_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)

_notices: ContextVar[list[str]] = ContextVar("notices")

app = App(
    name="pdserve",
    version=__version__,
    help="Prefill/Decode-disaggregated LLM serving. Without a command: `up`, a whole service on this machine.",
)


@app.command
def up(config: Annotated[UpConfig, _EVERYTHING] = _UP) -> None:
    """Run a whole service on this machine: one Master, Prefill and Decode nodes, supervised."""
    _begin("up", config)
    doctor.check(config, config.model_name)
    trio.run(run_up, config)


@app.command
def master(config: Annotated[MasterConfig, _EVERYTHING] = _MASTER) -> None:
    """Run a Master: HTTP for clients, links for nodes."""
    _begin("master", config)
    doctor.check(config)
    check_ports(config)
    from pdserve.roles import run_master

    trio.run(run_master, config)


@app.command
def prefill(config: Annotated[PrefillConfig, _EVERYTHING] = _PREFILL) -> None:
    """Run a Prefill node: computes prompts, holds their KV cache for Decode."""
    _begin("prefill", config)
    doctor.check(config)
    check_ports(config)
    from pdserve.roles import run_prefill

    trio.run(run_prefill, config)


@app.command
def decode(config: Annotated[DecodeConfig, _EVERYTHING] = _DECODE) -> None:
    """Run a Decode node: admits requests, pulls their KV cache, generates."""
    _begin("decode", config)
    doctor.check(config)
    check_ports(config)
    from pdserve.roles import run_decode

    trio.run(run_decode, config)


@app.command(show=False, name="flags")
def show_flags(*, markdown: bool = False) -> None:
    """Print every flag; with --markdown as the table of the README."""
    names = {item.name for role in ROLES.values() for item in flags_of(role)}
    print(markdown_table() if markdown else "\n".join(sorted(names)))


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(env_var="PDSERVE_CONFIG", help="TOML file with any of the flags.")] = None,
) -> None:
    """Find the command, and where values come from: a flag wins over a variable, a variable over the file."""
    words = list(tokens)
    if not words or (words[0].startswith("-") and words[0] not in ("--help", "-h", "--version")):
        words.insert(0, "up")
    unknown = _drop_unknown_variables()
    file = load_file(config, words[0]) if config else {}
    app.config = (Env("PDSERVE_", command=False), Dict(file, source=str(config)))
    ignored = [f"the variable {name} is not a flag of pdserve and is ignored" for name in unknown]
    _notices.set(_find_deprecated(words, file.get(words[0], {})) + ignored)
    app(words, exit_on_error=False, print_error=False)


def _find_deprecated(words: Sequence[str], file: Mapping[str, object]) -> list[str]:
    """What to say about deprecated names once logging is set up."""
    given = {word.partition("=")[0] for word in words} | {f"--{key}" for key in file}
    given |= {"--" + name.removeprefix("PDSERVE_").lower() for name in os.environ}
    return [f"{old} is deprecated: use {new}" for old, new in _DEPRECATED.items() if old in given]


def _drop_unknown_variables() -> list[str]:
    """The names of variables that look like ours and are no flag, removed: cyclopts takes API-KEY for API_KEY."""
    unknown = sorted({name for name in os.environ if name.startswith("PDSERVE_")} - variables() - _OWN_VARIABLES)
    for name in unknown:
        del os.environ[name]
    return unknown


def _begin(role: str, config: CommonConfig) -> None:
    """Set logging up, and say what there is to say about how this was started."""
    setup_logging(role, level=config.log_level, format=config.log_format)
    for notice in _notices.get():
        log.warning("%s", notice)
    if isinstance(config, WorkerConfig) and config.faults:
        log.warning("failures are provoked on purpose: --faults %s", config.faults)


def exit_code(error: BaseException) -> tuple[int, str]:
    """The exit code of a process that ends with `error`, and the line that says why; empty: a defect, show it whole."""
    causes = list(leaves(error))
    for kind, code in _EXIT_CODES:
        for leaf in causes:
            if isinstance(leaf, kind):
                code = leaf.status if isinstance(leaf, ChildRefusedError) else code
                return code, str(leaf) or "interrupted"
    for leaf in causes:
        if isinstance(leaf, OSError) and leaf.errno in _ADDRESS_ERRORS:
            return 2, f"cannot listen: {leaf} (see --host, --port, --link-host, --link-port, --status-port)"
    return 70, ""


def _wants_json(words: Sequence[str]) -> bool:
    """Whether logs are to be JSON, for an error that comes before it could be read properly."""
    wanted = os.environ.get("PDSERVE_LOG_FORMAT")
    for word, following in pairwise([*words, ""]):
        name, given, value = word.partition("=")
        if name == "--log-format":
            wanted = value if given else following
    return wanted == "json"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Never shows a traceback for something the user did."""
    words = list(sys.argv[1:] if argv is None else argv)
    control.tie_to_parent()
    try:
        app.meta(words, exit_on_error=False, print_error=False)
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        code, message = exit_code(error)
        if message:
            say(log, message, json=_wants_json(words))
        else:
            log.critical("stopped by an unexpected error", exc_info=error)
        sys.exit(code)
    sys.exit(0)
