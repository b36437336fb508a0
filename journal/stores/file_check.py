"""Store: what an acknowledgement is worth in a directory (R14), for `runfold doctor`."""

from __future__ import annotations

from pathlib import Path

from .safety import Finding, Safety, level_of

_NETWORK = ("nfs", "cifs", "smb", "9p", "sshfs", "ceph", "gluster", "afs", "vboxsf", "virtiofs")
_VOLATILE = ("tmpfs", "ramfs")


def inspect_directory(directory: Path, damaged: list[str]) -> Safety:
    """Judge the file system under the directory, and the runs whose journals are refused."""
    kind = _file_system(directory)
    findings: list[Finding] = []
    if kind in _VOLATILE:
        findings.append(
            Finding(
                level="degraded",
                what=f"{directory} is on {kind}, which is memory",
                why="every journal is gone when the machine stops",
                fix="use a directory on a disk",
            )
        )
    elif any(name in kind for name in _NETWORK) or kind == "unknown":
        findings.append(
            Finding(
                level="unverified",
                what=f"{directory} is on a file system of type {kind}",
                why="whether its locks and its fsync hold between machines can't be seen from here",
                fix="use a local disk, or a nats:// store for several machines",
            )
        )
    if damaged:
        findings.append(
            Finding(
                level="degraded",
                what=f"journals are damaged: {', '.join(damaged[:20])}",
                why="nothing runs on a damaged journal; `runfold show ID` says where",
                fix="restore them from a backup",
            )
        )
    facts = {
        "directory": str(directory.absolute()),
        "file_system": kind,
        "damaged": damaged,
        "fsync": "every record, and the directory with each new file",
    }
    return Safety(level=level_of(findings), findings=tuple(findings), facts=facts)


def _file_system(directory: Path) -> str:
    """The type of the file system that holds the directory, from /proc/mounts; or unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    path = str(directory.absolute())
    best = ("", "unknown")
    for _, where, kind, *_ in mounts:
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]
