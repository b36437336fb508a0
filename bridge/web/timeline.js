// A run's records as people read them: a step's start and result are one entry, what workers do
// among themselves is subdued. Words as in runfold/terminal.py.

import {
  badge,
  code,
  cut,
  duration,
  el,
  fill,
  lines,
  muted,
  put,
  strong,
  time,
  visible,
  words,
} from "./text.js";
import { compact, jsonBlock } from "./json.js";

const SHORT = 140;
const KNOWN_VERSION = 1;

/** The timeline in `list` (an ol). Records are given once each, in order. */
export class Timeline {
  constructor(list) {
    this.list = list;
    this.open = new Map(); // step -> its entry without a result
    this.steps = new Map(); // step -> its last entry
    this.unknown = new Set();
    this.running = true;
  }

  clear() {
    this.list.replaceChildren();
    this.open.clear();
    this.steps.clear();
  }

  add(record) {
    const entry = this.entryOf(record);
    if (entry) this.list.append(entry);
  }

  /** As it stands: no record is left out because this page does not know its shape. */
  asItStands(record) {
    const whole = more("As it stands", record);
    return plainEntry(record, "is-newer", ["newer ", strong(record.type), whole]);
  }

  /** What the run object says of steps without a result. */
  show(run) {
    this.unknown = new Set(run.unknown.map((step) => step.start));
    this.running = run.status === "running";
    for (const entry of this.open.values()) entry.renderState();
  }

  /** A new entry, or null where the record went into one that stands already. */
  entryOf(record) {
    const known = Object.hasOwn(PLAIN, record.type) || STEP_TYPES.has(record.type);
    if (record.v > KNOWN_VERSION || !known) return this.asItStands(record);
    try {
      return this.knownEntry(record);
    } catch (error) {
      console.warn(error);
      return this.asItStands(record);
    }
  }

  knownEntry(record) {
    if (record.type === "step.started") return this.started(record);
    const entry = this.steps.get(record.step);
    if (record.type === "step.progress" && entry) return entry.progress(record);
    if (record.type === "step.completed" && entry && !entry.done) {
      this.open.delete(record.step);
      return entry.complete(record);
    }
    if (STEP_TYPES.has(record.type)) return new StepEntry(this, null).complete(record, true);
    const [look, ...body] = PLAIN[record.type](record);
    return plainEntry(record, look, body);
  }

  started(record) {
    const entry = new StepEntry(this, record);
    this.open.set(record.step, entry);
    this.steps.set(record.step, entry);
    entry.render();
    return entry.node;
  }
}

const STEP_TYPES = new Set(["step.started", "step.progress", "step.completed"]);

class StepEntry {
  constructor(timeline, start) {
    this.timeline = timeline;
    this.start = start;
    this.done = null;
    this.partial = null;
    this.called = null;
    this.node = el("li", {});
  }

  progress(record) {
    this.partial = record;
    this.render();
    return null;
  }

  complete(record, isNew = false) {
    this.done = record;
    this.render();
    return isNew ? this.node : null;
  }

  /** What is opened in the entry stays open where nothing has changed. */
  renderState() {
    if (this.state()[0] !== this.word) this.render();
  }

  render() {
    const first = this.start ?? this.done;
    const isModel = this.start?.kind === "model";
    const [word, look] = this.state();
    this.word = word;
    if (this.start && !isModel) this.called ??= value("called with", this.start.input);
    const ordinals = this.start && this.done ? `${this.start.n}–${this.done.n}` : String(first.n);
    this.node.className = `entry is-step is-${isModel ? "model" : "tool"}`;
    this.node.dataset.n = ordinals;
    fill(
      this.node,
      when(ordinals, first.at),
      el(
        "div",
        { class: "entry-body" },
        el(
          "p",
          { class: "entry-head" },
          isModel ? strong("Model") : el("strong", { class: "mono" }, toolOf(first)),
          word ? badge(look, word) : null,
          el("span", { class: "muted mono" }, first.step),
          this.notes(),
        ),
        this.called,
        this.partial && !this.done ? value("progress", this.partial.output) : null,
        this.done ? resultOf(this.done, isModel) : null,
      ),
    );
  }

  state() {
    const { done, start, timeline } = this;
    if (!done) {
      if (timeline.unknown.has(start.n)) return ["may or may not have happened", "indeterminate"];
      return timeline.running ? ["running", "running"] : ["no result", "waiting"];
    }
    if (done.error) return start ? ["error", "failed"] : ["not called", "cancelled"];
    if (done.interrupted) return ["interrupted", "indeterminate"];
    return [null, null];
  }

  notes() {
    const notes = [];
    if (this.start && this.done) notes.push(duration(this.start.at, this.done.at));
    if (this.start?.permit) notes.push(`by record ${this.start.permit}`);
    if (this.done && (this.done.via ?? "run") !== "run") notes.push(`via ${words(this.done.via)}`);
    if (this.start?.attempt > 1) notes.push(`attempt ${this.start.attempt}`);
    return notes.filter(Boolean).map((note) => muted(note));
  }
}

/** The tool of a step; of one that was never started its name tells (`tool/2/0/create_ticket`). */
function toolOf(record) {
  return record.tool || record.kind || record.step.split("/").slice(3).join("/") || record.step;
}

function resultOf(record, isModel) {
  if (record.error) {
    const said = `${record.error.type}: ${record.error.message}`;
    const { data } = record.error;
    return [text("", said, "error-text"), data === undefined ? null : value("data", data)];
  }
  if (record.interrupted) {
    return [
      text("", "It was cut off, and may have happened."),
      value("partial output", record.interrupted.partial ?? null),
    ];
  }
  if (isModel && isReply(record)) return reply(record.result, record.verdicts ?? []);
  return value("result", record.result);
}

function isReply({ result, step }) {
  const isObject = result !== null && typeof result === "object" && !Array.isArray(result);
  return step.startsWith("llm/") && isObject;
}

function reply(result, verdicts) {
  const { calls = [], usage } = result;
  return [
    result.text ? text("", result.text, "said-by-model") : null,
    el("ul", { class: "calls" }, calls.map((call, i) => called(call, verdicts[i]))),
    usage ? muted(`${usage.input_tokens} tokens in, ${usage.output_tokens} out`) : null,
  ];
}

function called(call, verdict) {
  return el("li", {}, argumentsOf(call), judged(verdict));
}

function judged(verdict) {
  switch (verdict?.verdict) {
    case "ask":
      return [badge("awaiting_approval", "asks for approval"), text("the gate says", verdict.text)];
    case "deny":
      return [badge("denied"), text("the gate says", verdict.reason)];
    default:
      return null;
  }
}

function argumentsOf(call) {
  const name = ["calls ", el("strong", { class: "mono" }, cut(String(call.name))), " "];
  const whole = String(call.arguments);
  if (whole.length <= SHORT) return el("p", {}, name, code(whole));
  return [el("p", {}, name), opening("", whole, () => el("pre", { class: "json" }, lines(whole)))];
}

/** A JSON value: on the line where it is short, else to be opened. */
function value(label, json) {
  const line = compact(json ?? null);
  if (line.length <= SHORT) return el("p", { class: "value" }, labelled(label), code(line));
  return opening(label, line, () =>
    typeof json === "string" ? el("pre", { class: "json" }, lines(json)) : jsonBlock(json, label),
  );
}

/** Text of the same kind. */
function text(label, said, look = "") {
  const whole = String(said ?? "");
  if (whole.length <= 4 * SHORT) {
    return el("div", { class: `value said-text ${look}` }, labelled(label), lines(whole));
  }
  return opening(label, whole, () => el("pre", { class: "json" }, lines(whole)));
}

const labelled = (label) => (label ? muted(`${label} `) : null);

/** What is inside is made when it is opened: most of a long journal never is. */
function opening(label, whole, inside) {
  const summary = el("summary", {}, labelled(label), code(cut(whole, SHORT)));
  const node = el("details", { class: "value" }, summary);
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) put(node, inside());
  });
  return node;
}

const more = (label, record) => {
  const node = el("details", {}, el("summary", {}, label));
  put(node, jsonBlock(record, label));
  return node;
};

function when(ordinals, at) {
  const ordinal = el("span", { class: "ordinal", title: "records" }, ordinals);
  return el("div", { class: "entry-when" }, ordinal, time(at ?? ""));
}

function plainEntry(record, look, body) {
  const inside = el("div", { class: "entry-body" }, body);
  const node = el("li", { class: `entry ${look}` }, when(String(record.n), record.at), inside);
  node.dataset.n = String(record.n);
  return node;
}

const by = (record) => (record.by ? [" by ", strong(record.by)] : null);

/** Record type -> its look and what is said of it. */
const PLAIN = {
  "run.started": (r) => [
    "is-edge",
    el("p", { class: "entry-head" }, strong("Started"), muted("agent ", r.agent, by(r))),
    value("input", r.input),
  ],
  "run.completed": (r) => [
    "is-edge is-good",
    el("p", { class: "entry-head" }, strong("Completed")),
    answer(r.message),
  ],
  "run.purged": (r) => ["is-edge", el("p", {}, "Purged", by(r))],
  claim: (r) => ["is-quiet", el("p", {}, `claim by worker ${r.worker} (${r.reason})`)],
  release: (r) => ["is-quiet", el("p", {}, `release ${r.reason ?? ""}`)],
  park: (r) => ["is-quiet", el("p", {}, parked(r)), (r.asks ?? []).map(asked)],
  commit,
  signal: (r) => [
    `is-signal is-${visible(r.name)}`,
    el("p", { class: "entry-head" }, strong(r.name), el("span", {}, by(r))),
    signalled(r),
  ],
  input: (r) => [
    "is-signal",
    el(
      "p",
      { class: "entry-head" },
      strong("input"),
      el("span", {}, by(r)),
      muted(words(r.mode)),
      el("span", { class: "muted mono" }, r.request_id),
    ),
    value("", r.content),
  ],
  "input.placed": (r) => ["is-quiet", el("p", {}, "input placed: ", code(r.request_id))],
  "input.withdrawn": (r) => [
    "is-quiet",
    el("p", {}, "input withdrawn: ", code(r.request_id), by(r)),
  ],
};

/** The content of a final message, as it was said. */
export function answer(message) {
  const isMessage = message !== null && typeof message === "object" && "content" in message;
  const content = isMessage ? message.content : message;
  return typeof content === "string" ? text("", content, "answer") : value("", content);
}

function asked(ask) {
  return [
    el("p", {}, el("strong", { class: "mono" }, ask.tool), " asks for approval"),
    value("called with", ask.input),
    ask.text ? text("the gate says", ask.text) : null,
  ];
}

function parked(r) {
  const until = r.until ? [" until ", time(r.until)] : null;
  return [`parked for ${r.why}`, until, r.reason ? `: ${cut(r.reason)}` : null];
}

function commit(r) {
  if (r.action === "continue") {
    return ["is-quiet", el("p", {}, `commit, turn ${r.iteration ?? 0}`, waits(r))];
  }
  const word = r.action === "fail" ? "Failed" : "Cancelled";
  return [
    "is-edge is-bad",
    el("p", { class: "entry-head" }, strong(word), el("span", {}, r.reason ?? "")),
    r.detail ? text("", r.detail) : null,
  ];
}

function waits({ waits: on, reason }) {
  if (!on) return null;
  const said = [];
  if (on.until) said.push(["until ", time(on.until)]);
  if (on.until_input) said.push("for input");
  if (on.until_child) said.push(`for child ${on.until_child}`);
  if (on.resume) said.push("for resume");
  if (!said.length) return null;
  const joined = said.flatMap((one, i) => (i ? [" or ", one] : [one]));
  return [", waits ", joined, reason ? `: ${cut(reason)}` : null];
}

function signalled({ name, payload = {} }) {
  if (name === "reconcile") {
    return [
      el("p", {}, code(payload.step), ` ${payload.outcome} (record ${payload.start})`),
      payload.outcome === "done" ? value("result", payload.result) : null,
    ];
  }
  const about = payload.marker ?? payload.step ?? payload.run;
  const why = payload.reason ?? payload.comment;
  return [
    about === undefined ? null : el("p", {}, code(about)),
    why === undefined ? null : text("", why),
    name === "late" ? value("result", payload.result) : null,
    name === "child" ? value("outcome", payload.outcome) : null,
  ];
}
