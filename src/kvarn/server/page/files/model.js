// What the server has told: blocks by group, requests, counters over time. Frames of /kvarn/live go in here.

const WINDOW = 480;  // looks that the charts show: two minutes of four a second

export class Group {
  constructor(facts) {
    this.size = facts.block_size;
    this.total = facts.blocks;
    this.layers = facts.layers;
    this.window = facts.window;
    this.blocks = new Map();  // by physical number
    this.nodes = new Map();   // by number in the prefix tree
    this.next = new Map();    // physical number to place in the order of eviction
  }

  apply(rows, next, whole) {
    if (whole) { this.blocks.clear(); this.nodes.clear(); }
    for (const [block, references, tokens, position, branch, node, parent, used, own] of rows) {
      const before = this.blocks.get(block);
      if (before && before.node >= 0 && this.nodes.get(before.node) === before) this.nodes.delete(before.node);
      if (references === undefined) { this.blocks.delete(block); continue; }
      const now = { block, references, tokens, position, branch, node, parent, used, own: own === 1 };
      this.blocks.set(block, now);
    }
    for (const now of this.blocks.values()) if (now.node >= 0) this.nodes.set(now.node, now);
    // Who is evicted next matters when there is little room left.
    const scarce = this.total - this.blocks.size < this.total / 8;
    this.next = new Map(scarce ? next.map((block, place) => [block, place]) : []);
  }

  // The blocks of a text, from its last full one back to its first.
  path(leaf) {
    const found = [];
    for (let at = this.nodes.get(leaf); at && found.length <= this.total; at = this.nodes.get(at.parent)) found.push(at);
    return found;
  }
}

export class Model {
  constructor() {
    this.facts = null;
    this.groups = [];
    this.lanes = new Map();
    this.counts = null;
    this.series = [];
    this.skew = 0;  // the server's clock minus ours
  }

  apply(frame) {
    const whole = frame.facts !== undefined;
    if (whole) {
      if (!this.facts || this.facts.started !== frame.facts.started) this.series = [];
      this.facts = frame.facts;
      this.groups = frame.facts.groups.map((each) => new Group(each));
      this.lanes.clear();
    }
    this.skew = frame.time - Date.now() / 1000;
    frame.groups.forEach((each, i) => this.groups[i].apply(each.blocks, each.next, whole));
    for (const lane of frame.lanes) this.lanes.set(lane.number, lane);
    for (const number of frame.gone ?? []) this.lanes.delete(number);
    this.counts = frame.counts;
    this.measure(frame.time);
    return whole;
  }

  get now() { return Date.now() / 1000 + this.skew; }

  measure(time) {
    let held = 0, kept = 0;
    for (const block of this.groups[0].blocks.values()) {
      if (block.references) held += block.tokens; else kept += block.tokens;
    }
    this.series.push({ time, held, kept, ...this.counts });
    if (this.series.length > WINDOW) this.series.shift();
  }

  // Counters change only when something happens. A look without news is a point of its own in the charts.
  idle() {
    if (!this.series.length) return;
    this.series.push({ ...this.series.at(-1), time: this.now });
    if (this.series.length > WINDOW) this.series.shift();
  }

  // The change of a counter a second, over about `span` seconds before each point.
  rates(name, span = 1.5) {
    let from = 0;
    return this.series.map((point, i) => {
      while (from < i && point.time - this.series[from].time > span) from += 1;
      const before = this.series[from];
      const passed = point.time - before.time;
      return passed > 0.05 ? Math.max(point[name] - before[name], 0) / passed : 0;
    });
  }
}
