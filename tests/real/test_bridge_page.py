"""The bridge's page in a real browser (R67, R68): what it shows, what it decides, what it survives.

One browser and one namespace for the module; each test has a profile and runs of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from kit import raw_client, servers
from kit.fleet import Crew
from kit.waiting import eventually

from journal.escape import visible
from journal.records import Signal, StepCompleted
from journal.stores.rejected import Refusal

ROOT = Path(__file__).resolve().parents[2]

CHROMIUM = Path("/usr/bin/chromium")
if importlib.util.find_spec("playwright") is None:
    MISSING = "playwright is not installed"
else:
    MISSING = "" if CHROMIUM.exists() else f"{CHROMIUM} is not there"
if MISSING:
    print(f"no test of the page: {MISSING}", file=sys.__stderr__)
    pytest.skip(MISSING, allow_module_level=True)

from kit import browser as kit  # noqa: E402
from playwright.async_api import Locator, Page, Route, expect  # noqa: E402

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
expect.set_options(timeout=kit.WAIT_MS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[kit.Stage]:
    server = await servers.NatsServer.start(tmp_path_factory.mktemp("nats"))
    async with kit.stage_on(server.url, "page") as found:
        yield found
    await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with kit.chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser, stage: kit.Stage) -> AsyncIterator[kit.Tab]:
    async with kit.tab_in(browser, stage) as found:
        yield found


def new_id(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


async def asking(stage: kit.Stage) -> str:
    """A run whose ticket waits for approval."""
    run = new_id("ticket")
    await stage.fleet.start("helpdesk", "VPN is down", run_id=run)
    await stage.until(run, "awaiting_approval")
    return run


def card_of(page: Page, run: str) -> Locator:
    return page.locator("article.card", has=page.get_by_role("link", name=run, exact=True))


def button(place: Page | Locator, name: str) -> Locator:
    return place.get_by_role("button", name=name, exact=True)


async def ordinals(page: Page) -> list[int]:
    """Of all records that the timeline shows, as often as it does."""
    texts = await page.locator(".timeline > li").evaluate_all("all => all.map(e => e.dataset.n)")
    return sorted(int(n) for text in texts for n in text.split("–"))


async def signals(stage: kit.Stage, run: str) -> list[Signal]:
    return [one for one in await stage.records(run) if isinstance(one, Signal)]


# ---- deciding -----------------------------------------------------------------------------------


async def test_a_run_is_started_approved_and_completes(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, new_id("new")
    filed = len(stage.filed)
    await tab.go("runs")
    await button(page, "New run").click()
    form = page.get_by_role("form", name="New run")
    await form.get_by_label("Agent").fill("helpdesk")
    await form.get_by_label("Input", exact=True).fill("VPN is down")
    await form.get_by_label("Run id").fill(run)
    await button(form, "Start the run").click()
    await expect(page.get_by_role("heading", name=run)).to_be_visible()
    card = page.locator("article.is-approval")
    await expect(card.locator("pre.json")).to_contain_text('"title": "VPN is down in the Berlin')
    (asked,) = (await stage.fleet.get(run)).outcome.pending  # type: ignore[union-attr]
    await expect(card).to_contain_text(asked.marker)
    await expect(card).to_contain_text("create_ticket is a write and asks for approval")

    await button(card, "Approve…").click()
    assert len(stage.filed) == filed and not await signals(stage, run)
    await button(card, "Approve: run create_ticket").click()
    await expect(card.locator(".receipt")).to_contain_text("Approval recorded: record 10")
    await expect(page.locator(".run-head .badge")).to_have_text("completed")
    await expect(page.locator(".answer-box")).to_contain_text("I filed a ticket")
    await expect(page.locator(".timeline")).to_contain_text("approve by dev")
    assert len(stage.filed) == filed + 1
    (said,) = await signals(stage, run)
    assert said.request_id.startswith("page:")
    assert await ordinals(page) == list(range(1, len(await stage.records(run)) + 1))


async def test_a_rejection_tells_the_model_the_reason(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    filed = len(stage.filed)
    await tab.go("inbox")
    card = card_of(page, run)
    await button(card, "Reject…").click()
    await card.get_by_label("Reason (the model is told)").fill("the VPN is up again")
    await button(card, "Reject: do not run create_ticket").click()
    await expect(card.locator(".receipt")).to_contain_text("Rejection recorded")
    await stage.until(run, "completed")
    results = [one for one in await stage.records(run) if isinstance(one, StepCompleted)]
    assert any("the VPN is up again" in str(one.error) for one in results)
    assert len(stage.filed) == filed
    await tab.go(f"runs/{run}")
    await expect(page.locator(".timeline .is-reject")).to_contain_text("the VPN is up again")
    await expect(page.locator(".timeline")).to_contain_text("not called")


async def test_unknown_writes_are_settled_as_done_and_by_a_retry(
    stage: kit.Stage, tab: kit.Tab, tmp_path: Path
):
    crew = Crew(stage.url, stage.namespace, tmp_path, stage.store)
    done, retried = new_id("done"), new_id("retry")
    try:
        crew.hold("write")
        first = await crew.worker("writer")
        for run in (done, retried):
            await crew.start("writer", run)
        await eventually(lambda: crew.reached("write") == 2, 15)
        second = crew.begin_worker("writer")
        await first.kill()
        await second.ready()
        for run in (done, retried):
            await stage.until(run, "indeterminate")
        crew.let_go("write")

        page = tab.page
        await tab.go("inbox")
        card = card_of(page, done)
        await expect(card).to_contain_text("It may or may not have happened")
        await button(card, "It happened…").click()
        await card.locator("textarea").fill('{"ticket": TICKET-7}')
        await button(card, "It happened: record this result").click()
        await expect(card.locator(".field-problem")).to_contain_text("This is not JSON")
        await card.locator("textarea").fill('{"ticket": "TICKET-7", "big": 9007199254740993}')
        await button(card, "It happened: record this result").click()
        await expect(card.locator(".receipt")).to_contain_text("Decision recorded")

        card = card_of(page, retried)
        await button(card, "It did not happen…").click()
        await expect(card).to_contain_text("It waits until")
        await button(card, "It did NOT happen: run it again").click()  # not without a check
        await expect(card.locator(":invalid").last).to_be_focused()
        await card.get_by_label("I have checked: it did NOT happen.").check()
        assert not await signals(stage, retried)
        await button(card, "It did NOT happen: run it again").click()
        await expect(card.locator(".receipt")).to_contain_text("Decision recorded")
        ended = await stage.until(done, "completed")
        told: Any = ended.outcome
        assert told.message.content == {"ticket": "TICKET-7", "big": 9007199254740993}
        waits = await stage.until(retried, "waiting")
        await tab.go(f"runs/{retried}")
        await expect(page.locator("main")).to_contain_text("may still be running")
        assert waits.waiting_on[0].until is not None
        await second.kill()  # for one by whose clock the deadline has passed
        await crew.worker("writer", skew_s=400)
        await stage.fleet.signal(retried, "resume", {})
        await stage.until(retried, "completed")
        assert (len(crew.effects(done)), len(crew.effects(retried))) == (0, 1)
        await expect(page.locator(".timeline .is-reconcile")).to_contain_text("retry")
        assert await ordinals(page) == list(range(1, len(await stage.records(retried)) + 1))
    finally:
        await crew.end()


async def test_a_pause_is_resumed_and_a_run_is_cancelled(stage: kit.Stage, tab: kit.Tab):
    page, paused, ended = tab.page, new_id("paused"), await asking(stage)
    await stage.fleet.start("pauser", None, run_id=paused)
    await stage.until(paused, "paused")
    await tab.go("inbox")
    card = card_of(page, paused)
    await expect(card).to_contain_text("the quota is used up: ask for more")
    await button(card, "Resume…").click()
    await button(card, f"Resume {paused}").click()
    await expect(card.locator(".receipt")).to_contain_text("Resume recorded")
    await stage.until(paused, "completed")

    await tab.go(f"runs/{ended}")
    await button(page, "Cancel the run…").click()
    await page.keyboard.press("Escape")
    await expect(button(page, "Cancel the run…")).to_be_focused()
    await page.keyboard.press("Enter")
    await page.get_by_label("Reason (optional)").fill("not needed")
    await button(page, f"Cancel {ended} for good").click()
    await expect(page.locator(".run-head .badge")).to_have_text("cancelled")
    await expect(page.locator(".run-head")).to_contain_text("not needed")


async def test_who_comes_second_is_told_who_won(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, new_id("second")
    await stage.fleet.start("hostile", None, run_id=run)
    await stage.until(run, "awaiting_approval")
    deaf = asyncio.Event()

    async def until_deaf(route: Route) -> None:
        answer = None if deaf.is_set() else await route.fetch()
        if answer is None or deaf.is_set():
            await route.abort()
        else:
            await route.fulfill(response=answer)

    await page.route(f"**/runs/{run}", until_deaf)
    await tab.go(f"runs/{run}")
    card = page.locator("article.is-approval")
    await button(card, "Reject…").click()
    (asked,) = (await stage.fleet.get(run)).outcome.pending  # type: ignore[union-attr]
    deaf.set()  # an answer that is on its way does not tell it either
    first = await stage.fleet.signal(run, "approve", {"marker": asked.marker})
    await button(card, "Reject: do not run wire").click()
    await expect(card.locator(".problem")).to_contain_text("approve by somebody")
    await expect(card.locator(".problem")).to_contain_text(f"Record {first.n} stands")
    await expect(card.get_by_role("button")).to_have_count(0)
    await expect(page.locator("#lost")).to_be_visible()


async def test_a_repeat_after_a_lost_answer_is_the_same_request(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    sent: list[Any] = []

    async def lose(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        if len(sent) == 1:
            await route.fetch()
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/signals/approve", lose)
    await tab.go("inbox")
    card = card_of(page, run)
    await button(card, "Approve…").click()
    await card.get_by_label("Comment").fill("checked")
    sure = button(card, "Approve: run create_ticket")
    await sure.click()
    await expect(card.locator(".problem")).to_contain_text("may or may not have been recorded")
    await sure.click()
    await expect(card.locator(".receipt")).to_contain_text("decided before, in record 10")
    assert sent[0] == sent[1] and sent[0]["request_id"].startswith("page:")
    assert len(await signals(stage, run)) == 1


async def test_a_start_whose_answer_was_lost_starts_one_run(stage: kit.Stage, tab: kit.Tab):
    page, sent = tab.page, []

    async def lose(route: Route) -> None:
        if route.request.method != "POST":
            await route.continue_()
            return
        sent.append(json.loads(route.request.post_data or ""))
        answer = await route.fetch()
        await (route.abort() if len(sent) == 1 else route.fulfill(response=answer))

    await page.route("**/runs", lose)
    await tab.go("runs")
    await button(page, "New run").click()
    form = page.get_by_role("form", name="New run")
    await form.get_by_label("Agent").fill("ticker")
    await form.get_by_label("Input", exact=True).fill('{"big": 9007199254740993}')
    await form.get_by_label("the input is JSON").check()
    await button(form, "Start the run").click()
    await expect(form.locator(".problem")).to_contain_text("counts once")
    await button(form, "Start the run").click()
    await expect(page.get_by_role("heading", name=sent[0]["run"])).to_be_visible()
    assert sent[0] == sent[1]
    (started, *_) = await stage.records(sent[0]["run"])
    assert started.input == {"big": 9007199254740993}  # type: ignore[attr-defined]


# ---- following ----------------------------------------------------------------------------------


async def test_records_appear_and_none_is_missed_while_the_bridge_is_away(
    stage: kit.Stage, tab: kit.Tab
):
    page, run = tab.page, new_id("ticker")
    await stage.fleet.start("ticker", None, run_id=run)
    await stage.until(run, "waiting")
    await tab.go(f"runs/{run}")
    await expect(page.locator(".live")).to_have_text("live")
    await stage.fleet.send(run, "one")
    await expect(page.locator(".timeline .is-tool")).to_have_count(1)

    await stage.close_bridge()
    await expect(page.locator("#lost")).to_contain_text("Connection lost")
    for word in ("two", "three"):
        await stage.fleet.send(run, word)
    await stage.until(run, "waiting")
    await stage.open_bridge()
    await expect(page.locator(".timeline .is-tool")).to_have_count(3)
    await expect(page.locator("#lost")).to_be_hidden()
    await stage.fleet.send(run, "end")
    await expect(page.locator(".run-head .badge")).to_have_text("completed")
    await expect(page.locator(".timeline .is-good")).to_have_count(1)
    assert await ordinals(page) == list(range(1, len(await stage.records(run)) + 1))


async def test_a_hidden_tab_holds_no_connection_and_misses_nothing(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, new_id("hidden")
    hide = """hidden => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await stage.fleet.start("ticker", None, run_id=run)
    await tab.go(f"runs/{run}")
    await expect(page.locator(".live")).to_have_text("live")
    async with page.expect_event("requestfailed", lambda one: "follow=1" in one.url):
        await page.evaluate(hide, True)
    await stage.fleet.send(run, "one")
    await stage.until(run, "waiting")
    await expect(page.locator(".timeline .is-tool")).to_have_count(0)
    await page.evaluate(hide, False)
    await expect(page.locator(".timeline .is-tool")).to_have_count(1)
    await stage.fleet.send(run, "end")
    await expect(page.locator(".timeline .is-good")).to_have_count(1)
    assert await ordinals(page) == list(range(1, len(await stage.records(run)) + 1))


async def test_inputs_are_sent_and_withdrawn(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    await tab.go(f"runs/{run}")
    box = page.get_by_label("Message to the agent")
    for mode, text in (("steer", "ask Berlin first"), ("follow_up", "and tell me")):
        await box.fill(text)
        await page.get_by_label("When").select_option(mode)
        await button(page, "Send").click()
        await expect(page.locator(".inputs")).to_contain_text(text)
        await expect(box).to_have_value("")
    first = page.locator(".inputs li", has_text="ask Berlin first")
    await button(first, "Withdraw").click()
    await expect(first.locator(".badge")).to_have_text("withdrawn")
    second = page.locator(".inputs li", has_text="and tell me")
    await expect(second.locator(".badge")).to_have_text("queued")
    await expect(page.locator(".timeline")).to_contain_text("input withdrawn")
    await stage.fleet.cancel(run)
    await expect(second.locator(".badge")).to_have_text("unanswered")


async def test_a_stream_that_repeats_and_skips_records_is_asked_again(
    stage: kit.Stage, tab: kit.Tab
):
    page, run = tab.page, await asking(stage)
    stored = [entry.raw.decode() for entry in (await stage.store.load(run)).entries]  # type: ignore[arg-type]
    asked: list[str | None] = []

    async def repeat_and_skip(route: Route) -> None:
        asked.append(await route.request.header_value("last-event-id"))
        if len(asked) > 1:
            await route.continue_()
            return
        body = "".join(
            f"id: {n}\nevent: record\ndata: {stored[n - 1]}\n\n" for n in (1, 2, 2, 1, 3, 6)
        )
        await route.fulfill(body=body, content_type="text/event-stream")

    await page.route("**/journal?follow=1", repeat_and_skip)
    await tab.go(f"runs/{run}")
    await expect(page.locator(".timeline > li")).to_have_count(6)
    assert await ordinals(page) == list(range(1, 10))
    assert asked == [None, "3"]


async def test_what_the_model_says_is_shown_while_it_says_it(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, new_id("speaker")
    await stage.fleet.start("ticker", None, run_id=run)
    await tab.go(f"runs/{run}")
    await expect(page.locator(".live")).to_have_text("live")
    said = f"I am thinking. {kit.HOSTILE}"

    async def heard() -> bool:
        await stage.store.preview(run, said)  # type: ignore[arg-type]
        return await page.locator(".preview").is_visible()

    await eventually(heard)
    await expect(page.locator(".preview")).to_contain_text(visible(said))
    await stage.fleet.send(run, "end")
    await expect(page.locator(".preview")).to_be_hidden()


async def test_events_are_read_however_they_are_cut(tab: kit.Tab):
    stream = 'id: 7\r\nevent: record\ndata: {"n":\rdata: 7}\r\n\r\n: here\n\ndata:x\n\n'
    await tab.go("inbox")
    found = await tab.page.evaluate(
        """async (stream) => {
          const { eventParser } = await import("/web/follow.js");
          const all = [];
          for (let cut = 0; cut <= stream.length; cut++) {
            const events = [];
            const feed = eventParser((event) => events.push(event));
            feed(stream.slice(0, cut));
            feed(stream.slice(cut));
            all.push(JSON.stringify(events));
          }
          return [...new Set(all)];
        }""",
        stream,
    )
    assert [json.loads(one) for one in found] == [
        [
            {"event": "record", "id": "7", "data": '{"n":\n7}'},
            {"event": "message", "data": "x"},
        ]
    ]


async def test_a_long_run_shows_its_last_records_and_then_earlier_ones(
    stage: kit.Stage, tab: kit.Tab
):
    """The window is made small: what counts is that no record is missing or there twice."""
    page, run = tab.page, new_id("long")
    await stage.fleet.start("ticker", None, run_id=run)
    for n in range(12):
        await stage.fleet.send(run, n)
    await stage.fleet.send(run, "end")
    await stage.until(run, "completed")
    count = len(await stage.records(run))

    async def smaller(route: Route) -> None:
        answer = await route.fetch()
        text = (await answer.text()).replace("WINDOW = 1000", "WINDOW = 10")
        await route.fulfill(response=answer, body=text.replace("EARLIER = 500", "EARLIER = 20"))

    await page.route("**/web/run.js", smaller)
    await tab.go(f"runs/{run}")
    await expect(page.locator(".timeline .is-good")).to_have_count(1)
    assert await ordinals(page) == list(range(count - 9, count + 1))
    earlier = button(page, "Earlier records")
    while (first := (await ordinals(page))[0]) > 1:
        await earlier.click()
        await page.wait_for_function(
            "before => parseInt(document.querySelector('.timeline > li').dataset.n) < before",
            arg=first,
        )
        shown = await ordinals(page)
        assert shown == list(range(shown[0], count + 1))
    await expect(earlier).to_be_hidden()


# ---- what is hostile ----------------------------------------------------------------------------


async def test_hostile_text_is_shown_whole_and_does_nothing(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, new_id("hostile")
    shown = visible(kit.HOSTILE)
    in_json = visible(json.dumps(kit.HOSTILE, ensure_ascii=False))
    await stage.fleet.start("hostile", [kit.HOSTILE, kit.LONG_LINE], run_id=run)
    await stage.until(run, "awaiting_approval")
    async with stage.store.reporting(
        lambda _: json.dumps({"worker": kit.HOSTILE, "host": kit.HOSTILE, "error": "?"}).encode()
    ):
        await tab.go("workers")
        await expect(page.locator("main")).to_contain_text(shown)

    await tab.go("inbox")
    card = card_of(page, run)
    await expect(card.locator("blockquote")).to_have_text(shown)
    block = (await card.locator("pre.json").text_content()) or ""
    assert f'"note": {in_json}' in block
    assert kit.LONG_LINE in block
    for line in ('"2": "b"', '"1": "a"', '"ratio": 1.0', '"__proto__": null'):
        assert line in block, block[:2000]
    assert '"amount": 12345678901234567890' in block
    assert block.index('"2": "b"') < block.index('"1": "a"')
    await button(card, "Reject…").click()
    await card.get_by_label("Reason").fill(f"no {kit.HOSTILE}".replace("\x00", ""))
    await button(card, "Reject: do not run wire").click()
    await expect(card.locator(".receipt")).to_be_visible()

    await tab.go(f"runs/{run}")
    await expect(page.locator(".answer-box")).to_contain_text(shown)
    timeline = page.locator(".timeline")
    await expect(timeline.locator(".is-good")).to_be_visible()
    for summary in await timeline.locator("summary").all():
        await summary.click()
    await expect(timeline.locator(".is-reject")).to_contain_text(visible("</script><script>"))
    await expect(timeline.locator("pre.json").first).to_contain_text(in_json)
    unsafe = await page.evaluate(
        "/[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u200b-\\u200f\\u202a-\\u202e\\ufeff]/"
        ".test(document.documentElement.textContent)"
    )
    assert not unsafe
    assert await page.evaluate("document.querySelectorAll('main :is(img, script)').length") == 0
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await tab.go("runs")
    await expect(page.locator("table")).to_contain_text(run)
    answer = await page.reload()
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy


async def test_refused_signals_are_shown_and_harmless(stage: kit.Stage, tab: kit.Tab):
    what = dict.fromkeys(("subject", "code", "reason", "payload", "by"), kit.HOSTILE)
    refused = Refusal(at="2026-11-29T23:00:00.000Z", run=None, name=None, **what)
    await stage.store.rejected.put(refused, "key")
    await tab.go("rejected")
    card = tab.page.locator("article")
    await expect(card.locator("pre")).to_have_text(visible(kit.HOSTILE))
    await expect(card.locator("blockquote")).to_have_text(visible(kit.HOSTILE))
    assert await tab.page.evaluate("document.querySelectorAll('main :is(img, script)').length") == 0


async def test_a_damaged_journal_is_shown_as_far_as_it_goes(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    subject = f"{stage.namespace}.journal.0.{run}"
    await raw_client.ask(stage.url, subject, b'{"v": 1, "n": 10, "type": "claim"}')
    await tab.go("inbox")
    await card_of(page, run).get_by_role("link", name=run).click()
    await expect(page.locator(".run-head .badge")).to_have_text("damaged")
    await expect(page.locator(".records .problem")).to_contain_text(f"run {run}")
    assert await ordinals(page) == list(range(1, 10))
    await expect(page.locator("main").get_by_role("button")).to_have_count(0)
    await raw_client.ask(  # or the rest of this module has it in every inbox
        stage.url, f"$JS.API.STREAM.PURGE.{stage.namespace.upper()}_JOURNAL_0", {"filter": subject}
    )


async def test_records_of_a_newer_version_are_shown_as_they_stand(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    records = [
        {"v": 1, "n": 1, "type": "constructor", "what": kit.HOSTILE},
        {"v": 2, "n": 2, "type": "claim", "worker": {"new": "shape"}},
        {"v": 1, "n": 3, "type": "signal", "payload": None},
        {"v": 1, "n": 4, "type": "run.completed", "message": {"content": ["a", 1]}},
    ]
    body = "".join(f"id: {one['n']}\nevent: record\ndata: {json.dumps(one)}\n\n" for one in records)
    body += 'event: end\ndata: {"status": "completed"}\n\n'
    await page.route(
        "**/journal?follow=1",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    await tab.go(f"runs/{run}")
    await expect(page.locator(".timeline .is-newer")).to_have_count(3)
    assert await ordinals(page) == [1, 2, 3, 4]
    await page.locator(".is-newer summary").first.click()
    await expect(page.locator(".is-newer pre").first).to_contain_text(
        visible(json.dumps(kit.HOSTILE, ensure_ascii=False))
    )


async def test_the_page_makes_visible_what_the_terminal_does(tab: kit.Tab):
    await tab.go("inbox")
    found = await tab.page.evaluate(
        """async () => {
          const { visible } = await import("/web/text.js");
          const found = [];
          for (let code = 0; code < 0x110000; code++) {
            if (code >= 0xd800 && code < 0xe000) continue;
            const char = String.fromCodePoint(code);
            const shown = visible(char);
            if (shown !== char) found.push([code, shown]);
          }
          return found;
        }"""
    )
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    assert dict(found) == {
        code: visible(chr(code)) for code in codes if visible(chr(code)) != chr(code)
    }


async def test_nothing_in_the_page_s_source_takes_markup():
    """The rule that keeps hostile text harmless, held by every line of it."""
    sources = {path.name: path.read_text() for path in (ROOT / "bridge" / "web").glob("*.js")}
    assert "app.js" in sources
    for name, text in sources.items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "srcdoc",
        ):
            assert word not in text, f"{name}: {word}"
        assert '"style"' not in text and ".style" not in text, name
    page = (ROOT / "bridge" / "web" / "index.html").read_text()
    assert "style=" not in page and "<style" not in page and "<script>" not in page


# ---- who uses it --------------------------------------------------------------------------------


async def test_an_approval_needs_no_mouse(stage: kit.Stage, tab: kit.Tab):
    page, run = tab.page, await asking(stage)
    await tab.go("inbox")
    card = card_of(page, run)
    await expect(card).to_be_visible()
    press = page.keyboard.press
    for _ in range(await page.locator("[data-nav]").count()):
        await press("j")
        if await card.evaluate("card => card === document.activeElement"):
            break
    await expect(card).to_be_focused()
    await press("a")
    await expect(card.get_by_label("Comment")).to_be_focused()
    await press("Escape")
    await expect(button(card, "Approve…")).to_be_focused()
    assert not await signals(stage, run)
    await press("Tab")
    await expect(button(card, "Reject…")).to_be_focused()
    await press("Shift+Tab")
    for _ in range(3):  # a key that is held down opens the form, and no more
        await page.keyboard.down("Enter")
    await page.keyboard.up("Enter")
    await page.keyboard.type("all keys: j k a r")
    await press("Tab")
    sure = button(card, "Approve: run create_ticket")
    await expect(sure).to_be_focused()
    assert await sure.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    await press("Enter")
    await expect(card.locator(".receipt")).to_be_visible()
    await expect(card).to_be_focused()
    await stage.until(run, "completed")
    (said,) = await signals(stage, run)
    assert said.payload["comment"] == "all keys: j k a r"


CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !node.checkVisibility() || node.disabled) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.className} ${node.textContent.slice(0, 40)} ${ratio}`);
  }
  for (const node of document.querySelectorAll("input, textarea, select")) {
    if (!node.labels.length) bad.push(`no label: ${node.outerHTML}`);
  }
  return bad;
}"""


async def test_all_text_has_contrast_and_all_fields_have_labels(stage: kit.Stage, tab: kit.Tab):
    run, ended, unknown = await asking(stage), new_id("ended"), new_id("unknown")
    await stage.fleet.start("hostile", None, run_id=ended)
    await stage.fleet.start("billing", None, run_id=unknown)
    await stage.until(unknown, "indeterminate")
    await stage.fleet.cancel(ended)
    await stage.until(ended, "cancelled")
    page = tab.page

    async def looked_at() -> None:
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert not await page.evaluate(CONTRAST), scheme

    await tab.go("inbox")
    await button(card_of(page, run), "Reject…").click()
    await button(card_of(page, unknown), "It happened…").click()
    await looked_at()
    for route in ("runs", f"runs/{run}", f"runs/{ended}", f"runs/{unknown}", "workers"):
        await tab.go(route)
        await expect(page.locator("main .badge").first).to_be_visible()
        await looked_at()


async def test_a_card_goes_when_somebody_else_decides(stage: kit.Stage, tab: kit.Tab):
    page, looked_at, other = tab.page, await asking(stage), await asking(stage)
    await tab.go("inbox")
    card = card_of(page, looked_at)
    await button(card, "Approve…").click()
    await expect(card_of(page, other)).to_be_visible()
    for run in (looked_at, other):
        await stage.fleet.cancel(run)
    await expect(card_of(page, other)).to_have_count(0)
    await expect(card.locator(".problem")).to_contain_text("no longer waits")
    await expect(button(card, "Approve: run create_ticket")).to_be_disabled()


async def test_a_phone_needs_no_sideways_scrolling(stage: kit.Stage, browser: Browser):
    run = await asking(stage)
    await stage.fleet.start("hostile", kit.LONG_LINE, run_id=new_id("wide"))
    async with kit.tab_in(browser, stage, width=360, height=740, has_touch=True) as tab:
        page = tab.page

        async def fits() -> None:
            wide = await page.evaluate(
                "[document.documentElement.scrollWidth, ...[...document.querySelectorAll('main *')]"
                ".map(e => Math.ceil(e.getBoundingClientRect().right))].filter(x => x > 360)"
            )
            assert not wide

        for route, there in (
            ("runs", page.get_by_role("link", name=run)),
            ("workers", page.locator("article").first),
            ("inbox", card_of(page, run)),
            (f"runs/{run}", page.locator(".timeline > li").nth(5)),
        ):
            await tab.go(route)
            await expect(there).to_be_visible()
            await fits()
        card = page.locator("article.is-approval")
        for name in ("Approve…", "Approve: run create_ticket"):
            place = await button(card, name).bounding_box()
            assert place is not None and place["height"] >= 40
            await button(card, name).tap()
        await expect(page.locator(".run-head .badge")).to_have_text("completed")
        await fits()


async def test_an_inbox_of_which_more_is_waiting_says_so_and_shows_it(
    stage: kit.Stage, tab: kit.Tab
):
    """The page asks for a hundred; here each hundred is one."""
    page = tab.page
    runs = sorted([await asking(stage) for _ in range(2)])
    waiting = len(await stage.fleet.inbox())

    async def fewer(route: Route) -> None:
        limit = int(route.request.url.rpartition("limit=")[2])
        url = route.request.url.replace(f"limit={limit}", f"limit={max(1, limit // 100)}")
        await route.continue_(url=url)

    await page.route("**/inbox?limit=*", fewer)
    await tab.go("inbox")
    await expect(page.locator("article.card")).to_have_count(1)
    await expect(page.locator("main")).to_contain_text("These are the first 1, by run. More")
    await expect(page.locator("#waiting")).to_contain_text("1+ waiting")
    await expect(page).to_have_title("(1+) Runfold")
    await button(page, "Show more").click()
    await expect(page.locator("article.card")).to_have_count(2)
    for _ in range(3):
        if waiting > 2:
            await button(page, "Show more").click()
    await page.unroute("**/inbox?limit=*")
    for run in runs:
        await expect(card_of(page, run)).to_be_visible()
    await expect(page.locator("main")).not_to_contain_text("More are waiting")
    await expect(button(page, "Show more")).to_be_hidden()
    await expect(page.locator("#waiting")).to_contain_text(f"{waiting} waiting")


async def test_the_runs_are_filtered_and_paged(stage: kit.Stage, tab: kit.Tab):
    page = tab.page
    for n in range(53):
        await stage.fleet.start("nobody", n, run_id=f"many-{n:02}")
    await tab.go("runs?agent=nobody")
    await expect(page.locator("tbody tr")).to_have_count(50)
    await button(page, "More runs").click()
    await expect(page.locator("tbody tr")).to_have_count(53)
    await expect(button(page, "More runs")).to_be_hidden()
    await page.get_by_label("Status").select_option("completed")
    await expect(page.locator("main")).to_contain_text("No runs here.")
    await page.get_by_label("Status").select_option("")
    await page.get_by_role("searchbox", name="Agent").fill("helpdesk")
    await page.keyboard.press("Enter")
    await expect(page.locator("tbody tr").first).to_contain_text("helpdesk")
    await expect(page.locator("tbody")).not_to_contain_text("nobody")


async def test_a_token_is_asked_for_kept_and_forgotten(stage: kit.Stage, browser: Browser):
    run = await asking(stage)
    await stage.close_bridge()
    await stage.open_bridge(kit.tokens(alice="signal", bob="read", carol="work"))
    try:
        async with kit.tab_in(browser, stage) as tab:
            page = tab.page
            await tab.go(f"runs/{run}")
            for wrong, said in (
                ("wrong", "does not know this token"),
                ("ünicode", "not a token"),
                ("token-of-carol", "may not look at runs"),
            ):
                await page.get_by_label("Token").fill(wrong)
                await button(page, "Sign in").click()
                await expect(page.locator(".problem")).to_contain_text(said)
            await page.get_by_label("Token").fill("token-of-bob")
            await page.keyboard.press("Enter")
            card = page.locator("article.is-approval")
            await button(card, "Approve…").click()
            await button(card, "Approve: run create_ticket").click()
            await expect(card.locator(".problem")).to_contain_text("has not the scope signal")
            await button(page, "Sign out").click()
            await page.get_by_label("Token").fill("token-of-alice")
            await page.keyboard.press("Enter")
            await page.reload()
            await button(card, "Approve…").click()
            await button(card, "Approve: run create_ticket").click()
            await expect(page.locator(".timeline .is-approve")).to_contain_text("by alice")
            await button(page, "Sign out").click()
            await expect(page.get_by_label("Token")).to_be_focused()
            assert await page.evaluate("sessionStorage.length + localStorage.length") == 0
    finally:
        await stage.close_bridge()
        await stage.open_bridge()
