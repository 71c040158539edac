"use strict";
// What can be done with the page: theme, cards, links, filter, copying, printing.
(() => {
  const root = document.documentElement;
  const said = document.getElementById("said");
  const cards = [...document.querySelectorAll(".card")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  function redraw() {
    timeline.draw();
    trails.draw_open();
  }

  // ---- theme -------------------------------------------------------------------------------------------------

  const toggle = document.getElementById("theme");
  const is_dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  function name_theme() {
    const other = is_dark() ? "light" : "dark";
    toggle.textContent = is_dark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", `Switch to the ${other} theme`);
  }
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    root.dataset.theme = is_dark() ? "light" : "dark";
    try {
      localStorage.setItem("nanguard-theme", root.dataset.theme);
    } catch (error) {
      said.textContent = "The theme cannot be remembered here.";
    }
    name_theme();
    redraw();
  });
  dark.addEventListener("change", () => {
    name_theme();
    redraw();
  });
  name_theme();

  // ---- opening what a mark or a link points at ----------------------------------------------------------------

  function reveal(id) {
    const target = document.getElementById(id);
    if (!target) return;
    for (let place = target; place; place = place.parentElement) {
      place.hidden = false;
      if (place.tagName === "DETAILS") place.open = true;
    }
    document.querySelectorAll(".found").forEach((other) => other.classList.remove("found"));
    target.classList.add("found");
    target.scrollIntoView({ behavior: still.matches ? "auto" : "smooth", block: "start" });
    (target.querySelector("summary") ?? target).focus({ preventScroll: true });
  }
  const from_address = () => {
    if (location.hash.startsWith("#run")) reveal(location.hash.slice(1));
  };
  function go(id) {
    if (location.hash !== `#${id}`) history.pushState(null, "", `#${id}`);
    reveal(id);
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#run"]');
    if (!link) return;
    event.preventDefault();
    go(link.getAttribute("href").slice(1));
  });
  addEventListener("hashchange", from_address);
  addEventListener("popstate", from_address);

  for (const card of cards) {
    card.addEventListener("toggle", () => {
      if (card.open) card.querySelectorAll(".trail:not([data-drawn])").forEach(trails.draw);
    });
  }

  // ---- the timeline's controls --------------------------------------------------------------------------------

  const pressed = (button) => button.getAttribute("aria-pressed") === "true";
  function switched(button, set, name) {
    const is_on = !pressed(button);
    button.setAttribute("aria-pressed", String(is_on));
    if (is_on) set.delete(name);
    else set.add(name);
    timeline.draw();
  }
  const controls = document.getElementById("controls");
  controls.hidden = false;
  controls.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const { run, kind, group, move, scale } = button.dataset;
    if (run !== undefined) switched(button, timeline.hidden.runs, Number(run));
    if (kind !== undefined) switched(button, timeline.hidden.kinds, kind);
    if (group !== undefined) switched(button, timeline.hidden.groups, group);
    if (move !== undefined) timeline.move(move);
    if (scale !== undefined) {
      timeline.logs[scale] = !pressed(button);
      button.setAttribute("aria-pressed", String(timeline.logs[scale]));
      timeline.draw();
    }
  });
  timeline.begin(go);
  function add_button(to, name, text, className) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = className;
    button.textContent = text;
    button.setAttribute("aria-pressed", "true");
    document.getElementById(to).append(button);
    button.dataset[name] = text;
    return button;
  }
  function add_name(to, text) {
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = text;
    document.getElementById(to).append(name);
  }
  if (curves.panels.length) add_name("scales", "log axis");
  for (const panel of curves.panels) {
    const button = add_button("scales", "scale", panel.title.toLowerCase(), "scale");
    button.dataset.scale = panel.name;
    button.setAttribute("aria-pressed", String(timeline.logs[panel.name]));
  }
  const STROKES = { solid: "", dash: "7 4", dot: "2 4", dashdot: "7 3 2 3", longdash: "11 4" };
  if (curves.groups.length > 1) add_name("groups", "groups");
  for (const [place, label] of curves.groups.length > 1 ? curves.groups.entries() : []) {
    const button = add_button("groups", "group", label, "key");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", "M0 4h24");
    path.setAttribute("stroke-dasharray", STROKES[timeline.dash_of(label)]);
    line.setAttribute("class", "line");
    line.setAttribute("viewBox", "0 0 24 8");
    line.setAttribute("aria-hidden", "true");
    if (timeline.is_one) line.style.color = `var(--run-${place % 8})`;
    line.append(path);
    button.prepend(line);
  }
  trails.draw_open();

  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });

  // ---- finding a card ------------------------------------------------------------------------------------------

  const finder = document.getElementById("finder");
  if (finder) {
    finder.hidden = false;
    const texts = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));
    document.getElementById("filter").addEventListener("input", (event) => {
      const wanted = event.target.value.trim().toLowerCase();
      for (const card of cards) card.hidden = !texts.get(card).includes(wanted);
      said.textContent = `${cards.filter((card) => !card.hidden).length} of ${cards.length} cards`;
    });
    const set_all = (open) => cards.filter((card) => !card.hidden).forEach((card) => (card.open = open));
    document.getElementById("open-all").addEventListener("click", () => set_all(true));
    document.getElementById("close-all").addEventListener("click", () => set_all(false));
  }

  // ---- copying -------------------------------------------------------------------------------------------------

  async function copy(text, source) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      const selection = getSelection();
      selection.selectAllChildren(source);
      return document.execCommand("copy");
    }
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      const done = await copy(code.textContent, code);
      button.textContent = done ? "Copied" : "Selected";
      said.textContent = done ? "Copied to the clipboard" : "Selected, to be copied by hand";
      setTimeout(() => (button.textContent = "Copy"), 1600);
    });
  }

  // ---- printing ------------------------------------------------------------------------------------------------

  // Charts are drawn for paper before it is laid out: in light, and as wide as a page.
  let opened = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    opened = cards.filter((card) => !card.open);
    opened.forEach((card) => (card.open = true));
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    opened.forEach((card) => (card.open = false));
    redraw();
  });

  from_address();
})();
