"""The node's own pages: `/livez`, `/readyz`, `/metrics`, `/debug/tree`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve.nurseries.tree import snapshot

if TYPE_CHECKING:
    from starlette.requests import Request

    from pdserve.telemetry.metrics import WorkerMetrics
    from pdserve.worker.link import Role
    from pdserve.worker.masters import Masters


def status_app(role: Role, masters: Masters, metrics: WorkerMetrics) -> Starlette:
    """Ready means: registered with every Master that can be reached, and not draining."""

    async def livez(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        reasons = ["draining"] if role.draining else []
        reasons += [f"{url}: {why}" for url, why in masters.unresolved.items()]
        reasons += [f"{link.url}: {link.state}" for link in masters.links if not (link.registered or link.redundant)]
        ready = not role.draining and any(link.registered for link in masters.links)
        return JSONResponse({"ready": ready, "reasons": reasons}, 200 if ready else 503)

    async def metrics_page(request: Request) -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    async def tree(request: Request) -> Response:
        page: dict[str, Any] = {
            "load": msgspec.structs.asdict(role.stats()),
            "links": [link.snapshot() for link in masters.links],
            "unresolved": masters.unresolved,
            "tasks": snapshot(),
        }
        return JSONResponse(page)

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics_page),
            Route("/debug/tree", tree),
        ]
    )
