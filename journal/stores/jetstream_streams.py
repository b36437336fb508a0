"""Store: the streams of a namespace: their names, their settings, and what makes TASKS unfit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..shards import shards_metadata
from .safety import Finding

REJECTED_AGE_S = 30 * 86_400
"""Long enough for somebody to ask why a signal had no effect (PROTOCOL 1)."""

_UNLIMITED = {"max_msgs": -1, "max_bytes": -1, "max_msgs_per_subject": -1, "max_msg_size": -1}


def stream_name(namespace: str, shard: int = 0) -> str:
    """A journal stream of a namespace: its first, where there are several."""
    return f"{namespace.upper()}_JOURNAL_{shard}"


def subject_prefix(namespace: str, shard: int) -> str:
    """Of the subjects of that stream's runs."""
    return f"{namespace}.journal.{shard}."


def tasks_name(namespace: str) -> str:
    return f"{namespace.upper()}_TASKS"


def signals_name(namespace: str) -> str:
    return f"{namespace.upper()}_SIGNALS"


def rejected_name(namespace: str) -> str:
    return f"{namespace.upper()}_REJECTED"


def stream_config(namespace: str, replicas: int, shard: int = 0, shards: int = 1) -> dict[str, Any]:
    """A journal stream's settings (PROTOCOL 1): nothing that was acknowledged ever leaves it,
    except by a purge behind a tombstone."""
    return {
        "name": stream_name(namespace, shard),
        "subjects": [f"{subject_prefix(namespace, shard)}*"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        **_UNLIMITED,
        "max_age": 0,
        "num_replicas": replicas,
        "deny_delete": True,
        "deny_purge": False,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "metadata": shards_metadata(shards),
    }


def tasks_config(namespace: str, replicas: int) -> dict[str, Any]:
    """Hints that somebody is to look at a run, now (`task`) or at a time (`timer`).

    nats-server 2.15.1: schedules refuse discard new (10052), so a limit of any kind would drop
    tasks in silence; and they switch `allow_rollup_hdrs` on, whatever is asked for, but not
    `allow_msg_ttl`. Whoever may publish here can forge messages of any subject of the stream: only
    workers and the bridge do.
    """
    return {
        "name": tasks_name(namespace),
        "subjects": [f"{namespace}.task.>", f"{namespace}.timer.*"],
        "storage": "file",
        "retention": "workqueue",
        "discard": "old",
        **_UNLIMITED,
        "max_age": 0,
        "num_replicas": replicas,
        "allow_msg_schedules": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": False,
    }


def signals_config(namespace: str, replicas: int) -> dict[str, Any]:
    """Signals from anybody, kept until journalled. Never schedules or rollup: they ignore publish
    permissions (nats-server 2.15.1), and people publish here."""
    return {
        "name": signals_name(namespace),
        "subjects": [f"{namespace}.signal.>"],
        "storage": "file",
        "retention": "workqueue",
        "discard": "new",
        **_UNLIMITED,
        "max_age": 0,
        "num_replicas": replicas,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
    }


def rejected_config(namespace: str, replicas: int) -> dict[str, Any]:
    """Refused signals with their reason, for people to look at."""
    return {
        "name": rejected_name(namespace),
        "subjects": [f"{namespace}.rejected.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        **_UNLIMITED,
        "max_age": REJECTED_AGE_S * 10**9,
        "num_replicas": replicas,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
    }


def task_findings(namespace: str, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What makes the TASKS stream (None: there is none) lose a wake-up."""
    name = tasks_name(namespace)
    if config is None:
        yield Finding(
            level="degraded",
            what=f"there is no stream {name}",
            why="no worker is woken: runs stand still after a crash, a wait or a signal",
            fix="`runfold init` makes it, and leaves what is there alone",
        )
        return
    wanted = tasks_config(namespace, 1)
    for setting, why in _TASK_REASONS.items():
        found = config.get(setting)
        if found != wanted[setting] and not (found in (0, None) and wanted[setting] in (0, -1)):
            yield Finding(
                level="degraded",
                what=f"{setting} of stream {name} is {found}, not {wanted[setting]}",
                why=why,
                fix=f"`nats stream edit {name}`; or delete it, then `runfold init`: the sweep "
                "publishes its tasks again",
            )


_LIMITED = "at the limit tasks are dropped in silence, and their runs stand still"
_TASK_REASONS = {
    "subjects": "what it does not capture wakes nobody",
    "storage": "timers and tasks are gone when the servers stop",
    "retention": "tasks are never removed, or removed before they are done",
    "max_age": _LIMITED,
    "max_msgs": _LIMITED,
    "max_bytes": _LIMITED,
    "max_msgs_per_subject": _LIMITED,
    "max_msg_size": "tasks are refused",
    "allow_msg_schedules": "timers never fire",
}
