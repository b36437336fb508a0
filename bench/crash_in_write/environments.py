"""Each peer's own environment, in a folder outside the project: a venv, an npm prefix, or both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSIONS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("versions.toml").read_text()
)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "runfold-crash-in-write"
INSTALL_WAIT_S = 900


class NotHere(Exception):
    """The environment can't be had; the message is the reason, one line."""


@dataclass(frozen=True)
class Environment:
    name: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def bin(self, name: str) -> Path:
        return self.folder / "venv" / "bin" / name

    @property
    def npm(self) -> Path:
        return self.folder / "npm" / "node_modules"

    @property
    def version(self) -> str:
        """What was asked for, as `package version, package version`."""
        pins = VERSIONS[self.name]
        python = [pin.replace("==", " ") for pin in pins.get("python", [])]
        npm = [" ".join(pin.rsplit("@", 1)) for pin in pins.get("npm", [])]
        return ", ".join(python + npm)

    @property
    def ready(self) -> bool:
        mark = self.folder / "installed.json"
        try:
            return bool(json.loads(mark.read_text()) == _wanted(self.name))
        except (OSError, ValueError):
            return False


def environment(name: str, cache: Path, *, install: bool) -> Environment:
    """The environment of this peer, installed if it is not there and may be.

    Raises `NotHere`.
    """
    found = Environment(name, cache / name)
    if found.ready:
        return found
    if not install:
        raise NotHere(f"not installed in {found.folder}")
    shutil.rmtree(found.folder, ignore_errors=True)
    found.folder.mkdir(parents=True)
    wanted = VERSIONS[name]
    if "python" in wanted:
        _do(sys.executable, "-m", "venv", found.folder / "venv")
        _do(found.python, "-m", "pip", "install", "-q", *PIP_OPTIONS, *wanted["python"])
    if "npm" in wanted:
        if shutil.which("npm") is None:
            raise NotHere("npm is not on this machine")
        _do("npm", "install", *NPM_OPTIONS, "--prefix", found.folder / "npm", *wanted["npm"])
    (found.folder / "installed.json").write_text(json.dumps(_wanted(name)))
    return found


PIP_OPTIONS = ("--disable-pip-version-check", "--no-input")
NPM_OPTIONS = ("--silent", "--no-audit", "--no-fund")


def _wanted(name: str) -> dict[str, Any]:
    return VERSIONS[name] | {"interpreter": sys.version.split()[0]}


def _do(*command: str | Path) -> None:
    line = [str(part) for part in command]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=INSTALL_WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHere(f"{line[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        said = next((text for text in lines if text.startswith("ERROR")), lines[-1])
        raise NotHere(f"{' '.join(line[:4])} …: exit code {done.returncode}: {said}")
