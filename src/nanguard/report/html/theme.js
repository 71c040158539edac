"use strict";
// Before anything is painted: the theme that the reader chose last, where storage is allowed.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("nanguard-theme");
  } catch (error) {
    chosen = null;
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("scripted");
})();
