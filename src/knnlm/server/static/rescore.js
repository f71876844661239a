// Rescore a text when sliders move: one request at a time; the last position of the sliders wins.

import { post } from "./api.js";
import { showError, find } from "./dom.js";
import * as settings from "./settings.js";

export class Rescorer {
  /** `apply` gets the response with new totals and tokens. */
  constructor(apply) {
    this.apply = apply;
    this.trace = null;
    this.running = false;
    this.pending = false;
    settings.onMove(() => this.run());
  }

  /** Set the trace, the number of its neighbours, and the memory settings of its request. */
  begin(trace, k, requested) {
    this.trace = trace;
    this.k = k;
    this.requested = requested;
  }

  end() {
    this.trace = null;
  }

  async run() {
    this.pending = true;
    if (this.running || !this.trace) return;
    this.running = true;
    try {
      while (this.pending && this.trace) {
        this.pending = false;
        await this.#once(this.trace);
      }
    } finally {
      this.running = false;
    }
  }

  async #once(id) {
    const moved = settings.chosen();
    const body = { id };
    // A setting of the request that was reset needs the server's value.
    for (const name of ["lambda", "k", "knn_temperature"]) {
      const wanted = moved[name] ?? (name in this.requested ? settings.value(name) : null);
      if (wanted !== null) body[name] = wanted;
    }
    const maxK = this.k;
    if (body.k > maxK) body.k = maxK;
    try {
      const answer = await post("/v1/rescore", body);
      if (id !== this.trace) return;
      this.apply(answer);
      find("mixing-note").textContent = (moved.k ?? 0) > maxK
        ? `Only ${maxK} neighbours were retrieved. Generate or score the text again to use more.`
        : "Rescored without running the model or a search.";
    } catch (error) {
      this.pending = false;
      showError(error);
    }
  }
}
