// The page: which view is shown, the token, the keys.

import { code, el, fill, problemBox } from "./text.js";
import { token } from "./api.js";
import { getInbox, inboxView, showWaiting } from "./inbox.js";
import { rejectedView, workersView } from "./lists.js";
import { field, problemText } from "./decide.js";
import { poll } from "./live.js";
import { runsView } from "./runs.js";
import { runView } from "./run.js";

const COUNT_MS = 10_000;
const NOTHING = { items: [], next: null };
const VIEWS = { inbox: inboxView, runs: runsView, workers: workersView, rejected: rejectedView };

const main = document.getElementById("main");
const signOut = document.getElementById("sign-out");
let view = new AbortController(); // ends what the view on show does

/** `#/runs/order-7?x=y` -> ["runs", "order-7", the query]. */
function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...rest] = path.split("/");
  return [name, decoded(rest.join("/")), new URLSearchParams(query)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a hash that somebody typed
  }
}

function show({ focus = true } = {}) {
  const [name, id, params] = route();
  if (!Object.hasOwn(VIEWS, name)) return location.replace("#/inbox");
  view.abort();
  view = new AbortController();
  signOut.hidden = !token.get();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = "Runfold";
  const opened = name === "runs" && id ? runView : VIEWS[name];
  opened(main, params, view.signal, id);
  if (name !== "inbox") countWaiting(view.signal);
  scrollTo({ top: 0 });
  if (focus) main.querySelector("h1")?.focus({ preventScroll: true });
}

/** The inbox's number also stands on the other views. */
function countWaiting(signal) {
  const count = async () => showWaiting(await getInbox(signal));
  poll("count", COUNT_MS, signal, count, () => showWaiting(NOTHING));
}

// ---- the token ----------------------------------------------------------------------------------

function askForToken(said = "") {
  view.abort();
  view = new AbortController();
  signOut.hidden = true;
  showWaiting(NOTHING);
  const input = el("input", { type: "password", autocomplete: "off", required: true });
  const message = el("div", { class: "message", role: "alert" }, said ? problemBox(said) : null);
  const go = el("button", { type: "submit", class: "main" }, "Sign in");
  const form = el(
    "form",
    { class: "card sign-in", "aria-label": "Sign in" },
    el("h1", { tabindex: "-1" }, "Sign in"),
    el("p", { class: "lead" }, "This bridge asks for a token. One is made by"),
    code("runfold token NAME --scope signal"),
    field("Token", input),
    message,
    el("div", { class: "actions" }, go),
    el(
      "p",
      { class: "muted" },
      "It is kept until this tab is closed. What you decide is recorded under its name.",
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go.disabled = true;
    signIn(input.value.trim());
  });
  fill(main, form);
  input.focus();
}

async function signIn(text) {
  if (!/^[\x21-\x7e]+$/.test(text)) return askForToken("This is not a token.");
  token.set(text);
  try {
    await getInbox(undefined, 1);
    show();
  } catch (error) {
    if (error.status === 401) return; // asked again by the listener below
    token.drop();
    const forbidden = "This token may not look at runs (scope read).";
    askForToken(error.status === 403 ? forbidden : problemText(error));
  }
}

document.addEventListener("runfold-401", () => {
  const had = token.get();
  token.drop();
  askForToken(had ? "The bridge does not know this token." : "");
});

signOut.addEventListener("click", () => {
  token.drop();
  askForToken();
});

// ---- keys ---------------------------------------------------------------------------------------

/** j and k move over cards and rows; what a card does with keys stands in decide.js. */
function move(step) {
  const places = [...main.querySelectorAll("[data-nav]")];
  if (!places.length) return;
  const here = places.findIndex((place) => place.contains(document.activeElement));
  const next = here < 0 ? (step > 0 ? 0 : places.length - 1) : here + step;
  const place = places[Math.min(Math.max(next, 0), places.length - 1)];
  place.focus();
  place.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) return;
  if (event.key === "j") move(1);
  if (event.key === "k") move(-1);
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => show());
show({ focus: false });
