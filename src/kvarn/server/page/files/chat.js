// The prompt box: a conversation that lives in this tab, streamed, and how much of each prompt was reused.

import { byId, count, element, shown } from "./words.js";

export class Chat {
  // `headers()` has the key; `facts()` says what the server can do.
  constructor(headers, facts) {
    Object.assign(this, { headers, facts, messages: [], running: null });
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("again").addEventListener("click", () => this.again());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("new").addEventListener("click", () => this.clear());
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    for (const each of byId("log").querySelectorAll(".turn")) each.remove();
    byId("hint").hidden = false;
    byId("new").hidden = true;
    byId("again").disabled = true;
    byId("prompt").focus();
  }

  send() {
    const text = byId("prompt").value;
    if (!text.trim() || this.running) return;
    byId("prompt").value = "";
    this.messages.push({ role: "user", content: text });
    this.turn("user", "You").append(...fenced(text));
    this.answer();
  }

  // The same prompt once more: the last answer is left out.
  again() {
    if (this.running) return;
    while (this.messages.length && this.messages.at(-1).role === "assistant") this.messages.pop();
    if (this.messages.length) this.answer();
  }

  turn(kind, title) {
    byId("hint").hidden = true;
    byId("new").hidden = false;
    const box = element("div", `turn ${kind}`);
    box.append(element("h3", "", title));
    const body = element("div", "body");
    box.append(body);
    byId("log").append(box);
    return body;
  }

  busy(on) {
    byId("send").hidden = on;
    byId("stop").hidden = !on;
    byId("again").disabled = on || !this.messages.length;
  }

  async answer() {
    const body = this.turn("model", this.facts()?.model ?? "model");
    this.running = new AbortController();
    this.busy(true);
    let text = "";
    let told = null;
    let problem = null;
    const show = () => { body.replaceChildren(...fenced(text)); follow(); };
    try {
      for await (const event of this.events(this.running.signal)) {
        if (event.error) throw new Error(event.error.message);
        const choice = event.choices?.[0];
        const piece = choice?.delta?.content ?? choice?.delta?.reasoning_content ?? choice?.text ?? "";
        if (piece) { text += piece; show(); }
        if (event.kvarn) told = event.kvarn;
      }
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.message;
    }
    if (text) this.messages.push({ role: "assistant", content: text });
    this.running = null;
    this.busy(false);
    if (told) body.parentElement.append(reuse(told));
    if (problem) body.parentElement.append(element("p", "problem", shown(problem)));
    follow();
    byId("said").textContent = problem ?? `The answer is complete. ${told?.summary ?? ""}`;
  }

  async *events(signal) {
    const chat = this.facts()?.chat ?? true;
    const max_tokens = Math.max(Number(byId("limit").value) || 200, 1);
    const body = chat ? { messages: this.messages } : { prompt: this.messages.map((each) => each.content).join("") };
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({ ...body, max_tokens, stream: true }),
      signal,
    });
    if (!response.ok) {
      const found = await response.json().catch(() => null);
      throw new Error(found?.error?.message ?? `the server answered with status ${response.status}`);
    }
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }
}

// The newest words stay in view, unless the reader has scrolled back.
function follow() {
  const log = byId("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

// Plain text, and code between fences.
function fenced(text) {
  return shown(text).split(/^```[^\n]*\n?/m).map((part, i) => element(i % 2 ? "pre" : "p", i % 2 ? "code" : "", part)).filter((each) => each.textContent.trim());
}

function reuse(told) {
  const each = told.prompts?.[0] ?? told;
  const box = element("div", "reuse");
  const bar = element("span", "bar");
  for (const [name, amount] of [["s-reused", each.reused_tokens], ["s-computed", each.recomputed_tokens]]) {
    const part = element("i", name);
    part.style.width = `${(100 * amount) / Math.max(each.prompt_tokens, 1)}%`;
    bar.append(part);
  }
  const line = element("p", "", `reused ${count(each.reused_tokens)} of ${count(each.prompt_tokens)} prompt tokens, computed `);
  line.append(element("b", "", count(each.recomputed_tokens)));
  box.append(bar, line);
  if (each.because) box.append(element("p", "quiet", shown(each.because)));
  return box;
}
