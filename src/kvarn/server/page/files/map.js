// The block map: every physical block of a group, in the order of memory.

import { corner, fill, hatch, penOf, ring, style } from "./colours.js";

const LARGEST = 26, SMALLEST = 6, TALLEST = 300;

export class BlockMap {
  // `point` is told which block is pointed at, or null.
  constructor(box, canvas, cursor, point) {
    this.box = box;
    this.canvas = canvas;
    this.cursor = cursor;
    this.point = point;
    this.group = null;
    this.marked = new Set();
    this.at = null;
    box.addEventListener("pointermove", (event) => this.choose(this.under(event)));
    box.addEventListener("pointerleave", () => { if (document.activeElement !== box) this.choose(null); });
    box.addEventListener("click", (event) => this.choose(this.under(event)));
    box.addEventListener("keydown", (event) => this.key(event));
  }

  draw(group, now) {
    this.group = group;
    const width = Math.max(this.box.clientWidth - 2, 60);
    let cell = LARGEST;
    while (cell > SMALLEST && Math.ceil(group.total / Math.floor(width / cell)) * cell > TALLEST) cell -= 1;
    this.cell = cell;
    this.columns = Math.max(Math.min(Math.floor(width / cell), group.total), 1);
    const pen = penOf(this.canvas, this.columns * cell, Math.ceil(group.total / this.columns) * cell);
    const gap = cell > 12 ? 2 : 1;
    const side = cell - gap;
    const dim = this.marked.size > 0;
    for (let number = 0; number < group.total; number += 1) {
      const x = (number % this.columns) * cell, y = Math.floor(number / this.columns) * cell;
      this.one(pen, group, group.blocks.get(number), x, y, side, now, dim && !this.marked.has(number));
    }
    this.place();
  }

  one(pen, group, block, x, y, side, now, dimmed) {
    if (!block) {
      pen.fillStyle = style("--free");
      pen.fillRect(x, y, side, side);
      return;
    }
    pen.globalAlpha = dimmed ? 0.35 : 1;
    const part = block.tokens / group.size;
    if (part < 1) {
      pen.fillStyle = style("--hollow");
      pen.fillRect(x, y, side, side);
    }
    const height = Math.max(Math.round(part * side), block.tokens ? 1 : 0);
    pen.fillStyle = fill(block, now);
    pen.fillRect(x, y + side - height, side, height);
    if (!block.references) hatch(pen, x, y + side - height, side, height, side > 10 ? 6 : 4);
    if (block.references > 1) ring(pen, x, y, side, side, style("--ring"), side > 10 ? 2.5 : 1.5);
    else if (part < 1) ring(pen, x, y, side, side, fill(block, now), 1);
    if (group.next.has(block.block)) corner(pen, x, y, side, Math.max(side / 2.2, 3));
    pen.globalAlpha = 1;
  }

  under(event) {
    const place = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left) / this.cell);
    const row = Math.floor((event.clientY - place.top) / this.cell);
    const number = row * this.columns + column;
    return column < 0 || column >= this.columns || row < 0 || number >= (this.group?.total ?? 0) ? null : number;
  }

  key(event) {
    if (!this.group) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (step !== undefined) {
      const to = this.at === null ? 0 : this.at + step;
      if (to >= 0 && to < this.group.total) this.choose(to);
    } else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.group.total - 1);
    else if (event.key === "Escape") { this.choose(null); this.box.blur(); return; }
    else return;
    event.preventDefault();
  }

  choose(number) {
    if (number === this.at) return;
    this.at = number;
    this.place();
    this.point(number);
  }

  place() {
    this.cursor.hidden = this.at === null;
    if (this.at === null) return;
    const x = (this.at % this.columns) * this.cell, y = Math.floor(this.at / this.columns) * this.cell;
    Object.assign(this.cursor.style, { left: `${x - 1}px`, top: `${y - 1}px`, width: `${this.cell}px`, height: `${this.cell}px` });
  }
}
