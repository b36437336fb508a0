"""The house rules that a test can check (STYLE.md 2, 3)."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runfold", "journal", "worker", "bridge")
KINDS = ("Core", "Store", "Shell", "Face", "runfold")
LINES_MAX, FUNCTION_LINES_MAX, COLUMNS_MAX = 400, 60, 100
FORBIDDEN_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "managers", "base"}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name(path))


def test_there_is_something_to_check():
    assert len(MODULES) > 30
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_has_at_most_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_function_has_at_most_60_lines(path: Path):
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long == {}


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name)
def test_a_module_says_in_its_first_line_what_kind_it_is(path: Path):
    docstring = ast.get_docstring(tree(path)) or ""
    assert docstring.split("\n")[0].startswith(KINDS), f"{name(path)} begins {docstring[:60]!r}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(ROOT).parts[0] != "runfold"], ids=name
)
def test_only_the_face_prints(path: Path):
    calls = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


@pytest.mark.parametrize("path", MODULES + TESTS, ids=name)
def test_nothing_is_left_to_do_in_a_comment(path: Path):
    words = ["TO" + "DO", "FIX" + "ME", "X" + "XX"]
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [line for line in lines if any(word in line for word in words)] == []


def test_no_module_is_named_for_nothing():
    found = {name(path) for path in MODULES + TESTS if path.stem.lower() in FORBIDDEN_NAMES}
    assert found == set()


def test_test_folders_are_no_packages_and_shadow_none():
    folders = {path.parent for path in TESTS}
    assert [folder for folder in folders if folder.name in PACKAGES] == []
    assert [path for path in TESTS if path.name == "__init__.py"] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_package_is_ours(package: str):
    found = importlib.import_module(package)
    assert found.__file__ is not None
    assert Path(found.__file__).resolve() == ROOT / package / "__init__.py"
    assert (ROOT / package / "py.typed").exists()


def test_the_core_neither_waits_nor_looks_at_a_clock_nor_draws_lots():
    """A module that calls itself Core imports nothing that could (STYLE 2.2). `ids` makes random
    run ids and says so; the scripted model has a ledger and says so."""
    impure = {"asyncio", "time", "random", "secrets", "os", "logging", "socket", "threading"}
    allowed = {"journal/ids.py": {"secrets"}}
    found: dict[str, set[str]] = {}
    for path in MODULES:
        if (ast.get_docstring(tree(path)) or "").startswith("Core:"):
            bad = imports(path) & impure - allowed.get(name(path), set())
            if bad:
                found[name(path)] = bad
    assert found == {}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_import_arrows_hold():
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_core_test_sleeps():
    sleeping = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "tests" / "core").glob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep")
        and ast.unparse(node.args[0]) != "0"
    ]
    assert sleeping == []
