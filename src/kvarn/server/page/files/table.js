// The map as a table: the same blocks for those who read with a keyboard or a screen reader.

import { byId, count, element, oneLine, seconds } from "./words.js";

const PAGE = 100;

export function stateOf(group, block) {
  const place = group.next.get(block.block);
  if (!block.references) return place === undefined ? "kept" : `kept, evicted next (${place + 1})`;
  const part = block.tokens < group.size ? ", being filled" : "";
  return (block.references > 1 ? "shared" : "in use") + part;
}

export class Table {
  constructor(text) {
    this.text = text;
    this.page = 0;
    byId("page-back").addEventListener("click", () => this.turn(-1));
    byId("page-on").addEventListener("click", () => this.turn(1));
  }

  turn(by) {
    this.page += by;
    this.drawn?.();
  }

  draw(group, now, names) {
    this.drawn = () => this.draw(group, now, names);
    const blocks = [...group.blocks.values()].sort((a, b) => a.block - b.block);
    const pages = Math.max(Math.ceil(blocks.length / PAGE), 1);
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const from = this.page * PAGE;
    const rows = blocks.slice(from, from + PAGE);
    byId("page-words").textContent = blocks.length
      ? `${count(from + 1)} to ${count(from + rows.length)} of ${count(blocks.length)} blocks that hold something; ${count(group.total - blocks.length)} are free`
      : `all ${count(group.total)} blocks are free`;
    byId("page-back").disabled = this.page === 0;
    byId("page-on").disabled = this.page >= pages - 1;
    byId("rows").replaceChildren(...rows.map((block) => this.row(group, block, now, names)));
  }

  row(group, block, now, names) {
    const made = element("tr");
    const head = element("th", "", String(block.block));
    head.scope = "row";
    const used = block.references ? "now" : `${seconds(Math.max(now - block.used, 0))} ago`;
    const end = block.position + Math.max(block.tokens - 1, 0);
    const cells = [
      stateOf(group, block), `${block.tokens} of ${group.size}`, `${block.position}\u2013${end}`,
      names(block), String(block.references), used,
    ].map((text) => element("td", "", text));
    made.append(head, ...cells, element("td", "text", block.own ? oneLine(this.text(block) ?? "\u2026") : "not yours"));
    return made;
  }
}
