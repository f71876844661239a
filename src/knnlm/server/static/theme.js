// Set the theme before anything is drawn, so that a dark page never flashes white. Knows nothing else.
try {
  const kept = localStorage.getItem("knnlm-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // A browser that keeps nothing follows the system.
}
