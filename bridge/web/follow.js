// A run's records as they come: server-sent events over fetch, because an EventSource can't send
// an Authorization header.

import { Lost, Problem, request } from "./api.js";
import { parse } from "./json.js";

const FIRST_DELAY_MS = 250;
const DELAY_MS = 8000;
const SILENCE_MS = 45_000; // a comment comes every 15 s

/** Feed it text as it arrives; calls `handle({event, data, id})` for each complete event. */
export function eventParser(handle) {
  let rest = "";
  let event = {};
  let data = [];
  function line(text) {
    if (text === "") {
      const { event: name = "message", id } = event;
      if (data.length) handle({ event: name, id, data: data.join("\n") });
      event = {};
      data = [];
      return;
    }
    const [, name, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(text);
    if (name === "data") data.push(value ?? "");
    else if (name) event[name] = value ?? "";
  }
  return (text) => {
    rest += text;
    // A CR at the end may be half of a CRLF: it waits for what follows.
    const ends = /\r\n|\n|\r(?!$)/g;
    let from = 0;
    for (let end; (end = ends.exec(rest)); from = ends.lastIndex) line(rest.slice(from, end.index));
    rest = rest.slice(from);
  };
}

/**
 * Follow from behind record `after`. Each record is told once, in order: one that was told is
 * dropped, and behind a gap the stream is asked again from the last one told.
 *
 * handlers: record(record), preview(text), ended(), state("live" | "lost"), refused(Problem).
 */
export class Follower {
  constructor(run, after, handlers) {
    this.run = run;
    this.last = after;
    this.handlers = handlers;
    this.abort = new AbortController();
    this.delay = FIRST_DELAY_MS;
    this.done = this.loop();
  }

  close() {
    this.abort.abort();
  }

  async loop() {
    while (!this.abort.signal.aborted) {
      try {
        if (await this.stream()) return this.handlers.ended();
      } catch (error) {
        if (this.abort.signal.aborted) return;
        if (error instanceof Problem && !error.unsure) return this.handlers.refused(error);
        if (!(error instanceof Lost || error instanceof Problem)) console.error(error);
      }
      if (this.abort.signal.aborted) return;
      this.handlers.state("lost");
      await this.pause();
    }
  }

  /** One connection. True: the run has ended and everything was told. */
  async stream() {
    const connection = new AbortController();
    const stop = () => connection.abort();
    this.abort.signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, SILENCE_MS);
    try {
      const answer = await this.open(connection.signal);
      if (answer.status === 204) return true;
      this.handlers.state("live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let over = false;
      const feed = eventParser((event) => {
        over = this.take(event, stop) || over;
      });
      while (!over) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(silence);
        silence = setTimeout(stop, SILENCE_MS);
        feed(value);
      }
      return over;
    } catch (error) {
      throw error instanceof Problem ? error : new Lost(String(error));
    } finally {
      clearTimeout(silence);
      this.abort.signal.removeEventListener("abort", stop);
      stop();
    }
  }

  open(signal) {
    const headers = { Accept: "text/event-stream" };
    if (this.last > 0) headers["Last-Event-ID"] = String(this.last);
    const path = `/runs/${encodeURIComponent(this.run)}/journal?follow=1`;
    return request("GET", path, { headers, signal });
  }

  /** True for the event that ends the stream. */
  take({ event, data }, stop) {
    const value = parse(data);
    if (event === "end") return true;
    if (event === "problem") throw new Problem(value.status, value);
    if (event === "preview") this.handlers.preview(String(value.text ?? ""));
    if (event !== "record" || value.n <= this.last) return false;
    if (value.n !== this.last + 1) {
      stop();
      return false;
    }
    this.last = value.n;
    this.delay = FIRST_DELAY_MS;
    this.handlers.record(value);
    return false;
  }

  async pause() {
    const wait = this.delay * (0.75 + Math.random() / 2);
    this.delay = Math.min(2 * this.delay, DELAY_MS);
    await new Promise((resume) => {
      const go = () => {
        clearTimeout(timer);
        removeEventListener("online", go);
        this.abort.signal.removeEventListener("abort", go);
        resume();
      };
      const timer = setTimeout(go, wait);
      addEventListener("online", go);
      this.abort.signal.addEventListener("abort", go);
    });
  }
}
