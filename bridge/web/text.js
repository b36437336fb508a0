// Text made visible, and DOM nodes made of it. Everything recorded comes from agents, models and
// strangers: it reaches the page only as text nodes, and only through `visible` (R68).

// The same characters as in journal/escape.py; tests/real/test_bridge_page.py compares the two.
const UNSAFE = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f" + // C0, DEL, C1
    "\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" + // invisible fillers
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f" + // zero width, separators, bidirectional
    "\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffc\\ud800-\\udfff" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}" + // shorthand and musical formatting
    "\\u{e0000}-\\u{e0fff}]+", // tags and variation selectors
  "gu",
);
const SHORT = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };

function escaped(char) {
  const code = char.codePointAt(0);
  const hex = code.toString(16);
  if (code < 0x100) return SHORT[char] ?? `\\x${hex.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

const escapedAll = (chars) => Array.from(chars, escaped).join("");

/** The text on one line, harmless: what can't be seen stands as `\n`, `\x1b`, `\u202e`. */
export const visible = (text) => String(text).replace(UNSAFE, escapedAll);

/** As `visible`, in nodes: escapes are marked, so that they can't be taken for typed text. */
function visibleNodes(text, keepLines) {
  const nodes = document.createDocumentFragment();
  let from = 0;
  const plain = (to) => to > from && nodes.append(text.slice(from, to));
  for (const found of text.matchAll(UNSAFE)) {
    plain(found.index);
    from = found.index + found[0].length;
    const parts = keepLines ? found[0].match(/[\n\t]+|[^\n\t]+/g) : [found[0]];
    for (const part of parts) {
      if (keepLines && /[\n\t]/.test(part)) nodes.append(part);
      else nodes.append(marked(part));
    }
  }
  plain(text.length);
  return nodes;
}

function marked(chars) {
  const node = document.createElement("span");
  node.className = "esc";
  node.textContent = escapedAll(chars);
  return node;
}

/** For a block of its own: line breaks and tabs stay. */
export const lines = (text) => visibleNodes(String(text), true);

/**
 * `el("p", {class: "note"}, "text", node)`. Strings, also in attributes, are made
 * visible; there is no way to pass markup.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : visible(value));
  }
  put(node, ...children);
  return node;
}

/** Append strings (made visible), nodes, and lists of them; nothing for null and false. */
export function put(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visibleNodes(String(child), false));
  }
}

/** Replace what a node holds. */
export function fill(node, ...children) {
  node.replaceChildren();
  put(node, ...children);
}

/** A long text cut for a summary line; it is said to be cut. */
export function cut(text, most = 200) {
  const chars = text.length > most ? Array.from(text.slice(0, 2 * most)) : [];
  if (chars.length <= most) return text;
  return `${chars.slice(0, most).join("")}… (${text.length} characters)`;
}

export const code = (text) => el("code", {}, text);
export const strong = (...children) => el("strong", {}, ...children);
export const muted = (...children) => el("span", { class: "muted" }, ...children);

/** The heading of a block of text. */
export const label = (text) => el("p", { class: "label" }, text);

export const problemBox = (...children) => el("div", { class: "problem" }, ...children);

/** `awaiting_approval` as people read it. */
export const words = (status) => String(status).replaceAll("_", " ");

/** A coloured label; it has the look of that status. */
export function badge(status, word = words(status)) {
  const known = /^[a-z_-]+$/.test(status) ? status : "other";
  return el("span", { class: `badge is-${known}` }, word);
}

const TODAY = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const EARLIER = { ...TODAY, month: "short", day: "numeric" };

/** An instant in the reader's time zone; the recorded one, UTC, as its title. */
export function time(at) {
  const when = new Date(at);
  if (Number.isNaN(when.getTime())) return el("span", {}, at);
  const now = new Date();
  const sameDay = when.toDateString() === now.toDateString();
  const year = when.getFullYear() === now.getFullYear() ? undefined : "numeric";
  const shown = when.toLocaleString(undefined, sameDay ? TODAY : { ...EARLIER, year });
  return el("time", { datetime: at, title: at }, shown);
}

/** Between two recorded instants, or nothing where that says nothing. */
export function duration(from, to) {
  const ms = Date.parse(to) - Date.parse(from);
  if (!(ms >= 0)) return "";
  if (ms < 1000) return `${ms} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor((ms % 60_000) / 1000)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export const runLink = (run) => `#/runs/${encodeURIComponent(run)}`;

/** Say something to who can't see the page change. */
export function announce(text) {
  document.getElementById("announce").textContent = visible(text);
}
