"""R70: what no reader takes, no audit takes either: forged journals under both opinions.

Honest journals, by hand and at random, with one record changed and all sealed again. Whatever
`order.check` refuses must break a rule of the audit, at that record or before. It finds more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kit.build import Log
from kit.dishonest import said
from kit.histories import sound
from kit.honest import HONEST
from kit.mutations import mutations

from journal.codec import Damage, Entry
from journal.fold import Fold

PER_HISTORY = 40


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_journal_breaks_no_rule(kind: str):
    assert said(Log(*HONEST[kind]).entries) == ()


def refused_at(entries: Sequence[Entry]) -> tuple[int, str] | None:
    """The first record that a reader refuses, and why."""
    fold = Fold()
    for entry in entries:
        try:
            fold.apply(entry)
        except Damage as damage:
            return entry.record.n, str(damage)
    return None


def overlooked(entries: Sequence[Entry]) -> str | None:
    """What a reader refuses and the audit lets pass."""
    refused = refused_at(entries)
    if refused is None or any(found.n <= refused[0] for found in said(entries)):
        return None
    return refused[1]


@pytest.mark.parametrize("kind", HONEST)
def test_the_audit_refuses_what_a_reader_refuses_in_a_journal_with_a_change(kind: str):
    entries = Log(*HONEST[kind]).entries
    tried = {what: overlooked(changed) for what, changed in mutations(entries)}
    assert {what: why for what, why in tried.items() if why is not None} == {}
    assert len(tried) > 5 * len(entries)


@pytest.mark.parametrize("seed", range(40))
def test_the_audit_refuses_what_a_reader_refuses_in_a_random_history_with_a_change(seed: int):
    chance = random.Random(seed)
    entries = sound(seed, 40).entries
    found = list(mutations(entries))
    for what, changed in chance.sample(found, min(PER_HISTORY, len(found))):
        assert overlooked(changed) is None, what
