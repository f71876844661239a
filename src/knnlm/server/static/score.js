// Score a text: where the memory helps and where it hurts.

import { post } from "./api.js";
import { Again } from "./again.js";
import { complain, content, count, find, make, perplexity, probability, visible } from "./dom.js";
import { forget, inspect, refresh } from "./inspector.js";
import * as settings from "./settings.js";
import { byGain, gain, TokenText } from "./tokens.js";

const SOURCES = 6;
const SPOTS = 5;

/** Take charge of the tab. */
export function begin() {
  const text = new TokenText(find("text-score"), { tint: byGain, show: inspect });
  const again = new Again((answer) => {
    text.update(answer.knnlm.tokens);
    refresh(text);
    tell(answer, text);
  });
  find("score-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!find("measure").disabled) score(text, again);
  });
  find("given").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("score-form").requestSubmit();
  });
}

async function score(text, again) {
  const asked = settings.chosen();
  content();
  again.end();
  find("measure").disabled = true;
  find("measure").textContent = "Reading…";
  try {
    const answer = await post("/v1/score", { text: find("given").value, sources: SOURCES, memory: asked });
    forget(text);
    text.clear();
    text.add(answer.knnlm.tokens);
    tell(answer, text);
    find("welcome-score").hidden = true;
    find("scored").hidden = false;
    again.begin(answer.knnlm.id, answer.knnlm.k, asked);
    if (JSON.stringify(settings.chosen()) !== JSON.stringify(asked)) again.run();
  } catch (error) {
    complain(error);
  } finally {
    find("measure").disabled = false;
    find("measure").textContent = "Score";
  }
}

function tell(answer, text) {
  find("perplexity-without").textContent = perplexity(answer.perplexity_lm);
  find("perplexity-with").textContent = perplexity(answer.perplexity);
  find("count").textContent = count(answer.tokens);
  const change = (answer.perplexity / answer.perplexity_lm - 1) * 100;
  const known = answer.perplexity !== null && answer.perplexity_lm !== null;
  find("change").textContent = known ? `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(1)} %` : "—";
  find("change").className = !known || Math.abs(change) < 0.05 ? "" : change < 0 ? "helps" : "hurts";
  const order = text.tokens.map((token, place) => [gain(token), place]).sort((a, b) => b[0] - a[0]);
  spots(find("best"), order.slice(0, SPOTS).filter(([nats]) => nats > 0), text);
  spots(find("worst"), order.slice(-SPOTS).reverse().filter(([nats]) => nats < 0), text);
}

function spots(list, chosen, text) {
  list.replaceChildren(...chosen.map(([nats, place]) => {
    const token = text.tokens[place];
    const before = text.tokens.slice(Math.max(0, place - 6), place).map((each) => each.text).join("");
    const go = make("button", { type: "button", class: "spot", onclick: () => text.choose(place) },
      make("span", { class: "around" }, before.replaceAll("\n", " ") + (token.text.startsWith(" ") ? " " : ""),
        make("mark", { class: nats > 0 ? "helps" : "hurts", text: visible(token.text.replace(/^ (?=.)/, "")) })),
      make("span", { class: "odds", text: `${probability(token.p_lm)} → ${probability(token.p)}` }));
    return make("li", {}, go);
  }));
  if (!chosen.length) list.append(make("li", { class: "hint", text: "Nowhere." }));
}
