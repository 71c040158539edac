"use strict";
// The trail of a card: from the lowest to the highest value inside each module, on an axis that is logarithmic on both
// sides of zero, with the ends of the format.
const trails = (() => {
  const { plain, grouped, palette, faded } = curves;
  const ROW = 26;

  // Labels that are too tall for the chart are not shown at all, so that two lines must do.
  function wrapped(text) {
    const lines = [];
    for (let rest = text; rest && lines.length < 2; ) {
      const space = rest.length > 64 ? rest.lastIndexOf(" ", 64) : rest.length;
      const end = space > 0 ? space : 64;
      lines.push(plain(rest.slice(0, end)));
      rest = rest.slice(end).trimStart();
      if (rest && lines.length === 2) lines[1] += " …";
    }
    return lines.join("<br>");
  }

  function in_words(stretch) {
    const what = wrapped(`${stretch.module} (${stretch.kind}), ${stretch.op}, ${stretch.format}`);
    const { low, high } = stretch;
    const span = low === null ? "NaN or Inf" : `${low.toPrecision(4)} to ${high.toPrecision(4)}`;
    const bad = stretch.finite ? "" : low === null ? "" : "<br>non-finite values too";
    return `${what}<br>${span}${bad}`;
  }

  function tick_name(value) {
    if (value === 0) return "0";
    const power = Math.round(Math.log10(Math.abs(value)));
    const sign = value < 0 ? "−" : "";
    return Math.abs(power) <= 3 ? sign + grouped(10 ** power) : `${sign}10<sup>${power}</sup>`;
  }

  // How values are laid out: ``at`` gives the place of one, ``edge`` that of the outermost.
  function scale_of(trail, is_narrow) {
    const sizes = trail.map((s) => Math.max(Math.abs(s.low ?? 0), Math.abs(s.high ?? 0))).filter((size) => size > 0);
    const largest = sizes.length ? Math.max(...sizes) : 1;
    const unit = 10 ** (Math.floor(Math.log10(sizes.length ? Math.min(...sizes) : 1)) - 1);
    // The end of a format that is far away would squeeze all values into the middle.
    const limited = trail.map((s, row) => [s, row]).filter(([s]) => s.limit !== null && s.limit < largest * 1e6);
    const reach = Math.max(largest, ...limited.map(([s]) => s.limit));
    const at = (value) => Math.sign(value) * Math.log10(1 + Math.abs(value) / unit);
    const every = Math.max(1, Math.ceil(Math.log10(reach / unit) / (is_narrow ? 2 : 4)));
    const ticks = [0];
    for (let power = Math.floor(Math.log10(reach)); 10 ** power > unit * 3; power -= every) {
      ticks.push(10 ** power, -(10 ** power));
    }
    return { at, edge: at(reach) * 1.06, ticks, limited };
  }

  function draw(place) {
    const trail = curves.trails[place.dataset.trail];
    if (!trail || !place.clientWidth) return;
    const colours = palette();
    const is_narrow = place.clientWidth < 560;
    const { at, edge, ticks, limited } = scale_of(trail, is_narrow);
    const told = trail.map(in_words);
    const most = is_narrow ? 16 : 32;
    const short = (name) => plain(name.length > most ? `…${name.slice(1 - most)}` : name);
    const rows = [...trail.keys()];
    const bad = rows.filter((row) => !trail[row].finite);
    const bars = {
      type: "bar",
      orientation: "h",
      y: rows,
      base: trail.map((s) => (s.low === null ? 0 : at(s.low))),
      x: trail.map((s) => (s.low === null ? 0 : Math.max(at(s.high) - at(s.low), edge / 150))),
      width: 0.55,
      text: told,
      textposition: "none",
      hovertemplate: "%{text}<extra></extra>",
      marker: { color: trail.map((s) => colours.of(s.finite ? "run-0" : "bad")), line: { width: 0 } },
    };
    const crosses = {
      type: "scatter",
      mode: "markers",
      x: bad.map(() => edge * 1.05),
      y: bad,
      text: bad.map((row) => told[row]),
      hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: "x", size: 9, color: colours.of("bad") },
      cliponaxis: false,
    };
    const ends = limited.flatMap(([s, row]) =>
      [at(s.limit), at(-s.limit)].map((x) => ({
        type: "line",
        x0: x,
        x1: x,
        y0: row - 0.5,
        y1: row + 0.5,
        line: { color: colours.of("ink"), width: 1.5, dash: "dot" },
      }))
    );
    const notes = limited.slice(0, 1).map(([s]) => ({
      showarrow: false,
      x: at(s.limit),
      xanchor: "right",
      y: -0.6,
      yanchor: "bottom",
      text: `${plain(s.format)} ends at ${s.limit < 1e9 ? grouped(s.limit) : s.limit.toPrecision(3)}`,
      font: { size: 11, color: colours.of("ink") },
    }));
    const empty = rows
      .filter((row) => trail[row].low === null)
      .map((row) => ({ showarrow: false, x: 0, y: row, text: "NaN or Inf", font: { size: 11, color: colours.of("bad") } }));
    const layout = {
      width: place.clientWidth,
      height: ROW * trail.length + 68,
      margin: { l: is_narrow ? 118 : 240, r: 20, t: 26, b: 30 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: colours.sans, size: 12, color: colours.of("quiet") },
      hoverlabel: {
        bgcolor: colours.of("surface"),
        bordercolor: colours.of("line"),
        font: { family: colours.sans, color: colours.of("ink") },
        align: "left",
      },
      showlegend: false,
      hovermode: "closest",
      dragmode: false,
      shapes: ends,
      annotations: [...notes, ...empty],
      xaxis: {
        range: [-edge * 1.1, edge * 1.1],
        tickvals: ticks.map(at),
        ticktext: ticks.map(tick_name),
        gridcolor: faded(colours.of("line"), 0.8),
        zerolinecolor: colours.of("quiet"),
        fixedrange: true,
      },
      yaxis: {
        range: [trail.length - 0.4, -0.6],
        tickvals: rows,
        ticktext: trail.map((s) => short(s.module)),
        tickfont: { color: colours.of("ink"), size: 12 },
        showgrid: false,
        zeroline: false,
        fixedrange: true,
      },
    };
    place.dataset.drawn = "yes";
    Plotly.react(place, [bars, crosses], layout, { displayModeBar: false, responsive: false, showTips: false });
  }

  function draw_open() {
    for (const place of document.querySelectorAll(".card[open] .trail")) draw(place);
  }

  return { draw, draw_open };
})();
