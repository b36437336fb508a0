// #/workers and #/rejected: who works, and which signals were refused.

import { badge, code, el, fill, label, lines, problemBox, runLink, strong, time } from "./text.js";
import { get } from "./api.js";
import { poll } from "./live.js";
import { problemText } from "./decide.js";

const REFRESH_MS = 5000;

export function workersView(root, params, signal) {
  listView(root, signal, {
    title: "Workers",
    lead: "Who is connected and takes runs.",
    path: "/workers",
    items: (found) => found.workers,
    none: "No worker is connected: runs wait until one is.",
    show: worker,
  });
}

export function rejectedView(root, params, signal) {
  listView(root, signal, {
    title: "Rejected signals",
    lead: "What was refused, newest first. Nothing of it was applied.",
    path: "/rejected?limit=100",
    items: (found) => found.rejected,
    none: "No signal was refused.",
    show: rejected,
  });
}

function listView(root, signal, { title, lead, path, items, none, show }) {
  const state = el("p", { class: "empty" }, "Loading…");
  const list = el("div", { class: "cards" });
  fill(root, el("h1", { tabindex: "-1" }, title), el("p", { class: "lead" }, lead), state, list);
  let before = "";
  async function load() {
    const found = items(await get(path, signal));
    const now = JSON.stringify(found);
    if (now === before) return;
    before = now;
    fill(list, found.map(show));
    fill(state, none);
    state.hidden = found.length > 0;
  }
  poll(path, REFRESH_MS, signal, load, (problem) => fill(state, problemText(problem)));
}

function worker(one) {
  const active = one.active ?? [];
  return el(
    "article",
    { class: "card", tabindex: "-1", "data-nav": true },
    el(
      "header",
      { class: "card-head" },
      el("h3", {}, code(one.worker ?? "?")),
      one.draining ? badge("paused", "draining") : badge("completed", "working"),
    ),
    one.error ? problemBox(one.error) : null,
    el(
      "p",
      { class: "facts" },
      one.host ? el("span", {}, `${one.host}, process ${one.pid}`) : null,
      el("span", {}, `${active.length} of ${one.concurrency ?? "?"} runs`),
    ),
    el("p", { class: "facts" }, (one.agents ?? []).map((agent) => agentName(agent))),
    active.length ? el("ul", { class: "plain-list" }, active.map(activeRun)) : null,
  );
}

function agentName(agent) {
  const revision = agent.revision ? [" revision ", code(agent.revision)] : null;
  return el("span", {}, strong(agent.name), revision);
}

function activeRun({ run, agent, claim }) {
  return el("li", {}, el("a", { href: runLink(run) }, run), ` ${agent}, claim ${claim}`);
}

function rejected(one) {
  const run = one.run ? el("a", { href: runLink(one.run) }, one.run) : null;
  const title = el("h3", {}, one.name || "signal");
  return el(
    "article",
    { class: "card", tabindex: "-1", "data-nav": true },
    el("header", { class: "card-head" }, title, badge("failed", one.code)),
    el("p", { class: "facts" }, time(one.at), run, one.by ? `by ${one.by}` : null),
    el("blockquote", { class: "said" }, lines(one.reason ?? "")),
    label("Subject"),
    el("p", {}, code(one.subject ?? "")),
    label("Payload"),
    el("pre", { class: "json" }, lines(one.payload ?? "")),
  );
}
