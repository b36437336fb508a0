// #/inbox: everything that waits for a person.

import { announce, el, fill } from "./text.js";
import { card, keyOf, problemText, withdraw } from "./decide.js";
import { get } from "./api.js";
import { poll } from "./live.js";

const REFRESH_MS = 3000;
const PAGE = 100; // what is asked for so often costs the bridge a journal each
const PAGE_MAX = 500;

/** Ask for so much of the inbox; `next` is null where that is all. */
export const getInbox = (signal, limit = PAGE) => get(`/inbox?limit=${limit}`, signal);

/** The number beside the word Inbox. */
export function showWaiting({ items, next }) {
  const node = document.getElementById("waiting");
  node.hidden = items.length === 0;
  fill(node, countText(items, next), el("span", { class: "unseen" }, " waiting"));
}

const countText = (items, next) => (next === null ? String(items.length) : `${items.length}+`);

export function inboxView(root, params, signal) {
  const state = el("p", { class: "empty" }, "Loading…");
  const list = el("div", { class: "cards" });
  const rest = el("p", { class: "muted", hidden: true });
  const more = el("button", { type: "button", hidden: true }, "Show more");
  fill(
    root,
    el("h1", { tabindex: "-1" }, "Inbox"),
    el("p", { class: "lead" }, "What waits for a person."),
    state,
    list,
    rest,
    more,
    keysHelp(),
  );
  let limit = PAGE;
  const cards = new Map();
  const refused = (problem) => fill(state, problemText(problem));
  const refresh = poll("inbox", REFRESH_MS, signal, load, refused);

  more.addEventListener("click", () => {
    limit = Math.min(limit + PAGE, PAGE_MAX);
    refresh();
  });

  async function load() {
    const found = await getInbox(signal, limit);
    const { items, next } = found;
    items.sort((one, other) => String(one.since ?? "").localeCompare(String(other.since ?? "")));
    showWaiting(found);
    document.title = items.length ? `(${countText(items, next)}) Runfold` : "Runfold";
    const isNew = items.some((item) => !cards.has(keyOf(item)));
    if (cards.size && isNew) announce("The inbox has something new.");
    showCards(list, cards, items, { decided: refresh });
    fill(state, items.length || found.unread ? null : "Nothing waits for a person.");
    state.hidden = items.length > 0 || Boolean(found.unread);
    const parts = next === null ? [] : [`These are the first ${items.length}, by run. More are waiting.`];
    if (found.unread) parts.push(`Not all is shown: ${found.unread.join(", ")} can't be read.`);
    rest.hidden = parts.length === 0;
    fill(rest, parts.join(" "));
    more.hidden = next === null || limit === PAGE_MAX;
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

