"""Every frame of a node link. Tagged msgspec Structs, MessagePack on the wire; unknown fields are ignored.

Each message about a request carries `id` and `epoch`; a message of an epoch that is not current changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]
BusyReason = Literal["queue_full", "timeout", "draining", "prefill_queue_full", "expired"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
"""What a node says of itself is checked as it is decoded: a wrong number costs that node, nobody else."""

GROUP = -1
"""As the `choice` of a frame: all choices of the request together."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen; a function of (seed, choice, output position), the same on P, D and after recovery."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off; k: the chosen token's logprob and the k best alternatives (0: only the chosen one)."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token under the unpenalised, untempered distribution, and the k best."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FirstToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output token #1 of one choice, sampled by P."""

    token_id: int
    logprob: TokenLogprob | None = None
    choice: int = 0


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node serves. Two nodes serve the same model when name and both hashes agree."""

    name: str
    weights_hash: str
    vocab_hash: str
    max_len: Positive
    """Longest prompt + output, in tokens, that this process serves."""


class KvLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The shape of one KV page, contiguous across layers. P and D can be paired when theirs are equal."""

    page_size: Positive
    """Tokens per page."""
    page_bytes: Positive
    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: str


class TransferMetadata(msgspec.Struct, frozen=True):
    """A transfer agent's metadata; `mac` is HMAC-SHA256 of agent and blob under the cluster token (or an empty key)."""

    agent: str
    blob: bytes
    mac: bytes


# --- handshake: Master → Challenge, node → Hello, Master → Welcome | Reject


class Challenge(msgspec.Struct, tag="challenge", frozen=True, omit_defaults=True):
    nonce: bytes
    master: str = ""
    """Incarnation of the Master: a node that finds the same Master at two addresses keeps one link."""


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True, omit_defaults=True):
    protocol_min: int
    protocol_max: int
    role: Role
    node_id: str
    incarnation: str
    model: ModelCard
    layout: KvLayout
    transfer: TransferMetadata
    capacity: Positive
    """Slots of a Decode node (its `--max-running-requests`); of a Prefill node the same flag, informative."""
    capabilities: tuple[str, ...] = ()
    nonce: bytes = b""
    proof: bytes = b""
    """HMAC-SHA256 of the challenge with the cluster token; the token itself is never sent."""
    status_url: str = ""
    heartbeat_interval: float = 0.0
    """Seconds between its heartbeats: it takes the Master for lost after three. 0: from an older node, not told."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True, omit_defaults=True):
    generation: int
    version: int
    master: str
    """Incarnation of the Master."""
    proof: bytes = b""
    capabilities: tuple[str, ...] = ()
    heartbeat_interval: float = 0.0
    """As in `Hello`, of the Master."""


class Reject(msgspec.Struct, tag="reject", frozen=True):
    code: str
    reason: str


# --- both ways


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Sent every heartbeat interval, the shorter one of the two sides, by both; any frame counts as a sign of life."""


# --- Master → node


class PeerUp(msgspec.Struct, tag="peer_up", frozen=True):
    """A transfer peer of the other role with the same KV layout: admit its metadata."""

    node_id: str
    incarnation: str
    transfer: TransferMetadata


class PeerDown(msgspec.Struct, tag="peer_down", frozen=True):
    """A hint only: this Master no longer sees that peer."""

    node_id: str
    incarnation: str


class Prefill(msgspec.Struct, tag="prefill", frozen=True, omit_defaults=True):
    id: str
    epoch: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    choices: int = 1
    """How many first tokens to sample from the prompt's last logits."""


class Reserve(msgspec.Struct, tag="reserve", frozen=True, omit_defaults=True):
    """Hold `n` slots for the choices of one request, all or none. Answered by Reserved, Busy or Failed.

    Only to nodes with the capability `decode_admission`. The n `Decode` frames claim the slots; the first one commits.
    """

    id: str
    epoch: int
    n: int
    prompt_tokens: int
    max_tokens: int
    ttl: float
    """Seconds from the grant until the reservation expires, unless it has been claimed."""
    admission_timeout: float | None = None
    """As in `Decode`."""


class Decode(msgspec.Struct, tag="decode", frozen=True, omit_defaults=True):
    """Generate one choice. The n > 1 frames of a request are sent as one batch, choice 0 first."""

    id: str
    epoch: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    handle: bytes
    """P's KvHandle, opaque to the Master."""
    first: FirstToken | None = None
    """None: D computes token #1 from the last prompt position."""
    choice: int = 0
    admission_timeout: float | None = None
    """Seconds left of the request's admission deadline; None: the node's own setting."""
    n: int = 1
    """How many choices the request has."""
    reserved: bool = False
    """The slot comes from the request's reservation; refused as `expired` when there is none."""


class Cancel(msgspec.Struct, tag="cancel", frozen=True, omit_defaults=True):
    """End that request's own task on this node, whatever it waits for."""

    id: str
    epoch: int
    choice: int = GROUP
    """Only this choice; the others go on."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """P may drop its hold. Idempotent."""

    id: str
    epoch: int


class Renew(msgspec.Struct, tag="renew", frozen=True):
    """The request still waits: P's hold timeout starts anew."""

    id: str
    epoch: int


# --- node → Master


class NodeStats(msgspec.Struct, tag="stats", frozen=True, kw_only=True, omit_defaults=True):
    """A node's load, sent as its heartbeat and after notable changes. Gauges at one instant."""

    capacity: Count = 0
    active: Count = 0
    """Leases held (D) or prompts in work and held (P)."""
    queued: Count = 0
    """Waiting slots (D) or prompt tokens (P)."""
    reserved: Count = 0
    """Of the active slots, those of reservations that nobody has claimed yet (D)."""
    pages_free: Count = 0
    pages_cached: Count = 0
    pages_pinned: Count = 0
    pages_quarantined: Count = 0
    transfers: Count = 0
    draining: bool = False


class Prefilled(msgspec.Struct, tag="prefilled", frozen=True, omit_defaults=True):
    id: str
    epoch: int
    handle: bytes
    first: tuple[FirstToken, ...] = ()
    cached_tokens: int = 0


class Reserved(msgspec.Struct, tag="reserved", frozen=True, omit_defaults=True):
    """The slots of a `Reserve` are held; its time to live has begun."""

    id: str
    epoch: int
    waited: float = 0.0
    """Seconds in the admission queue."""


class Admitted(msgspec.Struct, tag="admitted", frozen=True, omit_defaults=True):
    """Lease, request slots and worst-case pages are taken, for all choices of the request."""

    id: str
    epoch: int
    choice: int = 0
    waited: float = 0.0
    """Seconds in the queues for slots and pages."""


class Busy(msgspec.Struct, tag="busy", frozen=True, omit_defaults=True):
    """Not admitted (D), or the prefill queue is full (P). Ends the whole request there; never a failure of the node."""

    id: str
    epoch: int
    reason: BusyReason
    retry_after: float = 1.0
    choice: int = 0


class Delta(msgspec.Struct, tag="delta", frozen=True, omit_defaults=True):
    """Output of one choice. `token_ids` are as generated even while text is held back.

    `finish` set: this is the terminal frame of the choice.
    """

    id: str
    epoch: int
    start_index: int
    """Output position of `token_ids[0]`; deltas of a choice are contiguous."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    choice: int = 0


class Settled(msgspec.Struct, tag="settled", frozen=True, omit_defaults=True):
    """D has all KV that it will ever take from P: the coordinator stops renewing and releases the hold."""

    id: str
    epoch: int
    pulled_pages: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True, omit_defaults=True):
    """Terminal: this choice of the request failed on this node, or with `GROUP` all of them."""

    id: str
    epoch: int
    code: str
    """`errors.RequestError.code` of the failure: `invalid_request`, `worker_failed`, `transfer_failed`."""
    message: str
    param: str | None = None
    choice: int = 0


class Draining(msgspec.Struct, tag="draining", frozen=True):
    """The node takes nothing new from now on."""


FromMaster = (
    Challenge | Welcome | Reject | Ping | PeerUp | PeerDown | Prefill | Reserve | Decode | Cancel | Release | Renew
)
FromNode = Hello | Ping | NodeStats | Prefilled | Reserved | Admitted | Busy | Delta | Settled | Failed | Draining
