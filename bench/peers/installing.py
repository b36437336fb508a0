"""Each peer's environment. Runfold's is made anew from this checkout; the others' packages are
those of bench/crash_in_write, pinned there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
sys.path.append(str(HERE.parent / "crash_in_write"))

from environments import PIP_OPTIONS, Environment, NotHere, _do, environment  # noqa: E402

__all__ = ["NotHere", "commit", "installed", "restate_server"]

EXTRAS = "server,fast"


def installed(name: str, root: Path, *, install: bool) -> Environment:
    """Raises `NotHere`, with the reason in one line."""
    if name != "runfold":
        return environment(name, root, install=install)
    found = Environment(name, root / name)
    if not install:
        if not found.bin("runfold").exists():
            raise NotHere(f"not installed in {found.folder}")
        return found
    if not found.python.exists():
        _do(sys.executable, "-m", "venv", found.folder / "venv")
    pip = (found.python, "-m", "pip", "install", "-q", *PIP_OPTIONS)
    _do(*pip, f"{CHECKOUT}[{EXTRAS}]")
    _do(*pip, "--no-deps", "--force-reinstall", CHECKOUT)  # the version may be the same
    return found


def restate_server(found: Environment) -> Path:
    """Its executable: the npm package of this platform holds it."""
    servers = sorted((found.npm / "@restatedev").glob("restate-server-*/bin/restate-server"))
    if not servers:
        raise NotHere(f"no restate-server for this platform in {found.npm}")
    return servers[0]


def commit() -> str:
    """Of the checkout, with a + where it has been changed; "" outside of one."""
    git = ["git", "-C", str(CHECKOUT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")
