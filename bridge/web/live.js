// What is shown is asked again every few seconds; where that fails, the page says so.

import { fill } from "./text.js";

const lost = new Set();

/** One source of what is shown does, or does not, answer. */
export function connection(source, works) {
  if (works) lost.delete(source);
  else lost.add(source);
  const banner = document.getElementById("lost");
  if (banner.hidden === (lost.size === 0)) return;
  banner.hidden = lost.size === 0;
  fill(banner, banner.hidden ? "" : "Connection lost. What is shown may be old; trying again…");
}

/**
 * Call `work(signal)` now and every `ms` while the page is visible, never twice at once, until
 * `signal` aborts. `refused(problem)` gets what will not go away by itself. Returns a function
 * that asks at once.
 */
export function poll(source, ms, signal, work, refused) {
  let timer = 0;
  let running = false;
  let again = false;
  async function turn() {
    if (signal.aborted) return;
    if (running) {
      again = true;
      return;
    }
    clearTimeout(timer);
    running = true;
    again = false;
    try {
      if (!document.hidden) {
        await work(signal);
        connection(source, true);
      }
    } catch (error) {
      if (!signal.aborted) failed(error);
    }
    running = false;
    if (!signal.aborted) timer = setTimeout(turn, again ? 0 : ms);
  }
  function failed(error) {
    if (error.unsure) connection(source, false);
    else if (error.status) {
      connection(source, true);
      refused(error);
    } else throw error;
  }
  document.addEventListener("visibilitychange", turn, { signal });
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    connection(source, true);
  });
  turn();
  return turn;
}
