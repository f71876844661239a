// Elements and number formats. Text is inserted as text, never as markup.

export const find = (id) => document.getElementById(id);

/** Build an element: `text` is its text, `class` its class, `style` its custom properties, others are attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, own] of Object.entries(value)) element.style.setProperty(key, own);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Mark a token without its leading space, which looks bad at the end of a line. */
export function marked(token, kind = "") {
  const word = token.trimStart() || token;
  return [token.slice(0, token.length - word.length), make("mark", { class: kind, text: word })];
}

/** Show spaces and line breaks of a token as symbols. */
export const visible = (text) =>
  text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍").replace(/^ /, "␣").replace(/ $/, "␣");

export function probability(p) {
  if (p === null || p === undefined) return "—";
  if (p >= 0.0005) return p.toFixed(3);
  if (p === 0) return "0";
  const [digits, power] = p.toExponential(1).split("e");
  return `${digits}·10${superscript(power)}`;
}

const superscript = (power) => [...power].map((sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]).join("");

export function perplexity(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "—";
  return value >= 1000 ? count(Math.round(value)) : value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

export const count = (number) => number.toLocaleString("en");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const narrow = () => matchMedia("(max-width: 900px)").matches;

/** Show an error. */
export function showError(error) {
  const message = error instanceof Error ? error.message : String(error);
  const notice = make("div", { class: "notice" }, make("p", { text: message }));
  notice.append(make("button", {
    class: "quiet icon", type: "button", "aria-label": "Dismiss", text: "×", onclick: () => notice.remove(),
  }));
  // An open dialog covers the page and takes all clicks, so it must contain the notice.
  (document.querySelector("dialog[open]") ?? document.body).append(find("notices"));
  find("notices").replaceChildren(notice);
}

export const clearErrors = () => find("notices").replaceChildren();
