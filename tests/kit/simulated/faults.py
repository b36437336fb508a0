"""What may go wrong with a message: a policy decides it; by default nothing does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .messages import IN_FLIGHT, UNAVAILABLE, ApiError

if TYPE_CHECKING:
    from .client import ModelClient

__all__ = ["IN_FLIGHT", "UNAVAILABLE", "ApiError", "Fate", "Handing", "Policy", "What"]

What: TypeAlias = Literal[
    "ack", "answer", "read", "settled", "delivery", "status", "message", "nobody"
]
"""What comes from the server: an answer to a publish; of the API; a direct get; the confirmation of
an ack; a consumer's message; a pull's status; somebody's message; that nobody listens."""

Handing: TypeAlias = Literal["once", "twice", "forgotten"]
"""Of a delivery: as it should be; at once a second time, counted on; forgotten by the server, which
delivers it again with the same count."""


class Fate(NamedTuple):
    """Of a publish to a stream. `after_s`: lands that much later, whatever lands before. `lands`
    False: never. `answers` False: without an acknowledgement. `error`: is answered at once,
    whatever becomes of it."""

    after_s: float = 0.0
    lands: bool = True
    answers: bool = True
    error: ApiError | None = None


class Policy:
    """Asked at the moment of each event."""

    def to_server(self, client: ModelClient, subject: str, data: bytes) -> float | None:
        """Seconds on the way; None: lost. What one client sends stays in order."""
        return 0.0

    def to_client(self, client: ModelClient, what: What, subject: str, data: bytes) -> float | None:
        """The same for the way back; `subject` as the client sees it."""
        return 0.0

    def stored(
        self, client: ModelClient, stream: str, subject: str, data: bytes, headers: dict[str, str]
    ) -> Fate | None:
        """None: as it should be."""
        return None

    def read(self, client: ModelClient, stream: str, subject: str) -> int | None:
        """The moment of the stream that the answer is from; None: now. `subject`: of the API."""
        return None

    def delivered(
        self, stream: str, consumer: str, subject: str, sequence: int, count: int
    ) -> Handing:
        """It is on its way to whoever pulled."""
        return "once"
