// Requests, newest first. A lane has two bars: the tokens of the prompt, and the time.

import { words } from "./explain.js";
import { byId, clock, count, counted, element, seconds } from "./words.js";

const MOST = 60;

const END = { stop: "", ended: "", length: "length", cancelled: "cancelled", error: "failed" };

function state(lane) {
  if (lane.finish !== null) return END[lane.finish] ?? lane.finish;
  if (lane.started === null) return "queued";
  if (lane.preempted && lane.first !== null && lane.decoded === 0) return "preempted";
  return lane.first === null ? "computing" : "decoding";
}

export class Lanes {
  // `fetchWords` gets the explanation of a lane; `mark` highlights its blocks.
  constructor(list, fetchWords, mark) {
    Object.assign(this, { list, fetchWords, mark, items: new Map(), open: null });
  }

  draw(model) {
    const shownLanes = [...model.lanes.values()].sort((a, b) => b.queued - a.queued || b.number - a.number).slice(0, MOST);
    byId("no-lanes").hidden = shownLanes.length > 0;
    const scale = {
      prompt: Math.max(...shownLanes.map((lane) => lane.prompt), 1),
      time: Math.max(...shownLanes.map((lane) => (lane.finished ?? model.now) - lane.queued), 0.05),
    };
    const keep = new Set(shownLanes.map((lane) => lane.number));
    for (const [number, item] of this.items) if (!keep.has(number)) { item.row.remove(); this.items.delete(number); }
    shownLanes.forEach((lane, place) => {
      const item = this.items.get(lane.number) ?? this.make(lane);
      if (this.list.children[place] !== item.row) this.list.insertBefore(item.row, this.list.children[place] ?? null);
      this.update(item, lane, model, scale);
    });
  }

  make(lane) {
    const row = element("li", "lane");
    const head = element("button", "lane-head");
    head.type = "button";
    head.setAttribute("aria-expanded", "false");
    const item = { row, head, lane, when: element("span", "when"), says: element("span", "says"), prompt: bar(), time: bar(), body: null };
    const bars = element("span", "bars");
    bars.append(item.prompt.box, item.time.box);
    head.append(item.when, bars, item.says);
    row.append(head);
    head.addEventListener("click", () => this.toggle(item));
    this.items.set(lane.number, item);
    return item;
  }

  update(item, lane, model, scale) {
    item.lane = lane;
    const end = lane.finished ?? model.now;
    const total = Math.max(end - lane.queued, 0);
    const started = lane.started ?? end, first = lane.first ?? end;
    segments(item.prompt, scale.prompt, [
      ["s-reused", lane.reused], ["s-computed", lane.computed],
      ["s-missing", Math.max(lane.prompt - lane.reused - lane.computed, 0)],
    ]);
    segments(item.time, scale.time, [
      ["s-queued", started - lane.queued], ["s-computed", Math.max(first - started, 0)],
      ["s-decoded", lane.first === null ? 0 : Math.max(end - first, 0)],
    ]);
    item.when.textContent = clock(lane.queued);
    const rate = lane.first !== null && lane.decoded > 1 && end > first ? `, ${count(Math.round((lane.decoded - 1) / (end - first)))}/s` : "";
    const parts = [
      `reused ${count(lane.reused)} of ${count(lane.prompt)}`, `computed ${count(lane.computed)}`,
      `decoded ${count(lane.decoded)}${rate}`, seconds(total),
    ];
    if (lane.preempted) parts.push(`preempted ${counted(lane.preempted, "time")}`);
    const says = state(lane);
    if (says) parts.push(says);
    if (lane.whose === "other") parts.push("another key");
    else if (lane.whose === "open") parts.push("no key");
    item.says.textContent = parts.join(" \u00b7 ");
    item.row.classList.toggle("preempted", lane.preempted > 0);
    item.row.classList.toggle("running", lane.finish === null);
    if (this.open === item && item.body && lane.finish !== null) this.tell(item);
  }

  async toggle(item) {
    const opening = this.open !== item;
    if (this.open) {
      this.open.body?.remove();
      this.open.head.setAttribute("aria-expanded", "false");
    }
    this.open = opening ? item : null;
    this.mark(opening ? item.lane : null);
    if (!opening) return;
    item.head.setAttribute("aria-expanded", "true");
    item.body = element("div", "lane-body");
    item.body.setAttribute("aria-live", "polite");
    item.row.append(item.body);
    item.told = false;
    await this.tell(item);
  }

  // An open lane that has just ended is explained then.
  async tell(item) {
    const { lane, body } = item;
    if (item.told) return;
    if (lane.whose === "other") body.replaceChildren(element("p", "quiet", "A request of another key: its numbers are shown, its text is not."));
    else if (lane.finish === null) body.replaceChildren(element("p", "quiet", "It is explained when it has ended."));
    if (lane.finish === null) return;
    item.told = true;
    if (lane.whose !== "other") body.replaceChildren(await this.explained(lane));
  }

  // The explanation is kept a moment after the last token.
  async explained(lane, attempts = 4) {
    try {
      return words(await this.fetchWords(lane));
    } catch (error) {
      if (attempts > 1) {
        await new Promise((done) => setTimeout(done, 700));
        return this.explained(lane, attempts - 1);
      }
      return element("p", "quiet", `There is no explanation: ${error.message}.`);
    }
  }
}

function bar() {
  return { box: element("span", "bar"), parts: new Map() };
}

function segments(made, most, wanted) {
  for (const [name, amount] of wanted) {
    let part = made.parts.get(name);
    if (!part) {
      part = element("i", name);
      made.parts.set(name, part);
      made.box.append(part);
    }
    part.style.width = `${((100 * amount) / most).toFixed(2)}%`;
  }
}
