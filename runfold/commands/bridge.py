"""Shell: `runfold bridge`, `token`: HTTP and NATS doors, and who may use them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from journal.escape import visible
from journal.limits import (
    ACK_WAIT_MAX_S,
    ACK_WAIT_MIN_S,
    ACK_WAIT_S,
    RESTART_LIMIT,
    RESTART_LIMIT_MAX,
)
from worker.opening import embedded, is_url

from ..dying import die_with_parent
from ..frame import UsageProblem, execute
from ..logs import LogFormat, LogOption
from ..options import CredsOption, JsonOption, NamespaceOption, StoreOption, Target, note_unsaid
from ..terminal import emit_json, note, say
from ..tracing import TraceOption, traced

if TYPE_CHECKING:
    from bridge.auth import Auth
    from bridge.service import Bridge

DEFAULT_LISTEN = "127.0.0.1:8787"

TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        envvar="RUNFOLD_TOKENS_FILE",
        help="The file with the tokens' hashes. Else RUNFOLD_TOKENS holds the same JSON.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command("bridge")(bridge)
    app.command("token")(token)


def bridge(
    listen: Annotated[
        str, typer.Option("--listen", help="[HOST:]PORT; port 0 is any free one.")
    ] = DEFAULT_LISTEN,
    tokens: TokensOption = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Everybody on this machine may do everything.")
    ] = False,
    ack_wait: Annotated[
        float,
        typer.Option(
            "--ack-wait",
            min=ACK_WAIT_MIN_S,
            max=ACK_WAIT_MAX_S,
            help="Seconds of silence after which a worker over HTTP is lost, where no native "
            "worker of its agent has set them.",
        ),
    ] = ACK_WAIT_S,
    restart_limit: Annotated[
        int,
        typer.Option(
            "--restart-limit",
            min=1,
            max=RESTART_LIMIT_MAX,
            help="A run that loses so many workers over HTTP in a row fails.",
        ),
    ] = RESTART_LIMIT,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    trace: TraceOption = None,
    log_format: LogOption = LogFormat.TEXT,
) -> None:
    """HTTP, the page, and signals by NATS, until it is told to stop (docs/http.md).

    SIGTERM or Ctrl-C: requests that were begun end, streams end at once; a second one ends all.
    Exit code: 0 stopped, 9 the connection is closed for good.
    """
    die_with_parent()
    _allow_files()
    limits = {"ack_wait_s": ack_wait, "restart_limit": restart_limit}
    target = Target(store, namespace, creds)
    execute(False, _bridge(listen, tokens, no_auth, limits, trace, target), log_format)


def _allow_files() -> None:
    """Each follower is an open file; the usual 1024 are fewer than the bridge takes."""
    try:
        import resource
    except ImportError:  # not on Windows, where there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _bridge(
    listen: str,
    tokens: Path | None,
    no_auth: bool,
    options: dict[str, Any],
    trace: bool | None,
    target: Target,
) -> int:
    try:
        from bridge.service import OpenBridge
    except ImportError as error:
        raise UsageProblem(
            f"the bridge needs {error.name}", hint="pip install 'runfold[bridge]'"
        ) from error
    host, port = _address(listen)
    auth = _auth(tokens, no_auth)
    if target.store is not None and not is_url(target.store):
        raise UsageProblem(
            "a directory has no bridge: it needs a NATS server", hint="use a nats:// store"
        )
    try:
        with traced(trace, "runfold-bridge", target.namespace) as observer:
            options = {**options, "observer": observer}
            if target.store is not None:
                return await _serve(target.store, host, port, auth, options, target)
            async with embedded(target.namespace) as url:
                return await _serve(url, host, port, auth, options, target)
    except OpenBridge as error:
        raise UsageProblem(error.message, hint="give --tokens instead of --no-auth") from error


def _ready(made: Bridge, target: Target) -> None:
    note(f"bridge: {made.address}")
    if target.store is not None and made.store is not None:  # our own server syncs every write
        note_unsaid(made.store, made.store.safety)


async def _serve(
    url: str, host: str, port: int, auth: Auth, options: dict[str, Any], target: Target
) -> int:
    from bridge.service import Bridge

    made = Bridge(
        url,
        auth=auth,
        namespace=target.namespace,
        creds=target.creds,
        host=host,
        port=port,
        **options,
        on_ready=lambda: _ready(made, target),
    )
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(made.serve())
            _listen_to_signals(group, serving, made)
    except* OSError as errors:
        first = errors.exceptions[0]
        why = first.strerror if isinstance(first, OSError) and first.strerror else str(first)
        what = f"the bridge can't listen at {visible(host)} port {port}"
        raise UsageProblem(f"{what}: {why}") from None
    return 0


def _listen_to_signals(group: asyncio.TaskGroup, serving: asyncio.Task[None], made: Bridge) -> None:
    loop = asyncio.get_running_loop()
    told = 0

    def stop() -> None:
        nonlocal told
        told += 1
        if told == 1:
            note("bridge is stopping")
            group.create_task(made.stop())
        else:
            serving.cancel()

    for number in (SIGTERM, SIGINT):
        loop.add_signal_handler(number, stop)


def _auth(tokens: Path | None, no_auth: bool) -> Auth:
    from bridge.auth import BadTokens, NoAuth, TokenFile, Tokens, parse_tokens

    listed = os.environ.get("RUNFOLD_TOKENS")
    if no_auth:
        if tokens is not None:
            raise UsageProblem("--no-auth and --tokens exclude each other")
        return NoAuth()
    try:
        if tokens is not None:
            return TokenFile(tokens)
        if listed:
            return Tokens(parse_tokens(listed))
    except BadTokens as error:
        raise UsageProblem(error.message, hint=error.hint) from error
    raise UsageProblem(
        "the bridge needs to know who may use it",
        hint="make a token with `runfold token NAME --scope signal --tokens FILE` and give --tokens"
        " FILE; or --no-auth, for this machine alone",
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageProblem(f"--listen is [HOST:]PORT, not {visible(text)}")
    return host.strip("[]") or "127.0.0.1", int(port)


# ---- token --------------------------------------------------------------------------------------


def token(
    name: Annotated[str, typer.Argument(help="Who it is for: records say it in `by`.")],
    scope: Annotated[
        list[str], typer.Option("--scope", help="read, signal, work or admin; several times.")
    ],
    tokens: TokensOption = None,
    json: JsonOption = False,
) -> None:
    """Make a token: it is printed once, its hash is added to the file.

    Without a file the entry for RUNFOLD_TOKENS is printed on stderr.
    """

    async def body() -> int:
        return _token(name, scope, tokens, json)

    execute(json, body())


def _token(name: str, scopes: list[str], path: Path | None, json: bool) -> int:
    from bridge.auth import SCOPES, BadTokens, add_token, check_name, digest_of, new_token

    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown:
        raise UsageProblem(f"--scope is one of {', '.join(SCOPES)}, not {visible(unknown[0])}")
    made = new_token()
    entry = {"name": name, "scopes": list(dict.fromkeys(scopes)), "sha256": digest_of(made)}
    try:
        check_name(name)
        if path is not None:
            add_token(path, entry)
    except BadTokens as error:
        raise UsageProblem(error.message, hint=error.hint) from error
    if json:
        emit_json({"token": made, "entry": entry})
        return 0
    say(made)
    if path is None:
        note(f"for RUNFOLD_TOKENS: {msgspec.json.encode(entry).decode()}")
    else:
        note(f"its hash stands in {path}; the token is shown this once")
    return 0
