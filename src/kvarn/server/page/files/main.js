// Puts the page together: the key, the stream, what is drawn and when.

import { Chat } from "./chat.js";
import { drawNumbers } from "./charts.js";
import { Lanes } from "./lanes.js";
import { Live } from "./live.js";
import { BlockMap } from "./map.js";
import { Model } from "./model.js";
import { stateOf, Table } from "./table.js";
import { Texts } from "./texts.js";
import { Tree } from "./tree.js";
import { byId, counted, element, seconds, shown } from "./words.js";

const KEY = "kvarn-key";
const model = new Model();
const texts = new Texts(() => live?.headers() ?? {}, () => request());
const chat = new Chat(() => live?.headers() ?? {}, () => model.facts);
const map = new BlockMap(byId("map-box"), byId("map"), byId("cursor"), (number) => point(number === null ? [] : [number]));
const tree = new Tree(byId("tree-box"), byId("tree"), (chain) => { mark(chain); point(chain.map((each) => each.block)); },
  (block) => texts.of(chosen, block));
const table = new Table((block) => texts.of(chosen, block));
const lanes = new Lanes(byId("lanes"), explanation, markLane);
let live = null;
let view = "map";
let chosen = 0;       // group of layers
let pointed = [];     // blocks whose content is shown
let asked = false;    // a drawing is asked for
let hadTexts = false;

// -- the key ----------------------------------------------------------------------------------------------------

// It comes in the fragment of the address, which browsers do not send, and leaves it at once.
function keyOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

function open(key) {
  live?.stop();
  live = new Live(key, frame, status, refused);
  live.run();
}

function refused(wrong) {
  status("locked", wrong ? "this is not a key of this server" : "this server asks for a key");
  sessionStorage.removeItem(KEY);
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  sessionStorage.setItem(KEY, key);
  open(key);
});
addEventListener("hashchange", () => { const key = keyOfAddress(); if (key && key !== live?.key) open(key); });

// -- the stream ---------------------------------------------------------------------------------------------------

function status(state, text) {
  byId("status").dataset.state = state;
  byId("status-text").textContent = text;
}

function frame(found) {
  const preempted = model.counts?.preempted ?? 0;
  const whole = model.apply(found);
  if (whole) begin();
  if (model.counts.preempted > preempted) byId("events").textContent = "A request was preempted to make room.";
  request();
}

function begin() {
  const { facts } = model;
  status("live", "live");
  texts.forget();
  document.title = `${facts.model} \u2013 kvarn`;
  byId("model").textContent = `${facts.model} \u00b7 ${facts.strategy}, ${facts.codec}, blocks of ${facts.groups[0].block_size} \u00b7 context ${facts.context.toLocaleString("en")}`;
  const lost = hadTexts && !facts.texts;
  hadTexts = facts.texts;
  notice(facts.texts ? "" : lost
    ? "The server was started again and has a new key. Open the address that it printed to see texts."
    : "Texts are not shown: this page has no key. Open the address that the server printed at its start.");
  chosen = Math.min(chosen, model.groups.length - 1);
  chooseGroups();
}

function notice(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text;
}

// -- drawing ------------------------------------------------------------------------------------------------------

function request() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; if (model.facts && model.counts) draw(); });
}

function draw() {
  const group = model.groups[chosen];
  if (view === "map") map.draw(group, model.now);
  else if (view === "tree") tree.draw(group, model.now);
  else table.draw(group, model.now, name);
  drawNumbers(model);
  lanes.draw(model);
  if (pointed.length) detail(group);
}

// Conversations by the order in which they came.
function name(block) {
  const branches = [...new Set([...model.groups[chosen].blocks.values()].map((each) => each.branch))].sort((a, b) => a - b);
  return String(branches.indexOf(block.branch) + 1);
}

function point(numbers) {
  pointed = numbers;
  detail(model.groups[chosen]);
  if (view === "tree") request();
}

function detail(group) {
  const box = byId("detail");
  if (!group || !pointed.length) return;
  const blocks = pointed.map((number) => group.blocks.get(number)).filter(Boolean);
  if (!blocks.length) {
    box.replaceChildren(element("p", "", `Block ${pointed[0]} is free.`));
    return;
  }
  const [first] = blocks, last = blocks.at(-1);
  const tokens = blocks.reduce((n, each) => n + each.tokens, 0);
  const what = blocks.length > 1 ? counted(blocks.length, "block") : `Block ${first.block}`;
  const used = first.references ? `held by ${counted(first.references, "sequence")}` : `last used ${seconds(Math.max(model.now - first.used, 0))} ago`;
  const words = `${what}: ${stateOf(group, first)}, ${used} \u00b7 ${counted(tokens, "token")} at ${first.position}\u2013${last.position + Math.max(last.tokens - 1, 0)} \u00b7 conversation ${name(first)}`;
  const made = [element("p", "", words)];
  if (first.own) {
    const text = blocks.slice(0, 24).map((each) => texts.of(chosen, each) ?? "").join("");
    made.push(element("pre", "", shown(text) + (blocks.length > 24 ? " \u2026" : "")));
  } else made.push(element("p", "quiet", model.facts.texts ? "Another key wrote it: its text is not shown." : "Its text is not shown without a key."));
  box.replaceChildren(...made);
}

function mark(chain) {
  map.marked = new Set(chain.map((each) => each.block));
}

function markLane(lane) {
  const group = model.groups[chosen];
  let found = [];
  if (lane) {
    found = group.path(lane.leaves[chosen] ?? -1);
    if (!found.length) found = [...group.blocks.values()].filter((each) => each.node < 0 && lane.seqs.includes(each.branch));
  }
  mark(found);
  request();
}

async function explanation(lane) {
  const headers = lane.whose === "own" ? live.headers() : {};
  const response = await fetch(`/kvarn/requests/${encodeURIComponent(lane.request)}`, { headers });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error?.message ?? `status ${response.status}`);
  return found;
}

// -- choices ------------------------------------------------------------------------------------------------------

function press(buttons, which) {
  for (const each of buttons) each.setAttribute("aria-pressed", String(each === which));
}

for (const button of byId("views").children) {
  button.addEventListener("click", () => {
    view = button.dataset.view;
    press(byId("views").children, button);
    for (const each of ["map", "tree", "table"]) byId(`view-${each}`).hidden = each !== view;
    byId("legend").hidden = view === "table";
    mark([]);
    request();
  });
}

function chooseGroups() {
  const box = byId("groups");
  box.hidden = model.groups.length < 2;
  box.replaceChildren(...model.groups.map((group, i) => {
    const button = element("button", "", `${group.layers} layers${group.window ? `, window ${group.window}` : ""}`);
    button.type = "button";
    button.setAttribute("aria-pressed", String(i === chosen));
    button.addEventListener("click", () => { chosen = i; press(box.children, button); pointed = []; mark([]); request(); });
    return button;
  }));
}

setInterval(() => { if (live && byId("status").dataset.state === "live" && !document.hidden) { model.idle(); request(); } }, 1000);
addEventListener("resize", request);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", request);
open(keyOfAddress());
