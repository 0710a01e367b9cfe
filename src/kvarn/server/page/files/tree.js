// The same blocks as a prefix tree: to the right the tokens of a text, downwards the texts. A beginning that several
// texts share is one bar, as tall as they are many.

import { corner, fill, hatch, penOf, ring, style } from "./colours.js";
import { oneLine } from "./words.js";

const ROW = 26, NARROWEST = 3;

// Chains of blocks without a fork are one bar.
export function bars(group) {
  const children = new Map();
  const roots = [];
  for (const block of group.blocks.values()) {
    const parent = block.parent >= 0 ? group.nodes.get(block.parent) : undefined;
    if (parent && parent !== block) {
      if (!children.has(parent.block)) children.set(parent.block, []);
      children.get(parent.block).push(block);
    } else roots.push(block);
  }
  const order = (a, b) => a.position - b.position || a.branch - b.branch || a.block - b.block;
  const found = [];
  let row = 0;
  const walk = (start, depth) => {
    const chain = [start];
    let after = children.get(start.block) ?? [];
    while (after.length === 1 && after[0].branch === start.branch && alike(after[0], start)) {
      chain.push(after[0]);
      after = children.get(after[0].block) ?? [];
    }
    const bar = { chain, row, rows: 1, from: start.position, tokens: chain.reduce((n, each) => n + each.tokens, 0) };
    found.push(bar);
    if (!after.length || depth > 400) { row += 1; return; }
    for (const child of after.sort(order)) walk(child, depth + 1);
    bar.rows = row - bar.row;
  };
  for (const root of roots.sort(order)) walk(root, 0);
  return { bars: found, rows: row };
}

const alike = (a, b) => (a.references > 1) === (b.references > 1) && (a.references > 0) === (b.references > 0);

export class Tree {
  // `point` is told which blocks are pointed at; `text` gives the text of a block if it is known, and asks for it if not.
  constructor(box, canvas, point, text) {
    Object.assign(this, { box, canvas, point, text, found: { bars: [], rows: 0 }, at: -1 });
    box.addEventListener("pointermove", (event) => this.choose(this.under(event)));
    box.addEventListener("click", (event) => this.choose(this.under(event)));
    box.addEventListener("keydown", (event) => this.key(event));
  }

  draw(group, now) {
    this.found = bars(group);
    const width = Math.max(this.box.clientWidth - 2, 60);
    const longest = Math.max(...this.found.bars.map((bar) => bar.from + bar.tokens), group.size * 8);
    this.scale = width / longest;
    const pen = penOf(this.canvas, width, Math.max(this.found.rows * ROW, ROW));
    pen.font = `12px ${style("--face")}`;
    pen.textBaseline = "middle";
    if (!this.found.bars.length) {
      pen.fillStyle = style("--quiet");
      pen.fillText("The cache is empty.", 8, ROW / 2);
    }
    this.found.bars.forEach((bar, i) => this.bar(pen, group, bar, now, i === this.at));
  }

  bar(pen, group, bar, now, chosen) {
    const x = Math.round(bar.from * this.scale), y = bar.row * ROW + 1;
    const w = Math.max(Math.round((bar.from + bar.tokens) * this.scale) - x - 1, NARROWEST), h = bar.rows * ROW - 2;
    const [first] = bar.chain;
    pen.fillStyle = fill(first, now);
    pen.fillRect(x, y, w, h);
    if (!first.references) hatch(pen, x, y, w, h, 6);
    if (first.references > 1) ring(pen, x, y, w, h, style("--ring"), 2);
    if (bar.chain.some((each) => group.next.has(each.block))) corner(pen, x, y, w, 9);
    if (chosen) ring(pen, x, y, w, h, style("--focus"), 2.5);
    this.label(pen, bar, x, y + Math.min(h, ROW) / 2, w);
  }

  label(pen, bar, x, y, w) {
    if (w < 40) return;
    const text = oneLine(this.text(bar.chain[0]) ?? "");
    const words = text || `${bar.tokens} tokens`;
    const room = w - 14;
    let n = Math.min(words.length, Math.floor(room / 4));
    while (n > 0 && pen.measureText(words.slice(0, n)).width > room) n -= 1;
    if (n < Math.min(words.length, 4)) return;
    const cut = n < words.length ? `${words.slice(0, Math.max(n - 1, 1))}\u2026` : words;
    pen.fillStyle = style("--label-back");
    pen.fillRect(x + 4, y - 8, Math.min(pen.measureText(cut).width + 6, w - 6), 16);
    pen.fillStyle = style("--ink");
    pen.fillText(cut, x + 7, y + 0.5);
  }

  under(event) {
    const place = this.canvas.getBoundingClientRect();
    const token = (event.clientX - place.left) / this.scale, row = (event.clientY - place.top) / ROW;
    return this.found.bars.findIndex((bar) =>
      row >= bar.row && row < bar.row + bar.rows && token >= bar.from && token < bar.from + Math.max(bar.tokens, NARROWEST / this.scale));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") { this.choose(-1); this.box.blur(); return; }
    if (step === undefined) return;
    event.preventDefault();
    const to = this.at + step;
    if (to >= 0 && to < this.found.bars.length) this.choose(to);
  }

  choose(i) {
    if (i === this.at) return;
    this.at = i;
    this.point(i < 0 ? [] : this.found.bars[i].chain);
  }
}
