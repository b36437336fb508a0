"""The bridge's page in a real browser: a bridge, a worker, a headless Chromium, and what was wrong.

`python -m kit.browser FOLDER` (in tests/) makes the pictures of docs/page.md.

A `Stage` is a namespace of a server with a bridge and a worker in this process; `Tab` is a page of
the browser that notes whatever a page must not do: dialogs, errors, CSP violations, requests to
anywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kit.servers import NatsServer
from kit.waiting import eventually
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    Response,
    async_playwright,
)

from bridge.auth import Auth, NoAuth, Token, TokenList, Tokens
from bridge.service import Bridge
from journal.ids import RunId
from journal.records import Record
from journal.stores.provision import provision
from runfold import (
    SAFE,
    UNSAFE,
    Agent,
    Call,
    Complete,
    Context,
    Continue,
    Fleet,
    JetStreamStore,
    Next,
    Pause,
    RunState,
    ToolCall,
    Worker,
    read,
    turn,
    write,
)
from runfold.testing import ScriptedModel, call, say

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 10_000


# ---- agents -----------------------------------------------------------------------------------

HOSTILE = (
    "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    " \u202egnp.exe\u202c zero\u200bwidth\ufeff nul\x00 ansi\x1b[31m tag\U000e0041"
    " quote\"' &amp; javascript:alert(3)"
)
LONG_LINE = "x" * 100_000
EXACT = {"2": "b", "1": "a", "amount": 12345678901234567890, "ratio": 1.0, "__proto__": None}
"""What JSON.parse would reorder, round, shorten or lose."""


@read
def lookup(query: str) -> str:
    """Search the knowledge base."""
    return f"no known outage for {query!r}"


def desk(filed: list[str]) -> Agent:
    """A lookup, a ticket that a person must approve, an answer."""

    @write
    def create_ticket(title: str, queue: str, call: ToolCall) -> str:
        """File a ticket with the network team."""
        filed.append(call.key)
        return f"TICKET-{len(filed)}"

    script = ScriptedModel(
        call("lookup", query="VPN"),
        call("create_ticket", title="VPN is down in the Berlin office", queue="network"),
        say("I filed a ticket with the network team."),
    )
    return Agent("helpdesk", model=script, tools=[lookup, create_ticket])


@turn("hostile")
async def hostile(ctx: Context) -> Next:
    """Everything that can hold text holds a hostile one."""

    async def act(call: ToolCall) -> str:
        raise AssertionError(HOSTILE)

    what = {"note": HOSTILE, "long": LONG_LINE, HOSTILE: 1, **EXACT}
    await ctx.tool(Call(name="wire", input=what, fn=act, replay=UNSAFE, approval=HOSTILE))
    return Complete(HOSTILE)


@turn("ticker")
async def ticker(ctx: Context) -> Next:
    """A turn for each input, in which it looks at it and says something; `end` ends it."""
    placed = await ctx.place_inputs("steer")
    for one in placed:

        async def look(call: ToolCall) -> Any:
            return call.input

        await ctx.put_stream(f"thinking about {one.content} ")
        await ctx.tool(Call(name="look", input=one.content, fn=look, replay=SAFE))
    if any(one.content == "end" for one in placed):
        return Complete("ended")
    return Continue(state=(ctx.load_checkpoint() or 0) + len(placed), until_input=True)


@turn("pauser")
async def pauser(ctx: Context) -> Next:
    """Pauses once."""
    if ctx.load_checkpoint() is None:
        return Pause(reason="the quota is used up: ask for more", state=1)
    return Complete("went on")


@turn("billing")
async def billing(ctx: Context) -> Next:
    """A write whose connection breaks: nobody knows whether it happened."""

    async def act(call: ToolCall) -> str:
        raise ConnectionResetError("the payment service hung up")

    invoice = {"invoice": "INV-2291", "amount_eur": 1249.9, "to": "DE02 1203 0000 0000 2020 51"}
    paid = await ctx.tool(Call(name="pay_invoice", input=invoice, fn=act, replay=UNSAFE))
    return Complete(paid.output)


# ---- the stage --------------------------------------------------------------------------------


class Stage:
    """`async with stage_on(server.url, namespace) as stage`."""

    def __init__(self, url: str, namespace: str, store: JetStreamStore) -> None:
        self.url = url
        self.namespace = namespace
        self.store = store
        self.fleet = Fleet(store, by="somebody")
        self.filed: list[str] = []
        self.bridge: Bridge | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        assert self.bridge is not None
        return self.bridge.address

    async def open_bridge(self, auth: Auth | None = None) -> None:
        """At the port it had before, if it had one."""
        ready = asyncio.Event()
        self.bridge = Bridge(
            self.url,
            auth=auth or NoAuth(),
            namespace=self.namespace,
            port=self._port,
            on_ready=ready.set,
        )
        self._serving = asyncio.create_task(self.bridge.serve())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when="FIRST_COMPLETED")
        waiting.cancel()
        if self._serving.done():
            await self._serving
        self._port = int(self.address.rpartition(":")[2])

    async def close_bridge(self) -> None:
        assert self.bridge is not None and self._serving is not None
        await self.bridge.stop()
        await self._serving

    async def records(self, run: str) -> list[Record]:
        return [entry.record for entry in (await self.store.load(RunId(run))).entries]

    async def until(self, run: str, *statuses: str) -> RunState:
        async def there() -> RunState | None:
            found = await self.fleet.get(run)
            return found if found.status in statuses else None

        return await eventually(there, 15, what=f"{run} is {statuses}")


@contextlib.asynccontextmanager
async def stage_on(url: str, namespace: str) -> AsyncGenerator[Stage]:
    await provision(url, namespace=namespace)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(JetStreamStore(url, namespace=namespace))
        stage = Stage(url, namespace, store)
        await stack.enter_async_context(_worker(stage))
        await stage.open_bridge()
        stack.push_async_callback(stage.close_bridge)
        yield stage


@contextlib.asynccontextmanager
async def _worker(stage: Stage) -> AsyncGenerator[None]:
    ready = asyncio.Event()
    made = Worker(
        stage.url,
        [desk(stage.filed), hostile, ticker, pauser, billing],
        namespace=stage.namespace,
        on_ready=ready.set,
        ack_wait_s=3.0,
    )
    serving = asyncio.create_task(made.serve())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([serving, waiting], return_when="FIRST_COMPLETED")
    waiting.cancel()
    try:
        yield
    finally:
        made.force()
        await asyncio.wait([serving], timeout=10)


def tokens(**scopes: str) -> Tokens:
    """`tokens(alice="signal")`: the token of alice is `token-of-alice`."""
    listed = [
        Token(
            name=name,
            scopes=(scope,),  # pyright: ignore[reportArgumentType]
            sha256=hashlib.sha256(f"token-of-{name}".encode()).hexdigest(),
        )
        for name, scope in scopes.items()
    ]
    return Tokens(TokenList(tokens=tuple(listed)))


# ---- the browser ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


class Tab:
    """A page of a fresh profile. `wrong`: what it must not have done."""

    def __init__(self, page: Page, address: Callable[[], str]) -> None:
        self.page = page
        self.wrong: list[str] = []
        self._address = address
        page.on("dialog", self._dialog)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.context.on("request", self._request)
        page.context.on("response", self._response)

    async def go(self, route: str) -> None:
        await self.page.goto(f"{self._address()}/#/{route}")

    async def _dialog(self, dialog: Dialog) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _console(self, message: ConsoleMessage) -> None:
        """The browser itself reports refused and lost requests there, which tests bring about."""
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.wrong.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self._address()}/", "data:image/svg+xml")):
            self.wrong.append(f"request: {request.url}")

    def _response(self, response: Response) -> None:
        if "/web/" in response.url and not response.ok:
            self.wrong.append(f"{response.status}: {response.url}")


@contextlib.asynccontextmanager
async def tab_in(
    browser: Browser, stage: Stage, *, width: int = 1100, height: int = 800, **options: Any
) -> AsyncGenerator[Tab]:
    """Asserts at the end that nothing was wrong."""
    context = await browser.new_context(
        viewport={"width": width, "height": height}, locale="en-GB", **options
    )
    context.set_default_timeout(WAIT_MS)
    try:
        page = await context.new_page()
        tab = Tab(page, lambda: stage.address)
        await page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error(`CSP ${event.violatedDirective} ${event.blockedURI}`))"
        )
        yield tab
        assert not tab.wrong, tab.wrong
    finally:
        for page in context.pages:  # what a handler is still fetching is of no interest any more
            await page.unroute_all(behavior="ignoreErrors")
        await context.close()


# ---- pictures ---------------------------------------------------------------------------------


async def take_pictures(folder: Path) -> None:
    """Those of docs/page.md."""
    with tempfile.TemporaryDirectory() as data:
        server = await NatsServer.start(data)
        try:
            async with stage_on(server.url, "pictures") as stage, chromium() as browser:
                await _fill(stage)
                async with tab_in(browser, stage, width=1000, height=760) as tab:
                    await _wide(tab, folder)
                async with tab_in(
                    browser, stage, width=360, height=740, color_scheme="dark"
                ) as tab:
                    await tab.go("inbox")
                    await tab.page.locator("article.is-approval").last.scroll_into_view_if_needed()
                    await tab.page.get_by_role("button", name="Approve…").last.click()
                    await tab.page.screenshot(path=folder / "page-phone.png")
        finally:
            await server.stop()


async def _fill(stage: Stage) -> None:
    """Runs of every look."""
    for agent, run, text in (
        ("billing", "invoice-2291", "pay INV-2291"),
        ("nightly", "report-2026-11", "report of November"),
        ("pauser", "crawl-88", "crawl the archive"),
        ("helpdesk", "ticket-1041", "the printer on floor 3 is offline"),
        ("helpdesk", "ticket-1042", "VPN is down, again"),
        ("ticker", "watch-7", "watch the mailbox"),
    ):
        await stage.fleet.start(agent, text, run_id=run)
    await stage.until("invoice-2291", "indeterminate")
    await stage.until("crawl-88", "paused")
    await stage.until("watch-7", "waiting")
    for run in ("ticket-1041", "ticket-1042"):
        await stage.until(run, "awaiting_approval")
    (asked,) = (await stage.fleet.get("ticket-1041")).outcome.pending  # type: ignore[union-attr]
    alice = Fleet(stage.store, by="alice")
    await alice.signal("ticket-1041", "approve", {"marker": asked.marker, "comment": "go on"})
    await stage.until("ticket-1041", "completed")


async def _wide(tab: Tab, folder: Path) -> None:
    page = tab.page
    await tab.go("runs")
    await page.locator("tbody tr").nth(5).wait_for()
    await page.screenshot(path=folder / "page-runs.png")
    await tab.go("runs/ticket-1041")
    await page.locator(".timeline .is-good").wait_for()
    await page.screenshot(path=folder / "page-run.png", full_page=True)
    await page.set_viewport_size({"width": 1000, "height": 1500})  # nothing to scroll
    await tab.go("inbox")
    await page.get_by_role("button", name="It did not happen…").click()
    await page.screenshot(path=folder / "page-inbox.png", full_page=True)


if __name__ == "__main__":
    asyncio.run(take_pictures(Path(sys.argv[1])))
