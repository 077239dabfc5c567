"""Which Masters there are, and a link for each: addresses that stay, and names whose addresses come and go."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs
import trio

from pdserve.worker.dial import Dial, dialler
from pdserve.worker.link import Claims, MasterLink

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("pdserve.masters")

_LOOKUP_TIMEOUT = 10.0
"""Seconds for one lookup: resolvers ask their second server after 5 s. A thread left behind ends by itself soon after,
and the next lookup of that name is a pause away, so that few pile up."""
_PAUSE_MOST = 5.0
"""Seconds between lookups of a name without any link: as soon as there is a Master, it is wanted."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses behind a host name, for a port. Raises OSError or UnicodeError."""


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """What the system's resolver says, each address once, without families that this machine has no address of."""
    flags = socket.AI_ADDRCONFIG
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


@attrs.frozen
class MasterName:
    """A URL whose host is a name: one Master, or one behind each address."""

    url: str
    dial: Callable[[str], Dial]
    """How to dial one address."""
    resolve: Callable[[], Awaitable[Sequence[str]]]
    """The addresses now. Raises OSError or UnicodeError; an empty answer counts as a failure too."""


Source = tuple[str, Dial] | MasterName
"""Where Masters come from: a URL with the one way to dial it, or a name."""


def sources(urls: Sequence[str], ca: Path | None, resolve: Resolve = resolve_name) -> list[Source]:
    """What `--masters` means. A host that is an IP literal is never looked up. Raises ConfigError for an unfit `ca`."""
    found: list[Source] = []
    for url in urls:
        parts = urlsplit(url)
        host, dial = parts.hostname or "", dialler(url, ca)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            found.append(MasterName(url, dial, partial(resolve, host, parts.port or 0)))
        else:
            found.append((url, dial(host)))
    return found


class Masters:
    """The links of one node to its Masters: one for each fixed URL, one for each address of a name.

    Names are looked up again every `interval` seconds. A new address gets a link; one that has gone from the answer
    loses its link once that is not registered: a link that works is never cut because of DNS. A failed lookup changes
    nothing.
    """

    def __init__(self, *, interval: float) -> None:
        self.links: list[MasterLink] = []
        """Live; to be walked through without an await."""
        self.unresolved: dict[str, str] = {}
        """Why a name has no link at all, by URL."""
        self.claims = Claims()
        self._interval = interval

    async def run(
        self,
        sources: Sequence[Source],
        link_to: Callable[[str, Dial], MasterLink],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Never returns; raises what gets out of a link, which is only a FatalError. To be run once.

        Started: the fixed links dial, the names are looked up.
        """
        async with trio.open_nursery() as nursery:

            def add(url: str, dial: Dial) -> _Dialled:
                entry = _Dialled(link_to(url, dial))
                self.links.append(entry.link)
                nursery.start_soon(entry.run, name=f"master {url}")
                return entry

            for source in sources:
                if isinstance(source, MasterName):
                    self.unresolved[source.url] = "not resolved yet"
                    nursery.start_soon(self._follow, source, add, name=f"addresses of {source.url}")
                else:
                    add(*source)
            task_status.started()
            await trio.sleep_forever()

    async def _follow(self, name: MasterName, add: Callable[[str, Dial], _Dialled]) -> None:
        known: dict[str, _Dialled] = {}
        failure = ""
        while True:
            addresses, why = await _look_up(name)
            if addresses:
                failure = ""
                self.unresolved.pop(name.url, None)
                for address in addresses:
                    if address not in known:
                        known[address] = add(f"{name.url} ({address})", name.dial(address))
                for address in known.keys() - set(addresses):
                    if not known[address].link.registered:
                        self._drop(known.pop(address))
            else:
                if why != failure:
                    log.warning("%s: not resolved: %s", name.url, why)
                failure = why
                if not known:
                    self.unresolved[name.url] = f"not resolved: {why}"
            await trio.sleep(self._interval if known else min(self._interval, _PAUSE_MOST))

    def _drop(self, entry: _Dialled) -> None:
        log.info("link to Master %s: the address has gone", entry.link.url)
        self.links.remove(entry.link)
        entry.scope.cancel()


@attrs.frozen
class _Dialled:
    """A link that runs until its scope is cancelled."""

    link: MasterLink
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        with self.scope:
            await self.link.run()


async def _look_up(name: MasterName) -> tuple[Sequence[str], str]:
    """The addresses, or none and why."""
    try:
        with trio.fail_after(_LOOKUP_TIMEOUT):
            return await name.resolve(), "no address"
    except trio.TooSlowError:
        return (), f"no answer within {_LOOKUP_TIMEOUT:g} s"
    except (OSError, UnicodeError) as error:
        return (), str(error)
