"""Core: what an acknowledgement of the journal stream is worth (R14).

DEGRADED: an acknowledged record can be lost, or rewritten. UNVERIFIED: nothing is known to be
wrong, but not everything could be seen. The reasons were measured: a power cut with the default
sync setting lost every record acknowledged since the last sync, on one server and on three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct, structs

Level: TypeAlias = Literal["safe", "degraded", "unverified"]

SERVER_VERSION_MIN = (2, 12)
"""The first with atomic batches, and the oldest that NATS.md's and Jepsen's findings are about."""


class Finding(Struct, frozen=True, kw_only=True):
    """One reason not to be called safe, for people: what is, why it matters, how to mend it."""

    level: Literal["degraded", "unverified"]
    what: str
    why: str
    fix: str


class Safety(Struct, frozen=True, kw_only=True):
    """The judgement, and what was seen."""

    level: Level
    findings: tuple[Finding, ...]
    facts: dict[str, Any]


class ServerFacts(Struct, frozen=True, kw_only=True):
    """One server, from its monitoring port."""

    name: str
    version: str
    sync_always: bool


_REMAKE = "it can't be changed: make the stream again with `runfold init` and import the journals"


class _Setting(Struct, frozen=True):
    name: str
    safe: tuple[Any, ...]
    what: str
    why: str
    to: str | None = None  # the flag of `nats stream edit`; None: it can't be changed


_UNLIMITED = (-1, 0, None)
_OFF = (False, None)
_NONE: tuple[Any, ...] = (None, [], {})
_SETTINGS = (
    _Setting(
        "storage",
        ("file",),
        "the stream is kept in memory",
        "every journal is gone when the servers stop",
    ),
    _Setting(
        "retention",
        ("limits",),
        "the stream's retention is {value}, not limits",
        "records are removed once a consumer has read them",
    ),
    _Setting(
        "discard",
        ("new",),
        "at a limit the stream discards {value} records, not new ones",
        "appends are acknowledged while the heads of journals disappear",
        "--discard=new",
    ),
    _Setting(
        "max_age",
        (0, None),
        "records are removed after {value} ns",
        "a run that waits longer loses its journal, and its writes could be run again",
        "--max-age=0",
    ),
    _Setting(
        "max_msgs",
        _UNLIMITED,
        "the stream is limited to {value} records",
        "at the limit a write that happened can't be recorded",
        "--max-msgs=-1",
    ),
    _Setting(
        "max_bytes",
        _UNLIMITED,
        "the stream is limited to {value} bytes",
        "at the limit a write that happened can't be recorded",
        "--max-bytes=-1",
    ),
    _Setting(
        "max_msgs_per_subject",
        _UNLIMITED,
        "a journal is limited to {value} records",
        "at the limit its head disappears, or its end can't be recorded",
        "--max-msgs-per-subject=-1",
    ),
    _Setting(
        "deny_delete",
        (True,),
        "single records can be deleted",
        "after deletion of its last record a journal goes on from the one before it",
        "--deny-delete",
    ),
    _Setting(
        "persist_mode",
        ("default", None),
        "the stream is written in {value} mode",
        "records are acknowledged before they are on disk, whatever sync_interval says",
    ),
    _Setting(
        "allow_rollup_hdrs",
        _OFF,
        "a rollup header may replace a journal",
        "one message wipes all records before it",
        "--no-allow-rollup",
    ),
    _Setting(
        "allow_msg_ttl",
        _OFF,
        "records may carry a time to live",
        "such a record is removed after it was acknowledged",
    ),
    _Setting(
        "allow_msg_schedules",
        _OFF,
        "message schedules are allowed",
        "they ignore publish permissions: a schedule can forge records and wipe journals",
    ),
    _Setting(
        "allow_msg_counter",
        _OFF,
        "the stream is a counter",
        "the server rewrites what is published",
    ),
    _Setting(
        "mirror",
        _NONE,
        "the stream is a mirror",
        "its records come from another stream, late, and none can be appended",
    ),
    _Setting(
        "sources",
        _NONE,
        "the stream takes records from other streams",
        "they come without an expected sequence and move a journal's tail",
        "no sources",
    ),
    _Setting(
        "republish",
        _NONE,
        "the stream republishes its records",
        "journals hold inputs and results, and this sends them to subjects with other permissions",
        "no republish",
    ),
    _Setting(
        "subject_transform",
        _NONE,
        "the stream renames subjects",
        "records end up in a journal they were not meant for",
        "no transform",
    ),
)


def assess(
    namespace: str,
    config: Mapping[str, Any],
    *,
    shard: int = 0,
    cluster: Mapping[str, Any],
    version: str,
    servers: tuple[ServerFacts, ...],
    unread: tuple[str, ...] = (),
) -> Safety:
    """Judge a journal stream's config and cluster (of STREAM.INFO), the version of the server that
    gave them, and what monitoring ports told. `unread`: those that did not answer, with the
    reason."""
    members = _members(cluster)
    findings = (
        *_of_settings(config),
        *_of_subjects(f"{namespace}.journal.{shard}.", config),
        *_of_versions(version, servers),
        *_of_sync(members, servers, unread),
    )
    return Safety(
        level=level_of(findings),
        findings=findings,
        facts={
            "stream": config.get("name"),
            "replicas": config.get("num_replicas"),
            "servers": members,
            "version": version,
            "sync_always": {server.name: server.sync_always for server in servers},
        },
    )


def joined(found: Sequence[Safety]) -> Safety:
    """Of several journal streams as one: what is not true of all of them names those it is true
    of."""
    first, *others = found
    if not others:
        return first
    where: dict[Finding, list[str]] = {}
    for one in found:
        for finding in one.findings:
            where.setdefault(finding, []).append(str(one.facts["stream"]))
    findings = tuple(
        finding
        if len(streams) == len(found)
        else structs.replace(finding, what=f"{', '.join(streams)}: {finding.what}")
        for finding, streams in where.items()
    )
    facts = first.facts | {
        "stream": [one.facts["stream"] for one in found],
        "replicas": min(one.facts["replicas"] for one in found),
        "servers": sorted({name for one in found for name in one.facts["servers"]}),
    }
    return Safety(level=level_of(findings), findings=findings, facts=facts)


def level_of(findings: Iterable[Finding]) -> Level:
    """The worst of the findings; safe where there is none."""
    levels = {finding.level for finding in findings}
    if not levels:
        return "safe"
    return "degraded" if "degraded" in levels else "unverified"


def _members(cluster: Mapping[str, Any]) -> list[str]:
    """nats-server 2.15.1 names a leader for a single server too."""
    names = [cluster.get("leader"), *(peer.get("name") for peer in cluster.get("replicas") or ())]
    return sorted(name for name in names if name)


def _of_settings(config: Mapping[str, Any]) -> Iterator[Finding]:
    for setting in _SETTINGS:
        value = config.get(setting.name)
        if value not in setting.safe:
            yield Finding(
                level="degraded",
                what=f"{setting.what.format(value=value)} ({setting.name})",
                why=setting.why,
                fix=_edit(config, setting.to) if setting.to else _REMAKE,
            )


def _edit(config: Mapping[str, Any], to: str) -> str:
    return f"`nats stream edit {config.get('name')}` with {to}"


def _of_subjects(prefix: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    subjects: list[str] = config.get("subjects") or []
    if subjects not in ([f"{prefix}*"], [f"{prefix}>"]):
        yield Finding(
            level="degraded",
            what=f"the stream captures {', '.join(subjects) or 'nothing'} (subjects)",
            why="journals not captured are not stored, and what else is captured is no journal",
            fix=_edit(config, f"--subjects='{prefix}*'"),
        )


def _of_versions(version: str, servers: tuple[ServerFacts, ...]) -> Iterator[Finding]:
    for found in sorted({version, *(server.version for server in servers)}):
        match = re.match(r"(\d+)\.(\d+)", found)
        if match is None:
            yield Finding(
                level="unverified",
                what=f"a server calls its version {found!r}",
                why="what it does with expected sequences is not known",
                fix="run an official nats-server release",
            )
        elif (int(match[1]), int(match[2])) < SERVER_VERSION_MIN:
            yield Finding(
                level="degraded",
                what=f"a server is of version {found}",
                why="what it acknowledges was not measured; Runfold needs atomic batches, of 2.12",
                fix="upgrade nats-server to 2.12 or later",
            )


def _of_sync(
    members: list[str], servers: tuple[ServerFacts, ...], unread: tuple[str, ...]
) -> Iterator[Finding]:
    known = {server.name: server for server in servers}
    lost = "a power cut loses records acknowledged since the last sync (2 minutes by default)"
    for name in members:
        if name in known and not known[name].sync_always:
            yield Finding(
                level="degraded",
                what=f"server {name} acknowledges before it syncs (sync_interval)",
                why=f"{lost}; so do replicas that lose it together or in turn",
                fix="`jetstream { sync_interval: always }` in its configuration, then restart it",
            )
    unseen = [name for name in members if name not in known]
    if unseen or not members:
        yield Finding(
            level="unverified",
            what=f"the sync setting of {', '.join(unseen) or 'the servers'} can't be seen"
            + "".join(f"; {reason}" for reason in unread),
            why=f"unless it is `always`, {lost}",
            fix="name the monitoring address of each server that keeps the stream (--monitor URL)",
        )
