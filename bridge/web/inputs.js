// What people tell a running agent: the form, and what became of each input by the records.

import { badge, cut, el, fill, muted, problemBox, words } from "./text.js";
import { compact } from "./json.js";
import { field, problemText, text } from "./decide.js";
import { request, send } from "./api.js";

const MODES = [
  ["steer", "Steer: at the next model call"],
  ["follow_up", "Follow-up: after the answer"],
];

/** The inputs of a run, folded from its records as journal/fold.py does. */
export class Inputs {
  constructor(run) {
    this.run = run;
    this.known = new Map();
    this.lastPlaced = [];
    this.list = el("ul", { class: "inputs" });
    this.problem = el("div", { class: "message", role: "status" });
    this.form = this.makeForm();
    this.node = el("div", {}, this.form, this.problem, this.list);
  }

  clear() {
    this.known.clear();
    this.lastPlaced = [];
  }

  /** Take a record; `render` shows what came of it. */
  add(record) {
    const { type, request_id: id } = record;
    if (type === "input") this.known.set(id, { ...record, status: "queued" });
    else if (type === "input.withdrawn") this.mark("withdrawn", [id]);
    else if (type === "input.placed") this.mark("placed", [id]);
    else if (type === "run.completed") this.answered(true, false);
    else if (type === "commit") this.answered(record.action !== "continue", record.afresh);
    else if (type === "signal" && record.name === "resume") this.mark("placed", this.lastPlaced);
  }

  mark(status, ids) {
    for (const id of ids) if (this.known.has(id)) this.known.get(id).status = status;
  }

  idsOf(status) {
    const found = [...this.known.values()].filter((one) => one.status === status);
    return found.map((one) => one.request_id);
  }

  /** The iteration is over: what was placed is done. Where the run is over, too, what is queued
   * stays unanswered. A resumed run that begins afresh is told again what it was told last. */
  answered(ended, afresh) {
    this.lastPlaced = ended && afresh ? this.idsOf("placed") : [];
    this.mark("done", this.idsOf("placed"));
    if (ended) this.mark("unanswered", this.idsOf("queued"));
  }

  render() {
    const shown = [...this.known.values()].sort((one, other) => other.n - one.n);
    fill(this.list, shown.map((one) => this.item(one)));
  }

  item(one) {
    const line = typeof one.content === "string" ? one.content : compact(one.content);
    return el(
      "li",
      {},
      badge(`input-${one.status}`, one.status),
      muted(` ${words(one.mode)} `),
      el("span", { class: "input-text" }, cut(line, 200)),
      one.status === "queued" ? this.withdrawButton(one) : null,
    );
  }

  withdrawButton(one) {
    const button = el("button", { type: "button", class: "small" }, "Withdraw");
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await request("DELETE", `${this.path}/${encodeURIComponent(one.request_id)}`);
        fill(this.problem);
      } catch (error) {
        this.say(error);
        button.disabled = false;
      }
    });
    return button;
  }

  get path() {
    return `/runs/${encodeURIComponent(this.run)}/inputs`;
  }

  say(error) {
    fill(this.problem, problemBox(problemText(error)));
  }

  makeForm() {
    const content = field("Message to the agent", el("textarea", { rows: "2" }));
    const mode = el("select", {}, MODES.map(([value, label]) => el("option", { value }, label)));
    const go = el("button", { type: "submit", class: "main" }, "Send");
    const actions = el("div", { class: "actions" }, go);
    const form = el("form", { class: "say" }, content, field("When", mode), actions);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        const said = { content: text(content.input.value), mode: text(mode.value) };
        await send("POST", this.path, said);
        content.input.value = "";
        fill(this.problem);
      } catch (error) {
        this.say(error);
      }
      go.disabled = false;
    });
    content.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    return form;
  }
}
