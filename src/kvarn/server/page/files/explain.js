// What /kvarn/requests says about a request, in words, with both texts where they part.

import { element, shown } from "./words.js";

function texts(ended) {
  const box = element("div", "split");
  for (const [title, side] of [["the earlier text", ended.theirs], ["this text", ended.ours]]) {
    if (!side) continue;
    const column = element("div");
    column.append(element("h4", "", title));
    const text = element("pre");
    text.append(element("span", "same", shown(ended.before ?? "")), element("mark", "", shown(side.onward ?? side.text ?? "")));
    column.append(text);
    box.append(column);
  }
  return box;
}

// Without the quotations, which stand below.
const brief = (each) =>
  `reused ${each.reused_tokens} of ${each.prompt_tokens} prompt tokens, computed ${each.recomputed_tokens} in ${Math.round(each.recompute_ms)} ms: ${each.because}`;

export function words(found) {
  const box = element("div", "words");
  for (const each of found.prompts ?? [found]) {
    const ended = each.reuse_ended;
    box.append(element("p", "", shown(ended?.theirs ? brief(each) : each.summary)));
    if (ended?.line) box.append(element("p", "quiet", `The line: ${shown(ended.line)}`));
    if (ended?.remedy) box.append(element("p", "remedy", `To reuse more: ${shown(ended.remedy)}.`));
    if (ended?.ours) box.append(texts(ended));
  }
  return box;
}
