// A text whose tokens can be selected by pointer and keyboard, and are coloured.

import { make, visible } from "./dom.js";

/** Return the fraction of a token's probability that comes from the memory, from 0 to 1. */
export function share(token) {
  if (!token.p || token.p_knn === null) return 0;
  return Math.min(1, (token.weight * token.p_knn) / token.p);
}

/** Whether a token has a support, and it is below one half. */
export function unsupported(token) {
  return typeof token.support === "number" && token.support < 0.5;
}

/** Return the nats that the memory adds to a token's log-probability. */
export function gain(token) {
  if (token.p === null || token.p_lm === null) return 0;
  if (token.p === token.p_lm) return 0;
  return Math.log(Math.max(token.p, 1e-300)) - Math.log(Math.max(token.p_lm, 1e-300));
}

export function byShare(element, token) {
  const fraction = share(token);
  element.style.setProperty("--strength", fraction.toFixed(3));
  element.dataset.share = fraction.toFixed(3);
  element.classList.toggle("strong", fraction >= 0.5);
  element.classList.toggle("unsupported", unsupported(token));
}

export function byGain(element, token) {
  const nats = gain(token);
  // The gain is unbounded, the loss is bounded by λ: a factor of twenty is fully green, a factor of two fully red.
  element.style.setProperty("--strength", Math.min(1, Math.abs(nats) / (nats > 0 ? 3 : 0.7)).toFixed(3));
  element.dataset.gain = nats.toFixed(3);
  element.classList.toggle("helps", nats > 0.05);
  element.classList.toggle("hurts", nats < -0.05);
}

export class TokenText {
  /** `tint` colours an element by its token; `show` is called with the token's place and "hover", "focus" or "choose". */
  constructor(root, { tint, show }) {
    this.root = root;
    this.tint = tint;
    this.show = show;
    this.clear();
    root.addEventListener("pointerover", (event) => this.#pointed(event, "hover"));
    root.addEventListener("click", (event) => this.#pointed(event, "choose"));
    root.addEventListener("focusin", (event) => this.#pointed(event, "focus"));
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Remove all tokens, and set the prompt before them. */
  clear(given = "") {
    this.tokens = [];
    this.elements = [];
    this.root.replaceChildren(...(given ? [make("span", { class: "given", text: given })] : []));
  }

  add(tokens) {
    for (const token of tokens) {
      const word = token.text.trimStart();
      const space = word ? token.text.slice(0, token.text.length - word.length) : "";
      // The leading space of a token is not coloured.
      const element = make("span", {
        class: "token", role: "button", tabindex: this.elements.length ? "-1" : "0",
        "aria-label": word ? undefined : visible(token.text) || "part of a character",
      }, space, make("span", { class: "word", text: word || token.text }));
      if (token.text === "\n") element.classList.add("break");
      this.tint(element, token);
      this.tokens.push(token);
      this.elements.push(element);
      this.root.append(element);
    }
  }

  /** Set new probabilities of the same tokens. */
  update(tokens) {
    tokens.forEach((token, place) => {
      if (!this.elements[place]) return;
      const old = this.tokens[place];
      this.tokens[place] = { ...token, sources: token.sources.length ? token.sources : old.sources };
      this.tint(this.elements[place], this.tokens[place]);
    });
  }

  /** Select a token, and scroll to it. */
  choose(place) {
    const element = this.elements[place];
    element.focus();
    element.scrollIntoView({ block: "nearest" });
    this.show(this, place, "choose");
  }

  /** Mark the selected token. */
  mark(place) {
    this.root.querySelector(".selected")?.classList.remove("selected");
    this.elements[place]?.classList.add("selected");
  }

  #pointed(event, how) {
    const place = this.elements.indexOf(event.target.closest(".token"));
    if (place < 0) return;
    if (how !== "hover") {
      for (const element of this.elements) element.tabIndex = -1;
      this.elements[place].tabIndex = 0;
    }
    this.show(this, place, how);
  }

  #key(event) {
    const place = this.elements.indexOf(event.target);
    if (place < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = {
      ArrowRight: () => place + 1, ArrowLeft: () => place - 1, Home: () => 0, End: () => this.elements.length - 1,
      ArrowDown: () => this.#line(place, 1), ArrowUp: () => this.#line(place, -1),
    }[event.key];
    if (next) {
      event.preventDefault();
      this.elements[Math.min(Math.max(next(), 0), this.elements.length - 1)].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.show(this, place, "choose");
    }
  }

  /** Return the token above or below. */
  #line(place, step) {
    const here = this.elements[place].getBoundingClientRect();
    let best = place, least = Infinity, line = null;
    for (let at = place + step; this.elements[at]; at += step) {
      const there = this.elements[at].getBoundingClientRect();
      if (Math.abs(there.top - here.top) < here.height / 2) continue;
      line ??= there.top;
      if (Math.abs(there.top - line) > here.height / 2) break;
      const away = Math.abs(there.left + there.width / 2 - here.left - here.width / 2);
      if (away < least) [best, least] = [at, away];
    }
    return best;
  }
}
