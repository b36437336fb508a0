// #/inbox: everything that waits for a person.

import { announce, el, fill } from "./text.js";
import { card, keyOf, problemText, withdraw } from "./decide.js";
import { get } from "./api.js";
import { poll } from "./live.js";

const REFRESH_MS = 3000;

/** The number beside the word Inbox. */
export function showWaiting(count) {
  const node = document.getElementById("waiting");
  node.hidden = count === 0;
  fill(node, String(count), el("span", { class: "unseen" }, " waiting"));
}

export function inboxView(root, params, signal) {
  const state = el("p", { class: "empty" }, "Loading…");
  const list = el("div", { class: "cards" });
  fill(
    root,
    el("h1", { tabindex: "-1" }, "Inbox"),
    el("p", { class: "lead" }, "What waits for a person."),
    state,
    list,
    keysHelp(),
  );
  const cards = new Map();
  const refused = (problem) => fill(state, problemText(problem));
  const refresh = poll("inbox", REFRESH_MS, signal, load, refused);

  async function load() {
    const { items } = await get("/inbox", signal);
    items.sort((one, other) => String(one.since ?? "").localeCompare(String(other.since ?? "")));
    showWaiting(items.length);
    document.title = items.length ? `(${items.length}) Runfold` : "Runfold";
    const isNew = items.some((item) => !cards.has(keyOf(item)));
    if (cards.size && isNew) announce("The inbox has something new.");
    showCards(list, cards, items, { decided: refresh });
    fill(state, items.length ? null : "Nothing waits for a person.");
    state.hidden = items.length > 0;
  }
}

/**
 * Bring the cards in line with the items. A card that somebody looks at is never changed or moved;
 * what is decided stays, with its receipt, until the view is left.
 */
export function showCards(list, cards, items, options) {
  const asked = new Set(items.map(keyOf));
  for (const [key, node] of cards) {
    if (asked.has(key)) continue;
    const used = node.contains(document.activeElement) || node.querySelector("form");
    if (used || node.dataset.settled) withdraw(node);
    else forget(cards, key);
  }
  for (const item of items) {
    const key = keyOf(item);
    if (cards.get(key)?.dataset.settled === "gone") forget(cards, key);
    if (cards.has(key)) continue;
    cards.set(key, card(item, options));
    list.append(cards.get(key));
  }
}

function forget(cards, key) {
  cards.get(key).remove();
  cards.delete(key);
}

function keysHelp() {
  const keys = [
    ["j", "next"],
    ["k", "previous"],
    ["a", "approve…"],
    ["r", "reject…"],
    ["Enter", "send the form"],
    ["Esc", "back"],
  ];
  return el(
    "p",
    { class: "keys" },
    keys.map(([key, what]) => el("span", {}, el("kbd", {}, key), ` ${what}`)),
  );
}

