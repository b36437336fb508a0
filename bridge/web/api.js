// The bridge's HTTP API: the token, refusals, and repeats after a lost answer.

import { parse } from "./json.js";

const TOKEN = "runfold-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  drop: () => sessionStorage.removeItem(TOKEN),
};

/** What the API refused: problem+json (docs/http.md). */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the bridge answered ${status}`);
    this.status = status;
    this.code = body.code ?? "";
    this.hint = body.hint ?? "";
    this.winner = body.winner ?? null;
    this.run = body.run ?? null;
  }

  /** Whether nobody knows what became of the request: repeat it as it was. */
  get unsure() {
    return this.status >= 500;
  }
}

/** No answer: the request may or may not have been carried out. */
export class Lost extends Error {
  unsure = true;
}

/** fetch with the token. Throws Problem and Lost; tells the page of a 401. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (token.get()) sent.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, body, headers: sent, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Lost("the bridge does not answer");
  }
  if (answer.ok) return answer;
  const problem = new Problem(answer.status, await problemBody(answer));
  if (problem.status === 401) document.dispatchEvent(new Event("runfold-401"));
  throw problem;
}

async function problemBody(answer) {
  try {
    const body = parse(await answer.text());
    return body !== null && typeof body === "object" ? body : {};
  } catch {
    return {};
  }
}

async function json(answer, signal) {
  try {
    const text = await answer.text();
    return text ? parse(text) : null;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Lost("the answer broke off");
  }
}

export async function get(path, signal) {
  return json(await request("GET", path, { signal }), signal);
}

const ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"; // as journal/ids.py

/** 80 random bits, as a run id. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => ALPHABET[byte % 32]).join("");
}

/** An object as JSON text, of members that are JSON text themselves: a number that a person typed
 * travels as it was typed. Members that are undefined are left out. */
export function objectText(members) {
  const kept = Object.entries(members).filter(([, text]) => text !== undefined);
  return `{${kept.map(([name, text]) => `${JSON.stringify(name)}:${text}`).join(",")}}`;
}

const unanswered = new Map(); // what was asked -> the id it was asked with

/**
 * A request that changes something, under an id of its own. After a lost answer the same request
 * is sent with the same id, so that the bridge recognises it; an answer ends that.
 */
export async function send(method, path, members, idName = "request_id") {
  const asked = `${method} ${path} ${objectText(members)}`;
  if (!unanswered.has(asked)) unanswered.set(asked, randomId());
  const own = unanswered.get(asked);
  const id = members[idName] ?? JSON.stringify(idName === "run" ? own : `page:${own}`);
  const body = objectText({ ...members, [idName]: id });
  try {
    const found = await json(await request(method, path, { body }));
    unanswered.delete(asked);
    return found;
  } catch (error) {
    if (!error.unsure) unanswered.delete(asked);
    throw error;
  }
}

const signalPath = (run, name) => `/runs/${encodeURIComponent(run)}/signals/${name}`;

export const signal = (run, name, members) => send("POST", signalPath(run, name), members);
