// Numbers, times and elements. Text reaches the page as text only: nothing here takes HTML.

export const count = (n) => n.toLocaleString("en");

export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export function seconds(s) {
  if (s < 0.0995) return `${Math.round(1000 * s)} ms`;
  if (s < 9.95) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  return s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export const clock = (epoch) => new Date(1000 * epoch).toLocaleTimeString("en-GB");

// Control characters and marks of direction could hide or reorder text: they are shown as what they are.
const STRANGE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
export const shown = (text) =>
  text.replace(/\r\n?/g, "\n").replace(STRANGE, (c) => `\u2039${c.codePointAt(0).toString(16).padStart(2, "0")}\u203a`);

export const byId = (id) => document.getElementById(id);

export function element(tag, classes, text) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A prompt's text in one line: line ends are marked.
export const oneLine = (text) => shown(text).replace(/\s*\n\s*/g, " \u21b5 ");
