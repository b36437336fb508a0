// #/runs: all runs, by status and agent, page by page; and a form that starts one.

import { badge, cut, el, fill, problemBox, put, runLink, time, words } from "./text.js";
import { check, checked, field, problemText, text } from "./decide.js";
import { get, send } from "./api.js";
import { compact } from "./json.js";
import { poll } from "./live.js";

const REFRESH_MS = 5000;
const PAGE = 50;
const STATUSES = [
  "running",
  "awaiting_approval",
  "indeterminate",
  "waiting",
  "paused",
  "completed",
  "failed",
  "cancelled",
  "damaged",
  "newer",
];

export function runsView(root, params, signal) {
  const rows = el("tbody");
  const state = el("p", { class: "empty" }, "Loading…");
  const more = el("button", { type: "button", hidden: true }, "More runs");
  const start = startForm();
  const look = { type: "button", class: "main", "aria-expanded": "false" };
  const opener = el("button", look, "New run");
  opener.addEventListener("click", () => {
    start.hidden = !start.hidden;
    opener.setAttribute("aria-expanded", String(!start.hidden));
    if (!start.hidden) start.querySelector("input").focus();
  });
  fill(
    root,
    el("div", { class: "title-row" }, el("h1", { tabindex: "-1" }, "Runs"), opener),
    start,
    filterForm(params),
    el("table", { class: "runs" }, tableHead("Status", "Run", "Agent", "Waits for, or end"), rows),
    state,
    more,
  );

  let pages = 1;
  poll("runs", REFRESH_MS, signal, load, (problem) => fill(state, problemText(problem)));
  const next = moreButton(more, () => get(pagePath(params, next.after), signal), (runs) => {
    pages += 1;
    put(rows, runs.map(row));
  });

  async function load() {
    if (pages > 1) return; // what a person has paged to stays as it is
    const found = await get(pagePath(params), signal);
    if (pages > 1) return;
    keepFocus(rows, () => fill(rows, found.runs.map(row)));
    next.set(found.next);
    state.hidden = found.runs.length > 0;
    fill(state, "No runs here.");
  }
}

/** A button that asks for what follows; `set(after)` says what that is, null: nothing. */
function moreButton(button, ask, show) {
  const next = {
    after: null,
    set(after) {
      next.after = after;
      button.hidden = after === null || after === undefined;
    },
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const found = await ask();
      show(found.runs);
      next.set(found.next);
    } catch (error) {
      fill(button, `${problemText(error)} Try again`);
    }
    button.disabled = false;
  });
  return next;
}

function pagePath(params, after) {
  const query = new URLSearchParams({ limit: String(PAGE) });
  for (const name of ["status", "agent"]) if (params.get(name)) query.set(name, params.get(name));
  if (after) query.set("after", after);
  return `/runs?${query}`;
}

/** New rows for old ones: a link that had the focus has it again. */
function keepFocus(rows, change) {
  const active = document.activeElement;
  const focused = rows.contains(active) ? active.getAttribute("href") : null;
  change();
  if (focused === null) return;
  const links = [...rows.querySelectorAll("a")];
  const again = links.find((link) => link.getAttribute("href") === focused);
  again?.focus({ preventScroll: true });
}

function tableHead(...names) {
  return el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));
}

function row(run) {
  return el(
    "tr",
    {},
    el("td", {}, badge(run.status)),
    el("td", {}, el("a", { href: runLink(run.run), "data-nav": true, class: "id" }, run.run)),
    el("td", {}, run.agent ?? ""),
    el("td", { class: "muted" }, waitsFor(run)),
  );
}

function waitsFor(run) {
  if (run.reason) return run.detail ? cut(`${run.reason}: ${run.detail}`, 120) : run.reason;
  const waits = run.waiting_on ?? [];
  if (!waits.length) return run.message === null ? "" : cut(said(run.message), 120);
  const what = [...new Set(waits.map((wait) => words(wait.what)))].join(", ");
  return [what, waits[0].since ? [" since ", time(waits[0].since)] : null];
}

const said = (message) => (typeof message === "string" ? message : compact(message));

function filterForm(params) {
  const status = el("select", {}, el("option", { value: "" }, "any status"));
  put(status, STATUSES.map((word) => el("option", { value: word }, words(word))));
  status.value = STATUSES.includes(params.get("status")) ? params.get("status") : "";
  const agent = el("input", { type: "search", placeholder: "any agent" });
  agent.value = params.get("agent") ?? "";
  const show = el("button", { type: "submit" }, "Show");
  const fields = [field("Status", status), field("Agent", agent)];
  const form = el("form", { class: "filter" }, fields, show);
  const go = (event) => {
    event.preventDefault();
    const query = new URLSearchParams();
    if (status.value) query.set("status", status.value);
    if (agent.value.trim()) query.set("agent", agent.value.trim());
    location.hash = `#/runs${query.size ? `?${query}` : ""}`;
  };
  form.addEventListener("submit", go);
  status.addEventListener("change", go);
  return form;
}

function startForm() {
  const line = { type: "text", autocomplete: "off" };
  const agent = field("Agent", el("input", { ...line, required: true, maxlength: "64" }));
  const input = field("Input", el("textarea", { rows: "3" }));
  const id = field("Run id (optional)", el("input", { ...line, maxlength: "128" }));
  const asJson = el("input", { type: "checkbox" });
  const problem = el("div", { class: "message", role: "alert" });
  const go = el("button", { type: "submit", class: "main" }, "Start the run");
  const form = el(
    "form",
    { class: "card", hidden: true, "aria-label": "New run" },
    agent,
    input,
    check(asJson, "the input is JSON, not text"),
    id,
    problem,
    el("div", { class: "actions" }, go),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const said = asJson.checked ? checked(input.input, problem) : text(input.input.value);
    if (said === null) return;
    go.disabled = true;
    const members = { agent: text(agent.input.value.trim()), input: said };
    if (id.input.value.trim()) members.run = text(id.input.value.trim());
    try {
      const { run } = await send("POST", "/runs", members, "run");
      location.hash = runLink(run);
    } catch (error) {
      fill(problem, problemBox(problemText(error)));
    }
    go.disabled = false;
  });
  return form;
}
