// Generate or translate with memory and by the language model alone, side by side, and rescore the text.

import { post, stream } from "./api.js";
import { Rescorer } from "./rescore.js";
import { showError, clearErrors, find, perplexity, plural } from "./dom.js";
import { clear, inspect, refresh } from "./inspector.js";
import * as settings from "./settings.js";
import { byShare, TokenText, unsupported } from "./tokens.js";

const SOURCES = 8;
const MAX_TRANSLATION = 256; // tokens, as the server's default
let stopping = null;
let pairs = false; // whether the store has pairs: the prompt is a source, and is translated

/** Set the tab to what the served model does. */
export function prepare(metadata) {
  pairs = Boolean(metadata.pairs);
  if (!pairs) return;
  const languages = metadata.src_lang && metadata.tgt_lang ? ` (${metadata.src_lang} → ${metadata.tgt_lang})` : "";
  find("tab-generate").textContent = "Translate";
  find("prompt-label").textContent = `Source text${languages}`;
  find("prompt").placeholder = "The text to translate…";
  find("welcome-what").textContent = "Enter a text";
  find("title-without").textContent = "Model alone";
  find("length").value = Math.min(MAX_TRANSLATION, metadata.max_output_tokens, (metadata.max_length ?? Infinity) - 1);
  find("beams-field").hidden = false;
  busy(false);
}

/** Add the listeners of the tab. */
export function begin() {
  const alone = new TokenText(find("text-without"), { tint: byShare, show: inspect });
  const withMemory = new TokenText(find("text-with"), { tint: byShare, show: inspect });
  const rescorer = new Rescorer((answer) => {
    withMemory.update(answer.knnlm.tokens);
    refresh(withMemory);
    summarise(withMemory, find("figures-with"));
  });
  find("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!stopping) generate({ alone, withMemory, rescorer });
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("generate-form").requestSubmit();
  });
  find("stop").addEventListener("click", () => stopping?.abort());
}

async function generate({ alone, withMemory, rescorer }) {
  const compare = find("compare").checked;
  const requested = settings.chosen();
  const prompt = find("prompt").value;
  const body = {
    ...(pairs ? { text: prompt, tokens: true } : { prompt }),
    ...(pairs && find("beams").value ? { beams: Number(find("beams").value) } : {}),
    max_tokens: Number(find("length").value),
    temperature: Number(find("sampling").value),
    seed: Number(find("seed").value),
    sources: SOURCES,
  };
  start(compare, [alone, withMemory], pairs ? "" : prompt, rescorer);
  const { signal } = stopping;
  const texts = [generateOne(withMemory, { ...body, memory: requested }, find("figures-with"), signal)];
  if (compare) texts.push(generateOne(alone, { ...body, sources: 0, memory: { off: true } }, find("figures-without"), signal));
  const [written, other] = await Promise.allSettled(texts);
  for (const each of [written, other]) {
    if (each?.status === "rejected" && each.reason.name !== "AbortError") showError(each.reason);
  }
  busy(false);
  const trace = withMemory.trace;
  if (trace) {
    rescorer.begin(trace.id, trace.k, requested);
    // A slider may have moved while the text arrived.
    if (JSON.stringify(settings.chosen()) !== JSON.stringify(requested)) rescorer.run();
  }
}

function start(compare, texts, prompt, rescorer) {
  clearErrors();
  rescorer.end();
  for (const text of texts) {
    clear(text);
    text.clear(prompt);
    text.trace = null;
  }
  find("figures-with").textContent = find("figures-without").textContent = "";
  find("legend-support").hidden = true;
  find("welcome-generate").hidden = true;
  find("panes").hidden = find("legend-generate").hidden = false;
  find("pane-without").hidden = !compare;
  find("panes").classList.toggle("two", compare);
  stopping = new AbortController();
  busy(true);
}

async function generateOne(text, body, figures, signal) {
  const pane = text.root.closest(".pane");
  pane.classList.add("loading");
  try {
    for await (const choice of choices(body, signal)) {
      text.trace = choice.knnlm;
      text.add(choice.knnlm.tokens);
    }
  } finally {
    pane.classList.remove("loading");
    summarise(text, figures);
  }
}

/** Yield the translation, or the parts of a completion as they arrive. */
async function* choices(body, signal) {
  if (pairs) yield* (await post("/v1/translate", body, { signal })).translations;
  else for await (const chunk of stream("/v1/completions", body, { signal })) yield* chunk.choices;
}

/** Show the length and perplexity of a text. */
function summarise(text, figures) {
  const known = text.tokens.filter((token) => token.p !== null);
  if (!known.length) {
    figures.textContent = "No tokens: the model ended the text at once.";
    return;
  }
  const mean = (name) => Math.exp(-known.reduce((sum, token) => sum + Math.log(Math.max(token[name], 1e-300)), 0) / known.length);
  const own = `perplexity ${perplexity(mean("p"))}`;
  const alone = known.some((token) => token.p_knn !== null) ? `, ${perplexity(mean("p_lm"))} by the model alone` : "";
  figures.textContent = `${plural(known.length, "token")} · ${own}${alone}${supported(known)}`;
}

/** Return the share of tokens with a support of at least one half, in words; nothing if none has a support. */
function supported(tokens) {
  const known = tokens.filter((token) => typeof token.support === "number");
  if (!known.length) return "";
  find("legend-support").hidden = false;
  const share = known.filter((token) => !unsupported(token)).length / known.length;
  return ` · ${Math.round(share * 100)} % supported`;
}

function busy(on) {
  find("go").disabled = on;
  const verb = pairs ? "Translat" : "Generat";
  find("go").textContent = on ? `${verb}ing…` : `${verb}e`;
  find("stop").hidden = !on;
  if (!on) stopping = null;
}
