// The sliders of λ, k and τ. A slider that was not moved keeps the server's setting.

import { count, find, make } from "./dom.js";

const sliders = {};
const listeners = [];

const KINDS = {
  lambda: { sign: "λ", name: "weight of the memories", show: (value) => value.toFixed(2) },
  k: { sign: "k", name: "neighbours", show: (value) => count(value) },
  knn_temperature: { sign: "τ", name: "temperature of the votes", show: (value) => (value >= 100 ? value.toFixed(0) : value.toPrecision(3)) },
};

/** Build the sliders from the server's settings. */
export function prepare(metadata) {
  const lambda = metadata.lambda;
  const maxK = Math.max(metadata.k ?? 1, Math.min(metadata.keys ?? 1, 1024));
  const scales = {
    lambda: linear(lambda),
    k: metadata.k === null ? null : powers(metadata.k, 1, maxK, Math.round),
    knn_temperature: metadata.knn_temperature === null ? null : powers(metadata.knn_temperature, metadata.knn_temperature / 100, metadata.knn_temperature * 100),
  };
  find("sliders").replaceChildren();
  for (const [name, kind] of Object.entries(KINDS)) {
    if (scales[name]) find("sliders").append(makeSlider(name, kind, scales[name]));
  }
}

const linear = (served) => ({ served, from: (x) => x / 1000, to: (value) => value * 1000 });

/** A scale on which every step is a factor. */
function powers(served, least, most, round = (value) => value) {
  const span = Math.log(Math.max(most, least + 1e-9) / least) || 1;
  return {
    served,
    from: (x) => round(least * Math.exp((x / 1000) * span)),
    to: (value) => (Math.log(value / least) / span) * 1000,
  };
}

function makeSlider(name, kind, scale) {
  const input = make("input", { id: `slider-${name}`, type: "range", min: 0, max: 1000, step: 1 });
  const output = make("output", { for: `slider-${name}`, id: `value-${name}` });
  const own = { input, scale, moved: false, show: () => {
    const known = own.moved || scale.served !== null;
    const value = own.moved ? scale.from(Number(input.value)) : scale.served;
    output.textContent = known ? kind.show(value) : "tuned";
    input.setAttribute("aria-valuetext", output.textContent);
    input.style.setProperty("--fraction", Number(input.value) / 1000);
  } };
  input.addEventListener("input", () => {
    own.moved = true;
    own.show();
    for (const listener of listeners) listener();
  });
  sliders[name] = own;
  restore(own);
  const label = make("label", { for: `slider-${name}` }, make("b", { text: kind.sign }), make("span", { text: kind.name }));
  return make("div", { class: "slider" }, label, output, input);
}

function restore(own) {
  own.moved = false;
  own.input.value = own.scale.served === null ? 250 : own.scale.to(own.scale.served);
  own.show();
}

/** Restore the server's settings. */
export function reset() {
  Object.values(sliders).forEach(restore);
  for (const listener of listeners) listener();
}

/** Return the moved settings, as fields of a request. */
export function chosen() {
  const values = {};
  for (const [name, own] of Object.entries(sliders)) {
    if (own.moved) values[name] = own.scale.from(Number(own.input.value));
  }
  return values;
}

/** Return the current setting; null where a gate decides. */
export const value = (name) => chosen()[name] ?? sliders[name]?.scale.served ?? null;

export const onMove = (listener) => listeners.push(listener);
