// The stream of /kvarn/live: read line by line, with the key in a header, and opened again when it ends.

const FIRST_WAIT = 500, LONGEST_WAIT = 10000;  // milliseconds before the next attempt; they double
const SILENCE = 40000;  // a server that is there sends a line every few seconds, unless one step takes longer

export class Live {
  // `tell` gets {state, text}; `frame` each line; `refused` is called when the key is missing or wrong.
  constructor(key, frame, tell, refused) {
    this.key = key;
    this.frame = frame;
    this.tell = tell;
    this.refused = refused;
    this.wait = FIRST_WAIT;
    this.stopped = false;
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  async run() {
    while (!this.stopped) {
      this.tell("connecting", "connecting");
      try {
        const again = await this.watch();
        if (!again) return;
      } catch (error) {
        if (this.stopped) return;
      }
      this.tell("lost", `no answer from the server: trying again in ${Math.round(this.wait / 1000) || 1} s`);
      await new Promise((done) => setTimeout(done, this.wait * (0.8 + 0.4 * Math.random())));
      this.wait = Math.min(2 * this.wait, LONGEST_WAIT);
    }
  }

  async watch() {
    this.abort = new AbortController();
    const response = await fetch("/kvarn/live", { headers: this.headers(), cache: "no-store", signal: this.abort.signal });
    if (response.status === 401) { this.refused(Boolean(this.key)); return false; }
    if (response.status === 429) {
      this.wait = LONGEST_WAIT;
      this.tell("lost", "twenty pages watch this server already: this one waits for its turn");
      await response.body?.cancel();
      await new Promise((done) => setTimeout(done, LONGEST_WAIT));
      return true;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    await this.read(response.body.getReader());
    return true;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const quiet = setTimeout(() => this.abort.abort(), SILENCE);
      const { done, value } = await reader.read().finally(() => clearTimeout(quiet));
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line) continue;
        this.wait = FIRST_WAIT;
        this.frame(JSON.parse(line));
      }
    }
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
  }
}
