// Score a text: the tokens that the memory makes more or less probable.

import { post } from "./api.js";
import { Rescorer } from "./rescore.js";
import { showError, clearErrors, count, find, make, perplexity, probability, visible } from "./dom.js";
import { clear, inspect, refresh } from "./inspector.js";
import * as settings from "./settings.js";
import { byGain, gain, TokenText } from "./tokens.js";

const SOURCES = 6;
const LISTED = 5;

/** Add the listeners of the tab. */
export function begin() {
  const text = new TokenText(find("text-score"), { tint: byGain, show: inspect });
  const rescorer = new Rescorer((response) => {
    text.update(response.knnlm.tokens);
    refresh(text);
    showTotals(response, text);
  });
  find("score-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!find("measure").disabled) score(text, rescorer);
  });
  find("given").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("score-form").requestSubmit();
  });
}

async function score(text, rescorer) {
  const requested = settings.chosen();
  clearErrors();
  rescorer.end();
  find("measure").disabled = true;
  find("measure").textContent = "Reading…";
  try {
    const response = await post("/v1/score", { text: find("given").value, sources: SOURCES, memory: requested });
    clear(text);
    text.clear();
    text.add(response.knnlm.tokens);
    showTotals(response, text);
    find("welcome-score").hidden = true;
    find("scored").hidden = false;
    rescorer.begin(response.knnlm.id, response.knnlm.k, requested);
    if (JSON.stringify(settings.chosen()) !== JSON.stringify(requested)) rescorer.run();
  } catch (error) {
    showError(error);
  } finally {
    find("measure").disabled = false;
    find("measure").textContent = "Score";
  }
}

function showTotals(response, text) {
  find("perplexity-without").textContent = perplexity(response.perplexity_lm);
  find("perplexity-with").textContent = perplexity(response.perplexity);
  find("count").textContent = count(response.tokens);
  const change = (response.perplexity / response.perplexity_lm - 1) * 100;
  const known = response.perplexity !== null && response.perplexity_lm !== null;
  find("change").textContent = known ? `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(1)} %` : "—";
  find("change").className = !known || Math.abs(change) < 0.05 ? "" : change < 0 ? "helps" : "hurts";
  const order = text.tokens.map((token, place) => [gain(token), place]).sort((a, b) => b[0] - a[0]);
  listTokens(find("best"), order.slice(0, LISTED).filter(([nats]) => nats > 0), text);
  listTokens(find("worst"), order.slice(-LISTED).reverse().filter(([nats]) => nats < 0), text);
}

function listTokens(list, chosen, text) {
  list.replaceChildren(...chosen.map(([nats, place]) => {
    const token = text.tokens[place];
    const before = text.tokens.slice(Math.max(0, place - 6), place).map((each) => each.text).join("");
    const go = make("button", { type: "button", class: "listed", onclick: () => text.choose(place) },
      make("span", { class: "around" }, before.replaceAll("\n", " ") + (token.text.startsWith(" ") ? " " : ""),
        make("mark", { class: nats > 0 ? "helps" : "hurts", text: visible(token.text.replace(/^ (?=.)/, "")) })),
      make("span", { class: "odds", text: `${probability(token.p_lm)} → ${probability(token.p)}` }));
    return make("li", {}, go);
  }));
  if (!chosen.length) list.append(make("li", { class: "hint", text: "None." }));
}
