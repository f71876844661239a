// The details of one token: probabilities and neighbours; opens a neighbour in its document.

import { fetchJson } from "./api.js";
import { showError, count, find, make, marked, narrow, probability, visible } from "./dom.js";
import { share } from "./tokens.js";

let pinned = null;
let shown = null;

/** Show a token; one that was selected by a click stays when the pointer moves over others. */
export function inspect(text, place, how) {
  if (pinned && how === "hover") return;
  if (how === "choose" || pinned) pinned = { text, place };
  shown?.text.mark(-1);
  shown = { text, place };
  draw();
  if (how === "choose" || !narrow()) find("inspector").classList.add("open");
  if (how === "choose" && narrow()) uncover(text.elements[place]);
}

/** On a narrow page the panel covers the text: scroll the token above it. */
function uncover(element) {
  const { top } = element.getBoundingClientRect();
  const wanted = innerHeight * 0.22;
  if (top > wanted || top < 0) scrollBy({ top: top - wanted, behavior: "smooth" });
}

/** Update the panel after a change of the text's probabilities. */
export function refresh(text) {
  if (shown?.text === text) draw();
}

/** Clear the panel if it shows a token of this text. */
export function clear(text) {
  if (pinned?.text === text) pinned = null;
  if (shown?.text !== text) return;
  shown = null;
  find("inspected").replaceChildren(make("p", { class: "hint", text: "Select a token to see its probabilities and neighbours." }));
  find("inspector").classList.remove("open");
}

export function close() {
  const was = pinned ?? shown;
  pinned = null;
  find("inspector").classList.remove("open");
  if (was) was.text.elements[was.place]?.focus({ preventScroll: true });
}

function draw() {
  const { text, place } = shown;
  const token = text.tokens[place];
  if (!token) return;
  text.mark(place);
  const children = [
    make("h2", { class: "name" }, make("span", { class: "chip", text: visible(token.text) || "∅" })),
    make("p", { class: "summary", text: summary(token) }),
    make("dl", { class: "bars" },
      ...bar("language model", "p_LM", token.p_lm, "model"),
      ...bar("memory", "p_kNN", token.p_knn, "memory"),
      ...bar("mixture", "p", token.p, "both"),
      ...(typeof token.support === "number" ? bar("support", "right", token.support, "support") : [])),
    make("p", { class: "hint formula", text: formula(token) }),
  ];
  if (token.shares?.length) children.push(shares(token.shares));
  if (token.sources?.length) {
    children.push(make("h3", { text: "Neighbours" }), make("ol", { class: "neighbours" }, ...token.sources.map((each) => neighbour(each, token))));
  }
  find("inspected").replaceChildren(...children);
}

function summary(token) {
  if (token.p === null) return "The first token: it is not predicted.";
  if (token.p_knn === null) return "From the language model alone.";
  const fraction = share(token);
  if (fraction >= 0.995) return "From the memory.";
  if (fraction < 0.005) return "From the language model; the memory adds nothing.";
  return `${Math.round(fraction * 100)} % of its probability comes from the memory.`;
}

function formula(token) {
  if (token.p === null || token.p_knn === null) return "";
  const own = (1 - token.weight).toFixed(2);
  return `${probability(token.p)} = ${own} · ${probability(token.p_lm)} + ${token.weight.toFixed(2)} · ${probability(token.p_knn)}`;
}

function bar(name, sign, p, kind) {
  const fill = make("span", { class: `fill ${kind}`, style: { "--fraction": p ?? 0 } });
  return [
    make("dt", {}, name, make("small", { text: sign })),
    make("dd", {}, make("span", { class: "rail", "aria-hidden": "true" }, fill), make("b", { "data-figure": sign, text: probability(p) })),
  ];
}

function shares(given) {
  const rows = given.map((each) =>
    make("li", {}, make("span", { text: each.memory }), make("span", { text: `${probability(each.p)} × ${each.weight.toFixed(2)}` })));
  return make("ul", { class: "shares" }, ...rows);
}

function neighbour(source, token) {
  const pair = typeof source.source_text === "string";
  // Tokenizers of translation models write no space before the first token of a text.
  const agrees = pair ? source.token.trim() === token.text.trim() : source.token === token.text;
  const context = make("p", { class: "context" },
    `…${source.before.replace(/^[\s.,;:!?]+/, "")}`,
    ...marked(source.token, agrees ? "agrees" : ""), `${source.after.trimEnd()}…`);
  const head = make("div", { class: "neighbour-head" },
    make("span", { class: "rail", "aria-hidden": "true" }, make("span", { class: "fill memory", style: { "--fraction": source.weight } })),
    make("b", { class: "weight", text: `${(source.weight * 100).toFixed(source.weight < 0.1 ? 1 : 0)} %` }),
    make("span", { class: "vote", text: visible(source.token), title: agrees ? "the same token" : "another token" }),
  );
  const read = make("button", {
    type: "button", class: "document", title: "Open the document", onclick: () => openPassage(source.number, source.entry),
  }, make("span", { text: source.document }));
  const given = pair ? [make("p", { class: "pair-source", text: source.source_text })] : [];
  return make("li", { class: agrees ? "agrees" : "differs" }, head, ...given, context, read);
}

// The dialog with a passage of a document.
const PASSAGE_TOKENS = 400;
let open = null;

/** Open a document at an entry of the store, or at its beginning. */
export async function openPassage(number, entry = null) {
  try {
    const query = entry === null ? `limit=${PASSAGE_TOKENS}` : `entry=${entry}&limit=${PASSAGE_TOKENS}`;
    const passage = await fetchJson(`/v1/documents/${number}?${query}`);
    // A passage has the requested number of tokens, except at the end of the document.
    const length = passage.more ? PASSAGE_TOKENS : passage.tokens - passage.offset;
    open = { number, begin: passage.offset, end: passage.offset + length, tokens: passage.tokens };
    find("passage-title").textContent = passage.id;
    find("passage-source").textContent = passage.source === passage.id ? "" : passage.source;
    find("passage-pair").textContent = passage.source_text ?? "";
    find("passage-pair").hidden = !passage.source_text;
    const mark = passage.token ? marked(passage.token) : [];
    find("passage-text").replaceChildren(passage.before, ...mark, passage.after);
    place();
    if (!find("passage").open) find("passage").showModal();
    find("passage-text").querySelector("mark")?.scrollIntoView({ block: "center" });
  } catch (error) {
    showError(error);
  }
}

/** Show an earlier or later passage. */
export async function turn(step) {
  if (!open) return;
  const begin = step < 0 ? Math.max(0, open.begin - PASSAGE_TOKENS) : open.end;
  const limit = step < 0 ? open.begin - begin : PASSAGE_TOKENS;
  if (limit <= 0 || begin >= open.tokens) return;
  try {
    const passage = await fetchJson(`/v1/documents/${open.number}?offset=${begin}&limit=${limit}`);
    if (step < 0) find("passage-text").prepend(passage.before);
    else find("passage-text").append(passage.before);
    if (step < 0) open.begin = begin;
    else open.end = Math.min(begin + limit, open.tokens);
    place();
  } catch (error) {
    showError(error);
  }
}

function place() {
  find("earlier").disabled = open.begin === 0;
  find("later").disabled = open.end >= open.tokens;
  find("passage-place").textContent = `tokens ${count(open.begin + 1)}–${count(open.end)} of ${count(open.tokens)}`;
}
