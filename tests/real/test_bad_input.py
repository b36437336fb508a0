"""What is refused: one line on stderr, the exit code, an error object, nothing written (R69)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kit.cli import AGENTS, RUNFOLD, Cli, is_refused, run_line
from kit.servers import NatsServer

from journal.limits import RECORD_BYTES_MAX, SIGNAL_BYTES_MAX
from journal.stores.provision import provision

pytestmark = pytest.mark.real

DESK = f"{AGENTS}:desk"
STEP = "tool/2/0/create_ticket"
DIGEST = "0123456789abcdef"

Case = tuple[list[str], int, str]


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    folder = tmp_path / "agents"
    folder.mkdir()
    return folder


# -- stores -------------------------------------------------------------------------------------

NO_STORES = ["", "ftp://127.0.0.1:4222", "file:///tmp/x", "redis://x"]
COMMANDS = [
    ["run", DESK, "--id=a1", "--input=x"],
    ["show", "a1"],
    ["list"],
    ["approve", f"a1/{STEP}@1.{DIGEST}"],
    ["reconcile", "a1", STEP, "--retry"],
    ["start", "desk", "--input=x"],
    ["follow", "a1"],
    ["send", "a1", "x"],
    ["cancel", "a1"],
    ["inbox"],
    ["check", "a1"],
    ["check", "--all"],
    ["export", "a1"],
]


async def test_a_store_that_is_none_is_refused(on_file: Cli, all_refused: Any) -> None:
    on_file.folder.joinpath("file").write_text("not a directory")
    stores = [
        *NO_STORES,
        *("nats://", "nats://:0", "nats://a b:4222", "nats://127.0.0.1:99999"),
        *("nats://127.0.0.1:1", "file", "file/below"),
    ]
    cases: list[Case] = [
        (
            [*command, f"--store={store}"],
            *((2, "invalid_id") if store in NO_STORES else (9, "store_unavailable")),
        )
        for store in stores
        for command in COMMANDS
    ]
    cases += [(["doctor", f"--store={store}"], 9, "store_unavailable") for store in stores[4:]]
    await all_refused(on_file, cases)


async def test_a_store_that_is_none_is_not_called_safe(on_file: Cli, all_refused: Any) -> None:
    await all_refused(
        on_file,
        [(["doctor", f"--store={store}"], 2, "invalid_id") for store in NO_STORES],
    )


async def test_init_is_for_servers(on_file: Cli, all_refused: Any) -> None:
    cases: list[Case] = [
        (["init"], 2, "usage"),
        (["init", "--store=elsewhere"], 2, "usage"),
        (["init", "--store=nats://127.0.0.1:1"], 9, "store_unavailable"),
        (["init", "--store=nats://127.0.0.1:1", "--replicas=0"], 2, "usage"),
        (["init", "--store=nats://127.0.0.1:1", "--replicas=x"], 2, "usage"),
        (["init", "--store=http://127.0.0.1:1"], 2, "usage"),
    ]
    await all_refused(on_file, cases)


async def test_a_directory_without_write_permission_is_said_to_be_one(on_file: Cli) -> None:
    runs = on_file.folder / "runs"
    runs.mkdir()
    setpriv = shutil.which("setpriv")
    drop = [str(setpriv), "--bounding-set=-dac_override,-dac_read_search"]
    runs.chmod(0o555)
    try:
        probe = [*drop, "touch", str(runs / "probe")]
        if setpriv is None or (await (await on_file.execute(*probe)).done()).code == 0:
            pytest.skip("the superuser's power to write everywhere can't be dropped here")
        assert not runs.joinpath("probe").exists()
        line = run_line("a1", "desk", input="x")
        child = await on_file.execute(*drop, RUNFOLD, *line)
        is_refused(await child.done(), 9, "permission_denied")
        child = await on_file.execute(*drop, RUNFOLD, "list", "--json")
        assert (await child.done()).json == {"runs": [], "next": None}
        assert list(runs.iterdir()) == []
    finally:
        runs.chmod(0o755)


# -- agents -------------------------------------------------------------------------------------

AGENT_FILES = {
    "syntax.py": "def broken(:\n",
    "raises.py": "raise RuntimeError('two\\nlines, and \\x1b[31mred')\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "imports.py": "import a_module_that_is_not_there\n",
    "other.py": "agent = 'a text'\nnone = None\n",
    "undeclared.py": (
        "from runfold import Agent\nfrom runfold.testing import ScriptedModel\n"
        "def tool(x: int) -> int:\n    return x\n"
        "agent = Agent('a', model=ScriptedModel(), tools=[tool])\n"
    ),
    "unnamed.py": (
        "from runfold import Agent\nfrom runfold.testing import ScriptedModel\n"
        "agent = Agent('no name', model=ScriptedModel())\n"
    ),
    "nul.py": "agent = '\0'\n",
    "latin.py": "agent = '\xe9'\n",
}


async def test_an_agent_that_cannot_be_loaded_is_refused(
    cli: Cli, agents: Path, all_refused: Any
) -> None:
    for name, text in AGENT_FILES.items():
        agents.joinpath(name).write_bytes(text.encode("latin-1"))
    agents.joinpath("folder.py").mkdir()
    specs = [
        *(
            "",
            ":",
            "agent",
            "a.py",
            ":agent",
            "a.py:",
            "a.py:a b",
            "a.py:1",
            "a:b:c",
            "no.py:agent",
        ),
        *("no.such.module:agent", "..:agent", "os:path", "\x1b[31m.py:agent"),
        *(f"{agents}/{name}:agent" for name in [*AGENT_FILES, "folder.py", "missing.py"]),
        *(f"{agents}/other.py:{name}" for name in ("none", "missing", "__name__")),
    ]
    cases: list[Case] = [
        (["run", spec, "--id=a1", "--input=x"], 2, "invalid_id" if "unnamed" in spec else "usage")
        for spec in specs
    ]
    await all_refused(cli, cases)


# -- inputs and payloads ------------------------------------------------------------------------


async def test_an_input_that_is_none_is_refused(cli: Cli, agents: Path, all_refused: Any) -> None:
    agents.joinpath("latin1").write_bytes("é".encode("latin-1"))
    run = ["run", DESK, "--id=a1"]
    usage = [
        *(f"--input-json={text}" for text in ("", "{", "NaN", "[Infinity]", '{"a":1,"a":2}')),
        *(f"--input-json={text}" for text in ('"\\ud800"', "null", "'x'", "1 2", "1e999", "\xa0")),
        *(
            f"--input-json={text}"
            for text in ("[" * 150 + "]" * 150, "[" * 5000, '{"a":{"a":1,"a":2}}')
        ),
        *(f"--input=@{path}" for path in ("missing", "", agents, agents / "latin1", "/")),
    ]
    cases: list[Case] = [([*run, option], 2, "usage") for option in usage]
    cases.append(([*run, "--input=x", "--input-json=1"], 2, "usage"))
    cases.append(([*run, "--input=a\udcffb"], 2, "not_encodable"))
    cases.append((["run", DESK], 2, "usage"))
    await all_refused(cli, cases)


async def test_standard_input_must_be_utf8(on_file: Cli) -> None:
    line = ("run", DESK, "--id", "a1", "--input", "-", "--json")
    is_refused(await on_file.typed(*line, stdin=b"a\xffb"), 2, "usage")
    assert await on_file.contents() == {}
    assert (await on_file.typed(*line, stdin="é\u2028😀".encode())).code == 3
    assert (await on_file.records("a1"))[0].input == "é\u2028😀"  # type: ignore[attr-defined]


async def test_an_input_larger_than_the_store_takes_is_refused(
    cli: Cli, agents: Path, all_refused: Any
) -> None:
    limit = 1024 * 1024 if cli.kind == "jetstream" else RECORD_BYTES_MAX
    agents.joinpath("large").write_text("x" * limit)
    run = ["run", DESK, "--id=a1", f"--input=@{agents / 'large'}"]
    await all_refused(cli, [(run, 2, "too_large")], at_once=1)


async def test_one_byte_decides_at_the_servers_limit(tmp_path: Path, namespace: str) -> None:
    """Records of just what fits are stored; one byte more is refused before it is sent (R17)."""
    server = await NatsServer.start(tmp_path / "nats", max_payload=4096)
    cli = Cli(tmp_path / "work", server.url, namespace)
    try:
        await provision(server.url, namespace=namespace)
        fits, too_large = 0, 4096
        while too_large - fits > 1:  # bisect: 12 runs
            half = (fits + too_large) // 2
            line = run_line(f"n{half:04}", "clock", input="x" * half)
            (done,) = await cli.forked([line], at_once=1)
            if done.code == 0:
                fits = half
            else:
                is_refused(done, 2, "too_large")
                too_large = half
        assert fits > 3000
        entry, *_ = await cli.entries(f"n{fits:04}")
        async with cli.client() as client:
            found = await client.jetstream().get_last_msg(
                f"{namespace.upper()}_JOURNAL_0", f"{namespace}.journal.0.n{fits:04}"
            )
            headers = sum(len(name) + len(value) + 4 for name, value in found.headers.items())
        assert len(entry.raw) + headers <= 4096 + len("completed")
    finally:
        await cli.end()
        await server.stop()


async def test_a_bad_decision_is_refused(cli: Cli, all_refused: Any) -> None:
    marker = (await cli.run("a1")).json["pending"][0]["marker"]
    large = "x" * (SIGNAL_BYTES_MAX + 1)
    reconcile = ["reconcile", "a1", STEP]
    done = [f"--done={text}" for text in ("", "{", "NaN", "TICKET-7", '{"a":1,"a":2}', '"\\udc00"')]
    cases: list[Case] = [
        *(([*reconcile, option], 2, "usage") for option in done),
        (reconcile, 2, "usage"),
        ([*reconcile, "--retry", "--done=1"], 2, "usage"),
        ([*reconcile, "--retry", "--done-text=x"], 2, "usage"),
        ([*reconcile, "--done=1", "--done-text=1"], 2, "usage"),
        ([*reconcile, "--retry", "--start=x"], 2, "usage"),
        ([*reconcile, "--retry", "--start=-1"], 8, "stale_signal"),
        ([*reconcile, f'--done="{large}"'], 2, "bad_payload"),
        ([*reconcile, f"--done-text={large}"], 2, "bad_payload"),
        ([*reconcile, "--done-text=a\udcff"], 2, "bad_payload"),
        ([*reconcile, "--retry"], 8, "stale_signal"),  # it has not started
        (["reconcile", "a1", "llm/1", "--retry"], 8, "stale_signal"),
        (["reconcile", "a1", "", "--retry"], 8, "stale_signal"),
        (["reconcile", "a1", "\x1b[31m", "--retry"], 8, "stale_signal"),
        (["reconcile", "nobody", STEP, "--retry"], 8, "run_not_found"),
        (["approve", marker, f"--comment={large}"], 2, "bad_payload"),
        (["reject", marker, f"--reason={large}"], 2, "bad_payload"),
        (["reject", marker, "--reason=a\udcff"], 2, "bad_payload"),
        (["approve", marker[:-1] + ("0" if marker[-1] != "0" else "1")], 8, "stale_signal"),
        (["approve", marker.replace("a1/", "nobody/")], 8, "run_not_found"),
        *(
            (["approve", marker, f"--request-id={id}"], 2, "bad_payload")
            for id in ("é", "a\nb", "x" * 129)
        ),
    ]
    await all_refused(cli, cases)
    assert (await cli("approve", marker)).code == 0


async def test_an_empty_request_id_is_refused(on_file: Cli, all_refused: Any) -> None:
    marker = (await on_file.run("a1")).json["pending"][0]["marker"]
    await all_refused(on_file, [(["approve", marker, "--request-id="], 2, "bad_payload")])


async def test_a_run_that_is_not_there_is_not_shown(cli: Cli, all_refused: Any) -> None:
    await all_refused(cli, [(["show", "nobody"], 8, "run_not_found")])


async def test_another_input_or_agent_is_refused(cli: Cli, all_refused: Any) -> None:
    assert (await cli.run("a1", "clock")).code == 0
    run = ["run", f"{AGENTS}:clock", "--id=a1"]
    cases: list[Case] = [
        ([*run, "--input=other"], 8, "input_mismatch"),
        ([*run, '--input-json=["hello"]'], 8, "input_mismatch"),
        (["run", DESK, "--id=a1", "--input=hello"], 8, "input_mismatch"),
        (["run", DESK, "--id=a1"], 8, "input_mismatch"),
    ]
    await all_refused(cli, cases)


# -- the command line itself --------------------------------------------------------------------


async def test_an_unknown_word_on_the_command_line_is_refused(
    on_file: Cli, all_refused: Any
) -> None:
    lines = [
        *(["frobnicate"], ["run"], ["run", "--frob"], ["show"], ["show", "a", "b"], ["approve"]),
        *(["show", "a1", "--frob=1"], ["reconcile", "a1"], ["list", "a"], ["list", "--limit=x"]),
        *(
            ["list", "--limit=0"],
            ["list", "--limit=501"],
            ["list", "--status=nope"],
            ["list", "--limit"],
        ),
        *(["show", "a1", "--st\x1b[31more"], ["\u202efrob"]),
        *(
            ["run", DESK, "--id=a1", "--input=x", f"--ack-wait={n}"]
            for n in ("0", "601", "nan", "x")
        ),
    ]
    await all_refused(on_file, [(line, 2, "usage") for line in lines])


async def test_help_and_version_are_no_errors(on_file: Cli) -> None:
    commands = ("run", "approve", "reject", "reconcile", "show", "list", "init", "doctor")
    lines = [["--version"], ["--help"], *([command, "--help"] for command in commands)]
    for done in await on_file.forked(lines, at_once=2):
        assert (done.code, done.err) == (0, "") and done.out, done
    (bare,) = await on_file.forked([[]], at_once=1)
    assert bare.code == 2 and "Usage" in bare.out + bare.err


async def test_python_without_assertions_is_refused(on_file: Cli) -> None:
    on_file.env["PYTHONOPTIMIZE"] = "1"
    is_refused(await on_file.typed("list", "--json"), 2, "usage")
