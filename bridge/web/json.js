// JSON read and printed without loss. JSON.parse rounds 12345678901234567890, turns 1.0 into 1 and
// moves the key "1" to the front: what a person approves must be what is recorded.

import { el, lines } from "./text.js";

/** A number whose text a JavaScript number would not give back. */
export class ExactNumber {
  constructor(text) {
    this.text = text;
  }
  toString() {
    return this.text;
  }
  valueOf() {
    return Number(this.text);
  }
}

const KEYS = new WeakMap(); // object -> its keys in the order of the text
const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const WORDS = [["true", true], ["false", false], ["null", null]];

/** Strict: also refuses an object with two equal keys. Throws SyntaxError. */
export function parse(text) {
  const reader = new Reader(text);
  const value = reader.value();
  reader.space();
  if (reader.at < text.length) reader.fail("something stands behind the value");
  return value;
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  fail(why) {
    throw new SyntaxError(`${why} at character ${this.at}`);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found?.[0];
  }

  space() {
    this.match(SPACE);
  }

  took(char) {
    this.space();
    if (this.text[this.at] !== char) return false;
    this.at += 1;
    return true;
  }

  value() {
    if (this.took("{")) return this.object();
    if (this.took("[")) return this.array();
    if (this.text[this.at] === '"') return this.string();
    const number = this.match(NUMBER);
    if (number) return String(Number(number)) === number ? Number(number) : new ExactNumber(number);
    for (const [word, value] of WORDS) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    return this.fail(this.at < this.text.length ? "no JSON value" : "the text ends too early");
  }

  string() {
    this.space();
    if (this.text[this.at] !== '"') this.fail("no string");
    let end = this.at;
    do {
      end = this.text.indexOf('"', end + 1);
      if (end < 0) this.fail("a string that does not end");
    } while (this.isEscaped(end));
    const token = this.text.slice(this.at, end + 1);
    this.at = end + 1;
    return JSON.parse(token);
  }

  isEscaped(place) {
    let before = place;
    while (this.text[before - 1] === "\\") before -= 1;
    return (place - before) % 2 === 1;
  }

  object() {
    const found = Object.create(null); // a key may be called __proto__
    const keys = [];
    KEYS.set(found, keys);
    if (this.took("}")) return found;
    do {
      const key = this.string();
      if (key in found) this.fail(`the key ${JSON.stringify(key)} stands twice,`);
      if (!this.took(":")) this.fail("no colon");
      found[key] = this.value();
      keys.push(key);
    } while (this.took(","));
    if (!this.took("}")) this.fail("an object that does not end");
    return found;
  }

  array() {
    const found = [];
    if (this.took("]")) return found;
    do found.push(this.value());
    while (this.took(","));
    if (!this.took("]")) this.fail("a list that does not end");
    return found;
  }
}

const keysOf = (value) => KEYS.get(value) ?? Object.keys(value);
const isPlain = (value) => typeof value !== "object" || !value || value instanceof ExactNumber;

/** Calls `emit(text, kind)` for each piece. `indent` null: all on one line. */
function print(value, emit, indent) {
  if (typeof value === "string") return emit(JSON.stringify(value), "string");
  if (isPlain(value)) return emit(String(value), "plain");
  const list = Array.isArray(value);
  const keys = list ? value.keys() : keysOf(value);
  const inner = indent === null ? null : `${indent}  `;
  let first = true;
  emit(list ? "[" : "{");
  for (const key of keys) {
    emit((first ? "" : ",") + (inner === null ? "" : `\n${inner}`));
    first = false;
    if (!list) {
      emit(JSON.stringify(key), "key");
      emit(inner === null ? ":" : ": ");
    }
    print(value[key], emit, inner);
  }
  emit((inner === null || first ? "" : `\n${indent}`) + (list ? "]" : "}"));
}

/** The value on one line, without blanks. */
export function compact(value) {
  const pieces = [];
  print(value, (text) => pieces.push(text), null);
  return pieces.join("");
}

/** The whole value, indented, in a block of its own. */
export function jsonBlock(value, label) {
  const block = el("pre", { class: "json", tabindex: "0", "aria-label": label });
  print(
    value,
    (text, kind) => block.append(kind ? coloured(text, kind) : text),
    "",
  );
  return block;
}

function coloured(text, kind) {
  const node = el("span", { class: `json-${kind}` });
  node.append(lines(text));
  return node;
}
