// Weigh a text anew when sliders move: one request at a time, and the last position always wins.

import { post } from "./api.js";
import { complain, find } from "./dom.js";
import * as settings from "./settings.js";

export class Again {
  /** `apply` is given the new totals and tokens. */
  constructor(apply) {
    this.apply = apply;
    this.trace = null;
    this.busy = false;
    this.wanted = false;
    settings.onMove(() => this.run());
  }

  /** Say which text is there, which k it was looked up with, and what was asked of the memory. */
  begin(trace, k, asked) {
    this.trace = trace;
    this.k = k;
    this.asked = asked;
  }

  end() {
    this.trace = null;
  }

  async run() {
    this.wanted = true;
    if (this.busy || !this.trace) return;
    this.busy = true;
    try {
      while (this.wanted && this.trace) {
        this.wanted = false;
        await this.#once(this.trace);
      }
    } finally {
      this.busy = false;
    }
  }

  async #once(id) {
    const moved = settings.chosen();
    const body = { id };
    // A text that was asked for with λ = 0.9 and is now wanted as served has to be told so.
    for (const name of ["lambda", "k", "knn_temperature"]) {
      const wanted = moved[name] ?? (name in this.asked ? settings.value(name) : null);
      if (wanted !== null) body[name] = wanted;
    }
    const most = this.k;
    if (body.k > most) body.k = most;
    try {
      const answer = await post("/v1/rescore", body);
      if (id !== this.trace) return;
      this.apply(answer);
      find("mixing-note").textContent = (moved.k ?? 0) > most
        ? `Only ${most} neighbours were looked for. Make the text again to hear more.`
        : "Weighed again: no model ran, nothing was searched.";
    } catch (error) {
      this.wanted = false;
      complain(error);
    }
  }
}
