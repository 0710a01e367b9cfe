// The four numbers, with two minutes of history each.

import { penOf, style } from "./colours.js";
import { byId, bytes, count, element } from "./words.js";

const HEIGHT = 44, PADDING = 28;

function area(canvas, series, most, colours) {
  const width = Math.max(canvas.parentElement.clientWidth - PADDING, 40);
  const pen = penOf(canvas, width, HEIGHT);
  const n = series[0].length;
  const x = (i) => (n > 1 ? (i / (n - 1)) * width : width);
  let below = new Array(n).fill(0);
  series.forEach((values, which) => {
    const top = values.map((value, i) => below[i] + value);
    pen.beginPath();
    for (let i = 0; i < n; i += 1) pen.lineTo(x(i), HEIGHT - 1 - (top[i] / most) * (HEIGHT - 4));
    for (let i = n - 1; i >= 0; i -= 1) pen.lineTo(x(i), HEIGHT - 1 - (below[i] / most) * (HEIGHT - 4));
    pen.fillStyle = colours[which];
    pen.fill();
    below = top;
  });
  pen.fillStyle = style("--line");
  pen.fillRect(0, HEIGHT - 1, width, 1);
}

// Why prompts were not reused further. Reused in full is no miss.
function reasons(counts) {
  const bar = byId("b-reasons");
  const found = Object.entries(counts.misses).sort((a, b) => b[1] - a[1]);
  bar.replaceChildren(...found.map(([, n], i) => {
    const part = element("i", `reason r${i % 5}`);
    part.style.flexGrow = n;
    return part;
  }));
  return found.map(([reason, n], i) => {
    const named = element("span", "named");
    named.append(element("i", `swatch r${i % 5}`), `${reason} ${count(n)}`);
    return named;
  });
}

export function drawNumbers(model) {
  const { facts, counts, groups } = model;
  const last = model.series.at(-1);
  const room = groups[0].total * groups[0].size;
  byId("n-resident").textContent = `${count(last.held + last.kept)} of ${count(room)} tokens`;
  byId("t-resident").textContent = `${count(last.held)} in use, ${count(last.kept)} kept \u00b7 ${bytes(facts.bytes)}`;
  area(byId("c-resident"), [model.series.map((p) => p.held), model.series.map((p) => p.kept)], room,
    [style("--computed"), style("--kept")]);

  const share = counts.queries ? Math.round((100 * counts.hits) / counts.queries) : null;
  byId("n-reused").textContent = share === null ? "\u2013" : `${share} %`;
  const ended = reasons(counts);
  byId("t-reused").replaceChildren(
    share === null ? "no prompt yet" : `${count(counts.hits)} of ${count(counts.queries)}${ended.length ? "; ended by" : ""} `, ...ended);

  const decoded = model.rates("decoded"), computed = model.rates("computed");
  byId("n-speed").textContent = `${count(Math.round(decoded.at(-1)))} decoded`;
  byId("t-speed").textContent = `prompts ${count(Math.round(computed.at(-1)))} \u00b7 ${count(counts.running)} running, ${count(counts.waiting)} queued`;
  area(byId("c-speed"), [decoded], Math.max(...decoded, 10), [style("--decoded")]);

  const evicted = model.rates("evicted");
  byId("n-evicted").textContent = `${count(counts.evicted)} blocks`;
  byId("t-evicted").textContent = `${evicted.at(-1) ? `${count(Math.round(evicted.at(-1)))} a second` : "none now"} \u00b7 ${count(counts.preempted)} preemptions`;
  area(byId("c-evicted"), [evicted], Math.max(...evicted, 4), [style("--alarm")]);
}
