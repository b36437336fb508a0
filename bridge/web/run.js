// #/runs/<id>: where a run stands, what it waits for, its timeline as it grows, and what can be
// said to it.

import {
  announce,
  badge,
  code,
  el,
  fill,
  label,
  lines,
  muted,
  problemBox,
  put,
  strong,
  time,
  visible,
  words,
} from "./text.js";
import { answer, Timeline } from "./timeline.js";
import { cancelling, problemText } from "./decide.js";
import { connection, poll } from "./live.js";
import { Follower } from "./follow.js";
import { get } from "./api.js";
import { Inputs } from "./inputs.js";
import { showCards } from "./inbox.js";

const REFRESH_MS = 5000;
const SETTLE_MS = 60; // records come in bursts: the run is asked for once behind each
const WINDOW = 1000; // of a longer run the last records are shown first
const EARLIER = 500;
const PREVIEW_CHARS = 20_000;
const RESUMABLE = new Set(["paused", "waiting"]);
const ENDED = new Set(["completed", "failed", "cancelled", "damaged", "newer"]);

export function runView(root, params, signal, id) {
  return new RunView(root, signal, id);
}

class RunView {
  constructor(root, signal, id) {
    Object.assign(this, { id, signal, records: [], cards: new Map() });
    Object.assign(this, { follower: null, over: false, status: "" });
    this.path = `/runs/${encodeURIComponent(id)}`;
    this.parts();
    this.layOut(root);
    const refused = (problem) => this.refused(problem);
    this.refresh = poll("run", REFRESH_MS, signal, () => this.load(), refused);
    document.addEventListener("visibilitychange", () => this.seen(), { signal });
    signal.addEventListener("abort", () => {
      this.follower?.close();
      clearTimeout(this.settling);
      connection("stream", true);
    });
  }

  parts() {
    this.head = el("div", { class: "run-head" });
    this.cardList = el("div", { class: "cards" });
    this.timelineList = el("ol", { class: "timeline", "aria-label": "Records" });
    this.timeline = new Timeline(this.timelineList);
    this.preview = el("div", { class: "preview", hidden: true });
    this.previewText = el("div", { class: "said-text" });
    put(this.preview, label("The model is saying"), this.previewText);
    this.earlier = el("button", { type: "button", hidden: true }, "Earlier records");
    this.earlier.addEventListener("click", () => this.loadEarlier());
    this.live = el("span", { class: "live" });
    this.broken = el("div", { class: "message", role: "alert" });
    this.inputs = new Inputs(this.id);
    this.ending = el("div", { class: "cancel", tabindex: "-1" });
    cancelling(this.ending, this.id, () => this.refresh());
    this.talkTitle = el("h2", {});
    this.talk = el("aside", { class: "talk" }, this.talkTitle, this.inputs.node, this.ending);
  }

  layOut(root) {
    fill(
      root,
      el("p", { class: "crumb" }, el("a", { href: "#/runs" }, "Runs")),
      el("h1", { tabindex: "-1", class: "id" }, this.id),
      this.head,
      this.cardList,
      el(
        "div",
        { class: "columns" },
        this.talk,
        el(
          "section",
          { class: "records" },
          el("div", { class: "title-row" }, el("h2", {}, "Timeline"), this.live),
          this.earlier,
          this.timelineList,
          this.preview,
          this.broken,
        ),
      ),
    );
  }

  async load() {
    const run = await get(this.path, this.signal);
    this.showHead(run);
    this.timeline.show(run);
    const options = { inRun: true, decided: () => this.refresh() };
    showCards(this.cardList, this.cards, this.questions(run), options);
    if (!this.follower) this.follow(Math.max(0, run.records - WINDOW));
    else if (this.over && run.records > this.follower.last) this.follow(this.follower.last);
  }

  refused(problem) {
    fill(this.head, problemBox(problemText(problem)));
    this.talk.hidden = true;
  }

  // ---- records ----------------------------------------------------------------------------------

  follow(after) {
    this.over = false;
    this.follower = new Follower(this.id, after, {
      record: (record) => this.take(record),
      preview: (text) => this.showPreview(text),
      ended: () => this.ended(),
      state: (word) => this.showLive(word),
      refused: (problem) => {
        fill(this.broken, problemBox(problemText(problem)));
        this.ended();
      },
    });
  }

  /** A browser has few connections to one bridge: a tab that nobody sees gives its own back. */
  seen() {
    if (!this.follower || this.over) return;
    this.follower.close();
    if (!document.hidden) this.follow(this.follower.last);
  }

  take(record) {
    const height = document.documentElement.scrollHeight;
    const atEnd = scrollY > 0 && innerHeight + scrollY >= height - 40;
    if (!this.records.length) this.earlier.hidden = record.n === 1;
    this.records.push(record);
    this.timeline.add(record);
    this.inputs.add(record);
    if (record.type.startsWith("step.")) this.hidePreview();
    if (atEnd) scrollTo({ top: document.documentElement.scrollHeight });
    this.settling ??= setTimeout(() => this.settle(), SETTLE_MS);
  }

  settle() {
    this.settling = null;
    this.inputs.render();
    this.refresh();
  }

  ended() {
    this.over = true;
    this.hidePreview();
    connection("stream", true);
    fill(this.live);
    this.live.className = "live";
    this.refresh();
  }

  showLive(word) {
    connection("stream", word === "live");
    fill(this.live, word === "live" ? "live" : "reconnecting…");
    this.live.className = `live is-${word}`;
  }

  async loadEarlier() {
    this.earlier.disabled = true;
    const first = this.records[0].n;
    const from = Math.max(1, first - EARLIER);
    try {
      const path = `${this.path}/journal?from=${from}&limit=${first - from}`;
      const page = await get(path, this.signal);
      const fromEnd = document.documentElement.scrollHeight - scrollY;
      this.records.unshift(...page.records);
      this.timeline.clear();
      this.inputs.clear();
      for (const record of this.records) {
        this.timeline.add(record);
        this.inputs.add(record);
      }
      this.inputs.render();
      this.earlier.hidden = from === 1;
      scrollTo({ top: document.documentElement.scrollHeight - fromEnd });
    } catch (error) {
      fill(this.earlier, `${problemText(error)} Try again`);
    }
    this.earlier.disabled = false;
  }

  // ---- what the model says now ------------------------------------------------------------------

  showPreview(text) {
    this.preview.hidden = false;
    put(this.previewText, el("span", {}, lines(text)));
    const shown = this.previewText;
    while (shown.childElementCount > 1 && shown.textContent.length > PREVIEW_CHARS) {
      shown.firstChild.remove();
    }
  }

  hidePreview() {
    this.preview.hidden = true;
    fill(this.previewText);
  }

  // ---- where it stands --------------------------------------------------------------------------

  showHead(run) {
    const ended = ENDED.has(run.status);
    this.talk.hidden = ended && !this.inputs.known.size;
    this.inputs.form.hidden = ended;
    fill(this.talkTitle, ended ? "Inputs" : "Tell the agent");
    this.ending.hidden = ended && !this.ending.dataset.settled;
    if (this.status && this.status !== run.status) announce(`The run is ${words(run.status)}.`);
    this.status = run.status;
    document.title = `${visible(run.run)}: ${words(run.status)}`;
    fill(
      this.head,
      el(
        "p",
        { class: "facts" },
        badge(run.status),
        run.agent === null ? null : el("span", {}, "agent ", strong(run.agent)),
        counted(run.records, "record"),
        counted(run.model_calls, "model call"),
        run.attempt > 1 ? el("span", {}, `attempt ${run.attempt}`) : null,
      ),
      endOf(run),
      waitsOf(run),
    );
  }

  /** What waits for a person, as inbox items. */
  questions(run) {
    const about = { run: run.run, agent: run.agent, status: run.status };
    const wait = (what) => run.waiting_on.find((one) => one.what === what) ?? {};
    const { since: asked, until } = wait("approval");
    const { since: parked } = wait("reconcile");
    return [
      ...run.unknown.map((step) => ({ ...about, ...step, kind: "reconcile", since: parked })),
      ...run.pending.map((call) => ({ ...about, ...call, kind: "approval", since: asked, until })),
      ...this.resumable(run, about, wait("operator")),
    ];
  }

  resumable(run, about, { since, ended_by: text }) {
    const last = this.records.at(-1);
    if (run.status === "failed" && last?.type === "commit" && last.retriable) {
      const mendable = "It failed in a way that another try may mend.";
      return [{ ...about, kind: "operator", since: last.at, text: mendable }];
    }
    if (text === undefined || !RESUMABLE.has(run.status)) return [];
    return [{ ...about, kind: "operator", since, text }];
  }
}

function counted(count, what) {
  return count === null ? null : el("span", {}, `${count} ${what}${count === 1 ? "" : "s"}`);
}

function endOf(run) {
  if (run.status === "completed") {
    return el("div", { class: "answer-box" }, label("Answer"), answer(run.message));
  }
  if (!run.reason && !run.detail) return null;
  return problemBox(run.reason, run.detail ? `: ${run.detail}` : "");
}

function waitsOf(run) {
  if (!run.waiting_on.length) return null;
  return el(
    "ul",
    { class: "waits" },
    run.waiting_on.map((wait) =>
      el(
        "li",
        {},
        "waits for ",
        strong(words(wait.what)),
        wait.since ? [" since ", time(wait.since)] : null,
        wait.until ? [" until ", time(wait.until)] : null,
        muted(": ", withCode(wait.ended_by)),
      ),
    ),
  );
}

/** Commands stand between backticks. */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? code(part) : part));
}
