// λ, k and τ: three sliders, and whoever wants to know when they move. What nobody moved is as the server has it.

import { count, find, make } from "./dom.js";

const sliders = {};
const listeners = [];

const KINDS = {
  lambda: { sign: "λ", name: "weight of the memory", show: (value) => value.toFixed(2) },
  k: { sign: "k", name: "neighbours that vote", show: (value) => count(value) },
  knn_temperature: { sign: "τ", name: "patience with far ones", show: (value) => (value >= 100 ? value.toFixed(0) : value.toPrecision(3)) },
};

/** Make the sliders for what is served. */
export function prepare(facts) {
  const lambda = facts.lambda;
  const widest = Math.max(facts.k ?? 1, Math.min(facts.keys ?? 1, 1024));
  const scales = {
    lambda: linear(lambda),
    k: facts.k === null ? null : powers(facts.k, 1, widest, Math.round),
    knn_temperature: facts.knn_temperature === null ? null : powers(facts.knn_temperature, facts.knn_temperature / 100, facts.knn_temperature * 100),
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
    output.textContent = known ? kind.show(value) : "as fitted";
    input.setAttribute("aria-valuetext", output.textContent);
    input.style.setProperty("--part", Number(input.value) / 1000);
  } };
  input.addEventListener("input", () => {
    own.moved = true;
    own.show();
    for (const listen of listeners) listen();
  });
  sliders[name] = own;
  put(own);
  const label = make("label", { for: `slider-${name}` }, make("b", { text: kind.sign }), make("span", { text: kind.name }));
  return make("div", { class: "slider" }, label, output, input);
}

function put(own) {
  own.moved = false;
  own.input.value = own.scale.served === null ? 250 : own.scale.to(own.scale.served);
  own.show();
}

/** Back to what the server was started with. */
export function reset() {
  Object.values(sliders).forEach(put);
  for (const listen of listeners) listen();
}

/** What was moved, as the server takes it. */
export function chosen() {
  const found = {};
  for (const [name, own] of Object.entries(sliders)) {
    if (own.moved) found[name] = own.scale.from(Number(own.input.value));
  }
  return found;
}

/** What holds now, moved or not; null where only the server knows. */
export const value = (name) => chosen()[name] ?? sliders[name]?.scale.served ?? null;

export const onMove = (listen) => listeners.push(listen);
