"use strict";
// What the page holds: curves in full, marks, colours. The other scripts draw it.
const curves = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PANELS = [
    { name: "loss", title: "Loss", height: 190 },
    { name: "norm", title: "Gradient norm", height: 150 },
    { name: "lr", title: "Learning rate", height: 90 },
    { name: "scale", title: "Loss scale", height: 80 },
  ];

  function unpacked(told) {
    const out = new Float64Array(told.n);
    if ("start" in told) {
      for (let i = 0; i < told.n; i++) out[i] = told.start + i * told.by;
      return out;
    }
    const text = atob(told.f32 ?? told.f64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const view = new DataView(bytes.buffer);
    const is_single = "f32" in told;
    for (let i = 0; i < told.n; i++) out[i] = is_single ? view.getFloat32(4 * i, true) : view.getFloat64(8 * i, true);
    return out;
  }

  const runs = data.runs.map((run, number) => {
    const steps = run.steps.map(unpacked);
    const panels = {};
    for (const { name } of PANELS) {
      panels[name] = run.panels[name].map(({ label, steps: owner, y }) => ({ label, owner, x: steps[owner], y: unpacked(y) }));
    }
    return { label: run.label, number, panels, marks: run.marks };
  });
  const panels = PANELS.filter((panel) => runs.some((run) => run.panels[panel.name].length));
  const kinds = data.kinds.filter((kind) => runs.some((run) => run.marks.some((mark) => mark.kind === kind.name)));
  const labels = runs.flatMap((run) => ["norm", "lr"].flatMap((name) => run.panels[name].map((curve) => curve.label)));
  const groups = [...new Set(labels)];

  // The place of the first value that is not below this one.
  function first_at(x, value) {
    let low = 0;
    let high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // What is seen of a curve: each point where there is room for all; else of each pixel the lowest, the highest, the mean.
  function seen({ x, y }, [from, to], width) {
    const begin = Math.max(0, first_at(x, from) - 1);
    const end = Math.min(x.length, first_at(x, to) + 1);
    if (end - begin <= 2 * width) {
      const values = Array.from(y.subarray(begin, end), (value) => (Number.isFinite(value) ? value : null));
      return { x: Array.from(x.subarray(begin, end)), y: values, band: null };
    }
    const line = { x: [], y: [], band: { x: [], y: [] } };
    const piece = { x: [], low: [], high: [] };
    const close = () => {
      if (piece.x.length) {
        if (line.band.x.length) push(line.band, null, null);
        line.band.x.push(...piece.x, ...piece.x.toReversed(), piece.x[0]);
        line.band.y.push(...piece.high, ...piece.low.toReversed(), piece.high[0]);
      }
      for (const part of Object.values(piece)) part.length = 0;
    };
    const push = (to_it, at, value) => {
      to_it.x.push(at);
      to_it.y.push(value);
    };
    const per = (to - from) / width;
    let i = begin;
    while (i < end) {
      const pixel = Math.floor((x[i] - from) / per);
      const edge = from + (pixel + 1) * per;
      let low = Infinity;
      let high = -Infinity;
      let sum = 0;
      let count = 0;
      do {
        if (Number.isFinite(y[i])) {
          low = Math.min(low, y[i]);
          high = Math.max(high, y[i]);
          sum += y[i];
          count += 1;
        }
        i += 1;
      } while (i < end && x[i] < edge);
      const at = from + (pixel + 0.5) * per;
      push(line, at, count ? Math.min(Math.max(sum / count, low), high) : null);
      if (!count) {
        close();
        continue;
      }
      piece.x.push(at);
      piece.low.push(low);
      piece.high.push(high);
    }
    close();
    return line;
  }

  // plotly takes a part of HTML for what it is, also in labels.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const grouped = (number) => number.toLocaleString("en-US");

  // The colours of the theme that is on, as the browser comes to them.
  function palette() {
    const probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
    const names = ["ink", "quiet", "line", "surface", "bad", ...kinds.map((kind) => `kind-${kind.name}`)];
    for (let i = 0; i < 8; i++) names.push(`run-${i}`);
    const found = new Map();
    for (const name of names) {
      probe.style.color = `var(--${name})`;
      found.set(name, getComputedStyle(probe).color);
    }
    const sans = getComputedStyle(document.body).fontFamily;
    probe.remove();
    return { of: (name) => found.get(name), sans };
  }
  const faded = (colour, share) => colour.replace(/^rgb\((.*)\)$/, (_, parts) => `rgba(${parts}, ${share})`);

  return { runs, panels, kinds, groups, trails: data.trails, first_at, seen, plain, grouped, palette, faded };
})();
