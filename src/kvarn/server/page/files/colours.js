// Colours and patterns of blocks, for the map and the tree. A state is never told by colour alone:
// kept is hatched, shared has a ring, evicted next has a corner, being filled is filled in part.

const dark = matchMedia("(prefers-color-scheme: dark)");
let read = null;

export function style(name) {
  read ??= getComputedStyle(document.documentElement);
  return read.getPropertyValue(name).trim();
}
dark.addEventListener("change", () => { read = null; });

// Neighbouring numbers get hues that are far apart.
export const hue = (branch) => (((branch * 137.508 + 67.5) % 360) + 360) % 360;

// 0: just used. 1: half an hour ago or more.
export function age(block, now) {
  if (block.references) return 0;
  return Math.min(Math.log1p(Math.max(now - block.used, 0)) / Math.log1p(1800), 1);
}

export function fill(block, now) {
  const paler = 0.55 * age(block, now);
  const [light, towards] = dark.matches ? [56, 24] : [50, 88];
  const colourful = block.own ? 62 : 32;
  return `hsl(${hue(block.branch).toFixed(0)} ${(colourful * (1 - 0.5 * paler)).toFixed(0)}% ${(light + (towards - light) * paler).toFixed(0)}%)`;
}

export function hatch(pen, x, y, w, h, gap) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w, h);
  pen.clip();
  pen.strokeStyle = style("--hatch");
  pen.lineWidth = Math.max(gap / 4, 1);
  pen.beginPath();
  for (let at = x - h - (x + y) % gap; at < x + w; at += gap) {
    pen.moveTo(at, y + h);
    pen.lineTo(at + h, y);
  }
  pen.stroke();
  pen.restore();
}

export function ring(pen, x, y, w, h, colour, width = 1.5) {
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.strokeRect(x + width / 2, y + width / 2, w - width, h - width);
}

export function corner(pen, x, y, w, size) {
  pen.fillStyle = style("--alarm");
  pen.beginPath();
  pen.moveTo(x + w - size, y);
  pen.lineTo(x + w, y);
  pen.lineTo(x + w, y + size);
  pen.fill();
}

// A canvas as sharp as the screen. Its pen counts in CSS pixels.
export function penOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}
