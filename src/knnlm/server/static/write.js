// Write with and without the memory, side by side, and weigh what was written anew.

import { stream } from "./api.js";
import { Again } from "./again.js";
import { complain, content, find, perplexity, plural } from "./dom.js";
import { forget, inspect, refresh } from "./inspector.js";
import * as settings from "./settings.js";
import { byShare, TokenText } from "./tokens.js";

const SOURCES = 8;
let stopping = null;

/** Take charge of the tab. */
export function begin() {
  const without = new TokenText(find("text-without"), { tint: byShare, show: inspect });
  const having = new TokenText(find("text-with"), { tint: byShare, show: inspect });
  const again = new Again((answer) => {
    having.update(answer.knnlm.tokens);
    refresh(having);
    tell(having, find("figures-with"));
  });
  find("write-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!stopping) write({ without, having, again });
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("write-form").requestSubmit();
  });
  find("stop").addEventListener("click", () => stopping?.abort());
}

async function write({ without, having, again }) {
  const compare = find("beside").checked;
  const asked = settings.chosen();
  const body = {
    prompt: find("prompt").value,
    max_tokens: Number(find("length").value),
    temperature: Number(find("sampling").value),
    seed: Number(find("seed").value),
    sources: SOURCES,
  };
  prepare(compare, [without, having], body.prompt, again);
  const { signal } = stopping;
  const texts = [one(having, { ...body, memory: asked }, find("figures-with"), signal)];
  if (compare) texts.push(one(without, { ...body, sources: 0, memory: { off: true } }, find("figures-without"), signal));
  const [written, other] = await Promise.allSettled(texts);
  for (const each of [written, other]) {
    if (each?.status === "rejected" && each.reason.name !== "AbortError") complain(each.reason);
  }
  busy(false);
  const trace = having.trace;
  if (trace) {
    again.begin(trace.id, trace.k, asked);
    // A slider may have been moved while the text was coming.
    if (JSON.stringify(settings.chosen()) !== JSON.stringify(asked)) again.run();
  }
}

function prepare(compare, texts, prompt, again) {
  content();
  again.end();
  for (const text of texts) {
    forget(text);
    text.clear(prompt);
    text.trace = null;
  }
  find("figures-with").textContent = find("figures-without").textContent = "";
  find("welcome-write").hidden = true;
  find("panes").hidden = find("legend-write").hidden = false;
  find("pane-without").hidden = !compare;
  find("panes").classList.toggle("two", compare);
  stopping = new AbortController();
  busy(true);
}

async function one(text, body, figures, signal) {
  const pane = text.root.closest(".pane");
  pane.classList.add("coming");
  try {
    for await (const chunk of stream("/v1/completions", body, { signal })) {
      for (const choice of chunk.choices) {
        text.trace = choice.knnlm;
        text.add(choice.knnlm.tokens);
      }
    }
  } finally {
    pane.classList.remove("coming");
    tell(text, figures);
  }
}

/** Sum up a text: its length, and how surprising it was. */
function tell(text, figures) {
  const known = text.tokens.filter((token) => token.p !== null);
  if (!known.length) {
    figures.textContent = "Nothing was written: the model ended the text at once.";
    return;
  }
  const mean = (name) => Math.exp(-known.reduce((sum, token) => sum + Math.log(Math.max(token[name], 1e-300)), 0) / known.length);
  const own = `perplexity ${perplexity(mean("p"))}`;
  const alone = known.some((token) => token.p_knn !== null) ? `, ${perplexity(mean("p_lm"))} to the model alone` : "";
  figures.textContent = `${plural(known.length, "token")} · ${own}${alone}`;
}

function busy(on) {
  find("go").disabled = on;
  find("go").textContent = on ? "Writing…" : "Write";
  find("stop").hidden = !on;
  if (!on) stopping = null;
}
