// The texts of blocks, asked for when they are needed: of this key's blocks only.

const MOST = 200, KEPT = 5000;

export class Texts {
  // `arrived` is called when there are new ones.
  constructor(headers, arrived) {
    Object.assign(this, { headers, arrived, known: new Map(), wanted: new Map(), timer: null });
  }

  forget() {
    this.known.clear();
    this.wanted.clear();
  }

  // A full block keeps its text, one that is being filled gets more of it.
  name(group, block) {
    return block.node >= 0 ? `${group}/${block.node}` : `${group}/b${block.block}/${block.parent}/${block.tokens}`;
  }

  of(group, block) {
    if (!block.own) return null;
    const name = this.name(group, block);
    const found = this.known.get(name);
    if (found === undefined && !this.wanted.has(name)) {
      this.wanted.set(name, { group, block: block.block });
      this.timer ??= setTimeout(() => this.ask(), 60);
    }
    return found ?? null;
  }

  async ask() {
    const wanted = [...this.wanted].filter(([, each], i, all) => each.group === all[0][1].group).slice(0, MOST);
    try {
      if (!wanted.length) return;
      const numbers = wanted.map(([, each]) => each.block).join(",");
      const response = await fetch(`/kvarn/cache/texts?group=${wanted[0][1].group}&blocks=${numbers}`, { headers: this.headers() });
      const { texts } = response.ok ? await response.json() : { texts: {} };
      if (this.known.size > KEPT) this.known.clear();
      for (const [name, each] of wanted) {
        this.wanted.delete(name);
        this.known.set(name, texts[each.block] ?? "");
      }
      this.arrived();
    } catch {
      for (const [name] of wanted) this.wanted.delete(name);
    } finally {
      this.timer = this.wanted.size ? setTimeout(() => this.ask(), 60) : null;
    }
  }
}
