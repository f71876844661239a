// Set the theme before the first paint, so that a dark page does not flash white.
try {
  const kept = localStorage.getItem("knnlm-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // Without local storage, follow the system.
}
