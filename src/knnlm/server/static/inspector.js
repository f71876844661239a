// Show one token: how probable it was, to whom, and which passages voted. Opens a passage in its document.

import { ask } from "./api.js";
import { complain, count, find, make, marked, narrow, probability, visible } from "./dom.js";
import { share } from "./tokens.js";

let pinned = null;
let shown = null;

/** Look at a token of a text; one that was chosen stays when the pointer wanders over others. */
export function inspect(text, place, how) {
  if (pinned && how === "hover") return;
  if (how === "choose" || pinned) pinned = { text, place };
  shown?.text.mark(-1);
  shown = { text, place };
  draw();
  if (how === "choose" || !narrow()) find("inspector").classList.add("open");
  if (how === "choose" && narrow()) uncover(text.elements[place]);
}

/** On a narrow page the sheet lies over the text: bring the word above it. */
function uncover(element) {
  const { top } = element.getBoundingClientRect();
  const wanted = innerHeight * 0.22;
  if (top > wanted || top < 0) scrollBy({ top: top - wanted, behavior: "smooth" });
}

/** Draw it again where its figures have changed. */
export function refresh(text) {
  if (shown?.text === text) draw();
}

/** Let go of a text that is no more. */
export function forget(text) {
  if (pinned?.text === text) pinned = null;
  if (shown?.text !== text) return;
  shown = null;
  find("inspected").replaceChildren(make("p", { class: "hint", text: "Choose a word of a text to see who spoke for it." }));
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
  const parts = [
    make("h2", { class: "name" }, make("span", { class: "chip", text: visible(token.text) || "∅" })),
    make("p", { class: "verdict", text: verdict(token) }),
    make("dl", { class: "bars" },
      ...bar("the model", "p_LM", token.p_lm, "model"),
      ...bar("the memory", "p_kNN", token.p_knn, "memory"),
      ...bar("together", "p", token.p, "both")),
    make("p", { class: "hint formula", text: formula(token) }),
  ];
  if (token.shares?.length) parts.push(shares(token.shares));
  if (token.sources?.length) {
    parts.push(make("h3", { text: "Who voted" }), make("ol", { class: "voters" }, ...token.sources.map((each) => voter(each, token))));
  }
  find("inspected").replaceChildren(...parts);
}

function verdict(token) {
  if (token.p === null) return "Nothing was read before it, so nobody was asked.";
  if (token.p_knn === null) return "The model alone said this.";
  const part = share(token);
  if (part >= 0.995) return "The memory said this.";
  if (part < 0.005) return "The model said this; the memory had nothing to add.";
  return `${Math.round(part * 100)} % of its probability came from the memory.`;
}

function formula(token) {
  if (token.p === null || token.p_knn === null) return "";
  const own = (1 - token.weight).toFixed(2);
  return `${probability(token.p)} = ${own} · ${probability(token.p_lm)} + ${token.weight.toFixed(2)} · ${probability(token.p_knn)}`;
}

function bar(name, sign, p, kind) {
  const fill = make("span", { class: `fill ${kind}`, style: { "--part": p ?? 0 } });
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

function voter(source, token) {
  const agrees = source.token === token.text;
  const context = make("p", { class: "context" },
    `…${source.before.replace(/^[\s.,;:!?]+/, "")}`,
    ...marked(source.token, agrees ? "agrees" : ""), `${source.after.trimEnd()}…`);
  const head = make("div", { class: "voter-head" },
    make("span", { class: "rail", "aria-hidden": "true" }, make("span", { class: "fill memory", style: { "--part": source.weight } })),
    make("b", { class: "weight", text: `${(source.weight * 100).toFixed(source.weight < 0.1 ? 1 : 0)} %` }),
    make("span", { class: "vote", text: visible(source.token), title: agrees ? "the same word" : "another word" }),
  );
  const read = make("button", {
    type: "button", class: "document", title: "Read it there", onclick: () => openPassage(source.number, source.entry),
  }, make("span", { text: source.document }));
  return make("li", { class: agrees ? "agrees" : "differs" }, head, context, read);
}

// The passage dialog: what is shown of which document.
const PIECE = 400;
let open = null;

/** Open a document at an entry of the store, or at its beginning. */
export async function openPassage(number, entry = null) {
  try {
    const query = entry === null ? `limit=${PIECE}` : `entry=${entry}&limit=${PIECE}`;
    const piece = await ask(`/v1/documents/${number}?${query}`);
    // A piece has as many tokens as were asked for, except at the end of the document.
    const length = piece.more ? PIECE : piece.tokens - piece.offset;
    open = { number, begin: piece.offset, end: piece.offset + length, tokens: piece.tokens };
    find("passage-title").textContent = piece.id;
    find("passage-source").textContent = piece.source === piece.id ? "" : piece.source;
    const mark = piece.token ? marked(piece.token) : [];
    find("passage-text").replaceChildren(piece.before, ...mark, piece.after);
    place();
    if (!find("passage").open) find("passage").showModal();
    find("passage-text").querySelector("mark")?.scrollIntoView({ block: "center" });
  } catch (error) {
    complain(error);
  }
}


export async function turn(step) {
  if (!open) return;
  const begin = step < 0 ? Math.max(0, open.begin - PIECE) : open.end;
  const limit = step < 0 ? open.begin - begin : PIECE;
  if (limit <= 0 || begin >= open.tokens) return;
  try {
    const piece = await ask(`/v1/documents/${open.number}?offset=${begin}&limit=${limit}`);
    if (step < 0) find("passage-text").prepend(piece.before);
    else find("passage-text").append(piece.before);
    if (step < 0) open.begin = begin;
    else open.end = Math.min(begin + limit, open.tokens);
    place();
  } catch (error) {
    complain(error);
  }
}

function place() {
  find("earlier").disabled = open.begin === 0;
  find("later").disabled = open.end >= open.tokens;
  find("passage-place").textContent = `tokens ${count(open.begin + 1)}–${count(open.end)} of ${count(open.tokens)}`;
}
