"""The messages of a stream, as it is now or as it was: by sequence, and by subject."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter

from .messages import Message
from .subjects import matcher

_seq = attrgetter("seq")


class Index:
    """In the order of their sequences."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages: dict[int, Message] = {}
        self.by_subject: dict[str, list[Message]] = {}
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        self.messages[message.seq] = message
        stored = self.by_subject.get(message.subject)
        if stored is None:
            self.by_subject[message.subject] = [message]
        else:
            stored.append(message)

    def remove(self, message: Message) -> None:
        del self.messages[message.seq]
        stored = self.by_subject[message.subject]
        if len(stored) == 1:
            del self.by_subject[message.subject]
        else:
            del stored[bisect_left(stored, message.seq, key=_seq)]

    def last(self, pattern: str) -> Message | None:
        if _literal(pattern):
            stored = self.by_subject.get(pattern)
            return stored[-1] if stored else None
        found = [stored[-1] for stored in self._lists(pattern)]
        return max(found, key=_seq, default=None)

    def last_up_to(self, subject: str, sequence: int) -> Message | None:
        stored = self.by_subject.get(subject, [])
        place = bisect_left(stored, sequence + 1, key=_seq)
        return stored[place - 1] if place else None

    def after(self, pattern: str, sequence: int) -> list[Message]:
        """From the sequence on, all that the pattern takes ("": any)."""
        if pattern in ("", ">"):
            return [message for seq, message in self.messages.items() if seq >= sequence]
        if _literal(pattern):
            stored = self.by_subject.get(pattern, [])
            return stored[bisect_left(stored, sequence, key=_seq) :] if sequence > 1 else stored
        found: list[Message] = []
        for stored in self._lists(pattern):
            found += stored[bisect_left(stored, sequence, key=_seq) :]
        found.sort(key=_seq)
        return found

    def subjects(self, pattern: str) -> list[str]:
        takes = matcher(pattern)
        return sorted(subject for subject in self.by_subject if takes(subject))

    def _lists(self, pattern: str) -> Iterator[list[Message]]:
        takes = matcher(pattern)
        for subject, stored in self.by_subject.items():
            if takes(subject):
                yield stored


def _literal(pattern: str) -> bool:
    return "*" not in pattern and ">" not in pattern
