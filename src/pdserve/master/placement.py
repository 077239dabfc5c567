"""Where one request can go: the registered nodes that could take it, and which of them are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequestError, NoWorkersError
from pdserve.master.selector import can_pull
from pdserve.wire.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.master.registry import Node, Registry
    from pdserve.master.selector import Selector
    from pdserve.master.service import GenerationRequest


class Placement:
    """The nodes for one attempt of a request; those to `avoid` are passed over where there are others."""

    def __init__(
        self, registry: Registry, selector: Selector, spec: GenerationRequest, *, avoid: Collection[str]
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._prompt = spec.prompt_ids
        self._wants = Footprint(len(spec.prompt_ids), spec.params.max_tokens, spec.n)
        self._avoid = avoid

    def prefill(self, full: Collection[str] = ()) -> Node | None:
        """P for a prompt that some D can pull; None: all are `full`. Raises RequestError where nobody can serve it."""
        prefills, decodes = self._registry.nodes("prefill"), self._able(self._registry.nodes("decode"))
        if not decodes or not prefills:
            raise NoWorkersError(f"no {'Decode' if prefills else 'Prefill'} node is registered")
        useful = [node for node in prefills if any(can_pull(decode, node) for decode in decodes)] or prefills
        prompt = Footprint(len(self._prompt), 1, 1)
        roomy = [node for node in useful if node.holds(prompt)] or useful
        prefill = self._selector.prefill(roomy, self._prompt, self._avoid, full)
        if prefill is None and not full:
            raise NoWorkersError("every Prefill node drains")
        if prefill is not None:
            self.decode(prefill)  # nothing is computed that nobody can take
        return prefill

    def decode(self, prefill: Node, full: Collection[str] = ()) -> Node | None:
        """D that can pull from P; None: all are `full`. Raises RequestError where nobody can serve the request."""
        decodes = self._able(self._registry.nodes("decode"))
        if not decodes:
            raise NoWorkersError("no Decode node is registered")
        decode = self._selector.decode(decodes, prefill, self._avoid, full)
        if decode is None and not full:
            raise NoWorkersError("no Decode node with the KV layout of a Prefill node takes requests")
        return decode

    def _able(self, decodes: list[Node]) -> list[Node]:
        """The nodes that could take this request if they were empty. Raises InvalidRequestError where none could."""
        wants = self._wants
        able = [node for node in decodes if node.fits(wants)]
        if decodes and not able:
            most = max(node.hello.capacity for node in decodes)
            if wants.n > most:
                raise InvalidRequestError(f"n must be at most {most}, the most slots that a Decode node has", param="n")
            choices = f" for {wants.n} choices" if wants.n > 1 else ""
            message = f"prompt and max_tokens{choices} need more KV pages than any Decode node has"
            raise InvalidRequestError(message, param="max_tokens")
        return able
