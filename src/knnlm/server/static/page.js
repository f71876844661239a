// The page: tabs, theme, dialogs, keys, and the served model.

import { fetchJson, useKey } from "./api.js";
import { showError, count, clearErrors, find, narrow } from "./dom.js";
import { close as closeInspector, turn } from "./inspector.js";
import * as documents from "./documents.js";
import * as generation from "./generation.js";
import * as score from "./score.js";
import * as settings from "./settings.js";

let TABS = ["generate", "score", "documents"];

function show(name) {
  for (const tab of TABS) {
    const on = tab === name;
    find(tab).hidden = !on;
    find(`tab-${tab}`).setAttribute("aria-selected", String(on));
    find(`tab-${tab}`).tabIndex = on ? 0 : -1;
  }
  find("main").dataset.tab = name;
  find("inspector").classList.remove("open");
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  if (name === "documents") documents.list();
}

function prepareTabs() {
  for (const tab of TABS) find(`tab-${tab}`).addEventListener("click", () => show(tab));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = TABS.indexOf(find("main").dataset.tab);
    const next = TABS[(now + step + TABS.length) % TABS.length];
    show(next);
    find(`tab-${next}`).focus();
  });
  window.addEventListener("hashchange", () => TABS.includes(location.hash.slice(1)) && show(location.hash.slice(1)));
}

function prepareTheme() {
  find("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem("knnlm-theme", root.dataset.theme);
    } catch {
      // Not stored: the theme lasts until the page is left.
    }
  });
}

function prepareDialogs() {
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  // A click outside a dialog closes it.
  for (const dialog of document.querySelectorAll("dialog:not(#key)")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
  find("earlier").addEventListener("click", () => turn(-1));
  find("later").addEventListener("click", () => turn(1));
  find("inspector-close").addEventListener("click", closeInspector);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) closeInspector();
  });
  document.addEventListener("key-needed", () => find("key").open || find("key").showModal());
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(find("key-value").value);
    find("key").close();
    clearErrors();
    loadModel();
  });
}

/** Load the metadata of the served model. */
async function loadModel() {
  try {
    const [model] = (await fetchJson("/v1/models")).data;
    const metadata = model.knnlm;
    const name = metadata.language_model.split("/").filter(Boolean).pop();
    const size = metadata.keys === null ? "" : ` · ${count(metadata.keys)} contexts`;
    find("served").textContent = `${model.id} · ${name}${size}`;
    document.title = `${model.id} · knnlm`;
    find("length").max = metadata.max_output_tokens;
    if (metadata.pairs) {
      TABS = ["generate", "documents"]; // a text without its source cannot be scored
      find("tab-score").hidden = find("score").hidden = true;
    }
    generation.prepare(metadata);
    settings.prepare(metadata);
    documents.prepare(metadata);
    show(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "generate");
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    find("served").textContent = "Not connected";
    if (error.status !== 401 || find("key-value").value) showError(error);
  }
}

prepareTabs();
prepareTheme();
prepareDialogs();
generation.begin();
score.begin();
documents.begin();
find("reset").addEventListener("click", settings.reset);
if (narrow()) find("mixing").open = false;
loadModel();
