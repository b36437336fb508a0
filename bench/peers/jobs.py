"""Which rows there are, and what each is asked in each workload."""

from __future__ import annotations

from dataclasses import dataclass

WORKLOADS = ("w1", "w4", "w2", "w3", "w5")
FEW, MANY = ["--at-once", "1,16,64"], ["--at-once", "1,16,64,256"]
LONG = ["--steps", "100,1000,10000"]
PARKED = ["--count", "10000"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A system in one setting. `asked`: for each workload it knows, the options of each call in a
    pass. `fsync`: when what it acknowledges is on the disk. `where`: the processes it consists of,
    whose CPU and memory are counted."""

    name: str
    environment: str
    program: str
    variant: str
    fsync: str
    where: str
    asked: dict[str, list[list[str]]]
    default: bool = True
    """Whether it is run when nothing is said."""


_NATS = {"w1": [MANY], "w4": [[]], "w2": [LONG]}
_RUNFOLD = {
    "w1": [MANY],
    "w4": [[]],
    "w2": [[*LONG, "--state", "commit"], [*LONG, "--state", "replay"]],
    "w3": [[], ["--tuned", "1"]],
    "w5": [PARKED],
}
_FILES = {"w1": [FEW], "w4": [[]], "w2": [LONG]}
_DBOS = {"w1": [FEW], "w4": [[], ["--tuned", "0.01"]], "w2": [["--steps", "100,1000"]]}
_LANGGRAPH = {
    "w1": [FEW],
    "w4": [[]],
    "w2": [["--steps", "100,1000", "--state", "all"], [*LONG, "--state", "last"]],
    "w5": [PARKED],
}
_RESTATE = {
    "w1": [MANY],
    "w4": [[]],
    "w2": [LONG],
    "w3": [[], ["--tuned", "10ms"]],
    "w5": [PARKED],
}


def _nats(variant: str, fsync: str) -> Row:
    return Row(
        name=f"nats-{variant}",
        environment="runfold",
        program="peer_nats.py",
        variant=variant,
        fsync=fsync,
        where="server, this client",
        asked=_NATS,
    )


def _runfold(variant: str, fsync: str) -> Row:
    return Row(
        name=f"runfold-{variant}",
        environment="runfold",
        program="peer_runfold.py",
        variant=variant,
        fsync=fsync,
        where="server, a worker",
        asked=_RUNFOLD,
    )


def _restate(name: str, variant: str, fsync: str, *, default: bool) -> Row:
    return Row(
        name=name,
        environment="restate",
        program="peer_restate.py",
        variant=variant,
        fsync=fsync,
        where="server, a service",
        asked=_RESTATE,
        default=default,
    )


def _alone(
    name: str,
    environment: str,
    program: str,
    fsync: str,
    asked: dict[str, list[list[str]]],
    *,
    default: bool = True,
) -> Row:
    """In the process that asks."""
    return Row(
        name=name,
        environment=environment,
        program=program,
        variant=name.partition("-")[2],
        fsync=fsync,
        where="one process",
        asked=asked,
        default=default,
    )


ROWS = (
    _nats("always", "each append"),
    _runfold("always", "each record"),
    _alone("dbos-sqlite", "dbos", "peer_dbos.py", "each commit", _DBOS),
    _alone("langgraph-sqlite", "langgraph", "peer_langgraph.py", "each commit", _LANGGRAPH),
    _restate("restate", "default", "its log, in groups", default=True),
    _alone("runfold-files", "runfold", "peer_runfold_files.py", "each record", _FILES),
    _nats("default", "every 2 minutes"),
    _runfold("default", "every 2 minutes"),
    _alone("dbos-sqlite-wal", "dbos", "peer_dbos.py", "each commit", _DBOS, default=False),
    _alone(
        "langgraph-sqlite-normal",
        "langgraph",
        "peer_langgraph.py",
        "at checkpoints",
        _LANGGRAPH,
        default=False,
    ),
    _restate("restate-nofsync", "nofsync", "no", default=False),
)
"""In this order, over and over: systems with fsync first, then those without."""


def chosen(only: list[str]) -> list[Row]:
    """The rows of these names; of a word that is no row's name, all that begin with it. The default
    ones where there are no words."""
    if not only:
        return [row for row in ROWS if row.default]
    names = {row.name for row in ROWS}
    return [
        row
        for row in ROWS
        if row.name in only or any(row.name.startswith(word) for word in only if word not in names)
    ]
