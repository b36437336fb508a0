// Cards for what waits for a person. A card shows exactly what will run and never changes what it
// shows: another question is another card. Nothing is decided by one key or click: the first opens
// a form that says in words what will be recorded, the second sends it.

import {
  announce,
  badge,
  code,
  el,
  fill,
  label,
  lines,
  problemBox,
  put,
  runLink,
  time,
} from "./text.js";
import { jsonBlock, parse } from "./json.js";
import { signal } from "./api.js";

const UNREADABLE = new Set(["damaged", "newer"]);
const SETTLED = new Set(["decision_conflict", "stale_signal", "run_finished", "run_not_found"]);

/** What a card is about: another question has another key. */
export function keyOf(item) {
  const { kind, run, marker, step, start, since } = item;
  return JSON.stringify([kind, run, marker ?? step, start, kind === "operator" && since]);
}

/** The card of an inbox item. `inRun`: on the run's own page, which names the run itself. */
export function card(item, { inRun = false, decided = () => {} } = {}) {
  cards += 1;
  const title = el("h3", { id: `card-${cards}` }, titleOf(item));
  const look = { class: `card wait is-${item.kind}`, tabindex: "-1", "data-nav": true };
  const node = el(
    "article",
    { ...look, "aria-labelledby": title.id },
    el("header", { class: "card-head" }, title, badge(statusOf(item), kindOf(item))),
    factsOf(item, inRun),
    whatRuns(item),
  );
  new Decider(node, item.run, CHOICES[item.kind](item), decided);
  return node;
}

let cards = 0;

/** The way to end a run, in `node`. */
export function cancelling(node, run, decided) {
  return new Decider(node, run, [cancel(run)], decided);
}

/** Buttons, the form that each opens, and what became of it; they stand at the end of `node`. */
class Decider {
  constructor(node, run, choices, decided) {
    Object.assign(this, { node, run, decided, busy: false, opener: null });
    this.message = el("div", { class: "message", role: "status" });
    this.actions = el("div", { class: "actions" });
    this.place = el("div", { class: "form-place" });
    this.openers = choices.map((choice) => this.button(choice));
    put(this.actions, this.openers);
    put(node, this.message, this.actions, this.place);
    node.addEventListener("keydown", (event) => this.key(event));
  }

  button(choice) {
    const look = { type: "button", class: choice.look, "data-key": choice.key };
    const button = el("button", look, choice.opens);
    button.addEventListener("click", () => this.open(choice, button));
    return button;
  }

  key(event) {
    if (event.key === "Escape" && this.place.firstChild && !this.busy) {
      event.stopPropagation();
      this.shut();
    }
    const plain = !(event.ctrlKey || event.metaKey || event.altKey || event.repeat);
    if (event.target !== this.node || !plain) return;
    const opener = this.openers.find((one) => one.dataset.key === event.key);
    if (!opener || opener.disabled || this.actions.hidden) return;
    event.preventDefault();
    opener.click();
  }

  /** Show the form instead of the buttons; Escape and Back bring them back. */
  open(choice, opener) {
    this.opener = opener;
    const sure = el("button", { type: "submit", class: choice.look }, choice.says);
    const back = el("button", { type: "button", class: "quiet" }, "Back");
    back.addEventListener("click", () => this.shut());
    const form = el(
      "form",
      { class: "decide" },
      el("p", {}, choice.intro),
      choice.fields,
      el("div", { class: "actions" }, sure, back),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(form, choice);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      if (event.repeat) event.preventDefault(); // the key that opened the form is still down
      else if (event.ctrlKey || event.metaKey) form.requestSubmit();
    });
    fill(this.message);
    fill(this.place, form);
    this.actions.hidden = true;
    form.querySelector("input, textarea, button").focus();
    form.scrollIntoView({ block: "nearest" });
  }

  shut() {
    fill(this.place);
    fill(this.message);
    this.actions.hidden = false;
    this.opener.focus();
  }

  async send(form, choice) {
    const payload = choice.payload();
    if (payload === null || this.busy) return;
    this.lock(form, true);
    fill(this.message);
    try {
      const receipt = await signal(this.run, choice.name, payload);
      this.finish(el("div", { class: "receipt" }, recorded(choice.name, receipt)));
    } catch (error) {
      this.lock(form, false);
      const problem = el("div", { class: "problem", role: "alert" }, problemText(error));
      if (SETTLED.has(error.code)) this.finish(problem);
      else {
        fill(this.message, problem);
        form.querySelector("[type=submit]").focus();
      }
    }
  }

  lock(form, busy) {
    this.busy = busy;
    this.node.setAttribute("aria-busy", String(busy));
    for (const control of form.elements) control.disabled = busy;
  }

  /** Nothing more can be decided here: say what the journal says, and no more. */
  finish(said) {
    this.lock({ elements: [] }, false);
    this.node.classList.add("settled");
    this.node.dataset.settled = "yes";
    this.actions.remove();
    this.place.remove();
    fill(this.message, said);
    this.node.focus();
    announce(said.textContent);
    this.decided();
  }
}

/** Kind of item -> its choices: {opens, look, key, intro, fields, says, name, payload()}. `payload`
 * gives members of JSON text, or null where a field is wrong. */
const CHOICES = {
  approval: (item) => [approve(item), reject(item)],
  reconcile: (item) => [happened(item), retry(item)],
  operator: (item) => (UNREADABLE.has(item.status) ? [] : [resume(item)]),
};

function approve({ tool, marker }) {
  const comment = line("Comment (optional)");
  return {
    name: "approve",
    opens: "Approve…",
    look: "good",
    key: "a",
    intro: "The call above will run, once, with exactly these arguments.",
    fields: comment,
    says: `Approve: run ${tool}`,
    payload: () => ({ marker: text(marker), comment: optional(comment.input.value) }),
  };
}

function reject({ tool, marker }) {
  const reason = line("Reason (the model is told)");
  return {
    name: "reject",
    opens: "Reject…",
    look: "bad",
    key: "r",
    intro: "The call above will not run. The agent goes on with the refusal.",
    fields: reason,
    says: `Reject: do not run ${tool}`,
    payload: () => ({ marker: text(marker), reason: optional(reason.input.value) }),
  };
}

function happened(item) {
  const radio = (value) => el("input", { type: "radio", name: "as", value });
  const [asJson, asText] = [radio("json"), radio("text")];
  asJson.checked = true;
  const result = field(
    "What the call returned; the agent sees it as its result",
    el("textarea", { rows: "3", spellcheck: "false" }),
  );
  const problem = el("p", { class: "field-problem", role: "alert" });
  const kinds = el(
    "fieldset",
    {},
    el("legend", { class: "unseen" }, "The result is"),
    check(asJson, "JSON, as ", code('"TICKET-7"'), " or ", code("null")),
    check(asText, "text"),
  );
  return {
    name: "reconcile",
    opens: "It happened…",
    look: "plain",
    intro: "The call is not made again. Its result is recorded as you give it.",
    fields: [result, kinds, problem],
    says: "It happened: record this result",
    payload() {
      const said = asText.checked ? text(result.input.value) : checked(result.input, problem);
      return said === null ? null : { ...reconciled(item, "done"), result: said };
    },
  };
}

function retry(item) {
  return {
    name: "reconcile",
    opens: "It did not happen…",
    look: "bad",
    intro: [
      "The call above is made again, once, without another question. ",
      `If it did happen, ${item.tool} happens twice.`,
      waiting(item),
    ],
    fields: check(
      el("input", { type: "checkbox", required: true }),
      "I have checked: it did NOT happen.",
    ),
    says: "It did NOT happen: run it again",
    payload: () => reconciled(item, "retry"),
  };
}

function waiting({ deadline }) {
  if (!deadline || new Date(deadline) < new Date()) return null;
  const unless = ", when the earlier call is over, unless its worker says before that it has ended.";
  return [" It waits until ", time(deadline), unless];
}

function reconciled({ step, start }, outcome) {
  return { step: text(step), outcome: text(outcome), start: String(start) };
}

function resume({ run }) {
  const reason = line("Reason (optional)");
  return {
    name: "resume",
    opens: "Resume…",
    look: "plain",
    intro: "A worker may take the run up again where it stopped.",
    fields: reason,
    says: `Resume ${run}`,
    payload: () => ({ reason: optional(reason.input.value) }),
  };
}

function cancel(run) {
  const reason = line("Reason (optional)");
  return {
    name: "cancel",
    opens: "Cancel the run…",
    look: "bad",
    intro:
      "The run ends. Nothing new is started; a write that runs now is let end. " +
      "This can't be taken back.",
    fields: reason,
    says: `Cancel ${run} for good`,
    payload: () => ({ reason: optional(reason.input.value) }),
  };
}

function line(name) {
  return field(name, el("input", { type: "text", maxlength: "4000", autocomplete: "off" }));
}

/** Mark a card whose question is no longer asked; an open form is kept for the eye, not for use. */
export function withdraw(node) {
  if (node.dataset.settled || node.getAttribute("aria-busy") === "true") return;
  node.dataset.settled = "gone";
  node.classList.add("settled");
  for (const control of node.querySelectorAll("button, input, textarea")) control.disabled = true;
  const why = "This no longer waits for a decision: somebody else decided, or the run went on.";
  fill(node.querySelector(".message"), problemBox(why));
}

function recorded(name, { result, n }) {
  const what = {
    approve: "Approval",
    reject: "Rejection",
    reconcile: "Decision",
    resume: "Resume",
    cancel: "Cancel",
  }[name];
  if (result === "repeated") {
    return `The same was decided before, in record ${n}. Nothing was added.`;
  }
  if (result === "kept") {
    return `${what} kept as record ${n}. It counts when the run reaches this call.`;
  }
  return `${what} recorded: record ${n}. What comes of it stands in the run's timeline.`;
}

/** What was refused and why, for people. */
export function problemText(error) {
  if (error.unsure) {
    return (
      `No answer (${error.message}): it may or may not have been recorded. ` +
      "Do it again: a repeat is recognised and counts once."
    );
  }
  const winner = error.winner ? ` Record ${error.winner} stands.` : "";
  const hint = error.hint ? ` ${error.hint}` : "";
  return `${error.message}.${winner}${hint}`;
}

export const text = (value) => JSON.stringify(value);
export const optional = (value) => (value === "" ? undefined : JSON.stringify(value));

/** A control with its label above it. */
export function field(name, input) {
  const node = el("label", { class: "field" }, el("span", {}, name), input);
  node.input = input;
  return node;
}

/** A box or button to check, with its label behind it. */
export function check(input, ...name) {
  return el("label", { class: "check" }, input, el("span", {}, name));
}

/** The text of a control as JSON text, or null, with the reason shown, where it is none. */
export function checked(input, problem) {
  try {
    parse(input.value);
    fill(problem);
    return input.value.trim();
  } catch (error) {
    fill(problem, `This is not JSON: ${error.message}`);
    input.focus();
    return null;
  }
}

function titleOf(item) {
  if (item.kind === "operator") return item.run;
  return code(item.tool);
}

function kindOf(item) {
  return { approval: "needs approval", reconcile: "outcome unknown" }[item.kind] ?? item.status;
}

function statusOf(item) {
  return { approval: "awaiting_approval", reconcile: "indeterminate" }[item.kind] ?? item.status;
}

function factsOf(item, inRun) {
  const parts = [];
  if (!inRun) parts.push(el("span", {}, "run ", el("a", { href: runLink(item.run) }, item.run)));
  if (!inRun && item.agent) parts.push(el("span", {}, "agent ", item.agent));
  if (item.since) parts.push(el("span", {}, "since ", time(item.since)));
  if (item.until) parts.push(el("span", {}, "until ", time(item.until)));
  return el("p", { class: "facts" }, parts);
}

function whatRuns(item) {
  if (item.kind === "operator") return quoted(item.text, "Why it stopped");
  const unknown = item.kind === "reconcile";
  return [
    unknown
      ? el("p", { class: "lead" }, "It may or may not have happened. Find out before you decide.")
      : quoted(item.text, "The gate says"),
    label(unknown ? "Arguments it was called with" : "Arguments, exactly as they will run"),
    jsonBlock(item.input, "Arguments"),
    (item.partial ?? null) === null ? null : partial(item.partial),
    el("dl", { class: "small" }, binding(item)),
  ];
}

function partial(output) {
  return [label("Partial output it reported"), jsonBlock(output, "Partial output")];
}

function binding(item) {
  const pairs = [["step", item.step]];
  if (item.marker) pairs.push(["marker", item.marker]);
  if (item.start) pairs.push(["started", `record ${item.start}`]);
  if (item.key) pairs.push(["key", item.key]);
  return pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, code(value))]);
}

function quoted(said, heading) {
  if (!said) return null;
  return [label(heading), el("blockquote", { class: "said" }, lines(said))];
}

