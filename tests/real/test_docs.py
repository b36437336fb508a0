"""The documents' commands, run as a newcomer would: in an empty venv, in a folder of examples.

In ```console blocks a line `$ command` is run by bash; the lines up to the next one are its output
(stdout), `…` standing for anything on the line; `[exit N]` is its exit code, 0 if left out.
```python blocks that end in asyncio.run are run as scripts.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="session")
def fresh_bin(tmp_path_factory):
    """The bin folder of an empty venv with `pip install .[server]`, nothing else."""
    venv = tmp_path_factory.mktemp("newcomer") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    pip = [venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{ROOT}[server]"], check=True, timeout=200)
    return venv / "bin"


@pytest.fixture
def folder(tmp_path, fresh_bin):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def newcomer(fresh_bin, folder, *command, **options):
    path = f"{fresh_bin}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RUNFOLD_", "PYTHON"))}
    return subprocess.run(
        command,
        cwd=folder,
        env=clean | {"PATH": path, "PYTHONPATH": str(folder)},
        text=True,
        capture_output=True,
        timeout=120,
        **options,
    )


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


def sessions(block):
    """The commands of a console block: (command, expected lines, exit code)."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *lines = part.splitlines()
        code = 0
        if lines and (found := re.fullmatch(r"\[exit (\d+)\]", lines[-1])):
            code = int(found[1])
            lines.pop()
        yield command, lines, code


def matches(expected, line):
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, line) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_the_documents_prints_what_they_say(document, folder, fresh_bin):
    for block in blocks(document, "console"):
        for command, expected, code in sessions(block):
            done = newcomer(fresh_bin, folder, "bash", "-c", command)
            said = done.stdout.splitlines()
            assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
            assert len(said) == len(expected), f"{command}\n{done.stdout}"
            for want, line in zip(expected, said, strict=True):
                assert matches(want, line), f"{command}\nwanted {want!r}\n   got {line!r}"


def test_the_readme_has_a_session_and_a_script_to_run():
    readme = ROOT / "README.md"
    assert sum(len(list(sessions(block))) for block in blocks(readme, "console")) >= 4
    assert any("asyncio.run" in block for block in blocks(readme, "python"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_script_in_the_documents_runs(document, folder, fresh_bin):
    for block in blocks(document, "python"):
        done = newcomer(fresh_bin, folder, "python", "-c", block)
        assert done.returncode == 0, done.stderr


def test_the_readmes_agent_takes_at_most_twelve_lines():
    first = blocks(ROOT / "README.md", "python")[0]
    code = [line for line in first.splitlines() if line.strip()]
    assert "Agent(" in first
    assert len(code) <= 12


def test_the_embedded_server_session_leaves_no_server(folder, fresh_bin):
    run = ["runfold", "run", "examples/helpdesk.py:agent", "--id", "a1", "--input", "VPN is down"]
    done = newcomer(fresh_bin, folder, *run)
    assert done.returncode == 3, done.stderr
    assert not (folder / ".runfold" / "server.json").exists()
    servers = subprocess.run(["pgrep", "-af", f"nats-server.*{folder}"], capture_output=True)
    assert servers.stdout == b""


def test_the_steps_example_calls_nothing_the_second_time(folder, fresh_bin):
    first = newcomer(fresh_bin, folder, "python", "examples/steps.py")
    second = newcomer(fresh_bin, folder, "python", "examples/steps.py")
    assert first.stdout == "asking for the price\npaying\npaid 120: receipt-1\n"
    assert second.stdout == "paid 120: receipt-1\n"
