"use strict";
// The trail of a card: from the lowest to the highest value inside each module, on an axis that is logarithmic on both
// sides of zero, with the ends of the format.
const trails = (() => {
  const { plain, grouped, palette, faded } = curves;

  // Labels that are too tall for the chart are not shown at all, so that two lines must do.
  const wrapped = (text) => {
    const lines = [];
    for (let rest = text; rest && lines.length < 2; ) {
      const space = rest.length > 64 ? rest.lastIndexOf(" ", 64) : rest.length;
      const end = space > 0 ? space : 64;
      lines.push(plain(rest.slice(0, end)));
      rest = rest.slice(end).trimStart();
      if (rest && lines.length === 2) lines[1] += " …";
    }
    return lines.join("<br>");
  };

  function draw(place) {
    const trail = curves.trails[place.dataset.trail];
    if (!trail || !place.clientWidth) return;
    const colours = palette();
    const is_narrow = place.clientWidth < 560;
    const ends = trail.flatMap((stretch) => [stretch.low, stretch.high]).filter((value) => value !== null && value !== 0).map(Math.abs);
    const largest = Math.max(...ends, 1e-30);
    const smallest = Math.min(...trail.map((s) => Math.max(Math.abs(s.low ?? 0), Math.abs(s.high ?? 0))).filter((value) => value > 0), largest);
    const unit = 10 ** (Math.floor(Math.log10(smallest)) - 1);
    const scaled = (value) => Math.sign(value) * Math.log10(1 + Math.abs(value) / unit);
    const near = (stretch) => stretch.limit !== null && Math.log10(stretch.limit) - Math.log10(largest) < 6;
    const reach = Math.max(largest, ...trail.filter(near).map((stretch) => stretch.limit));
    const edge = scaled(reach) * 1.06;
    const decades = Math.ceil(Math.log10(reach / unit));
    const every = Math.max(1, Math.ceil(decades / (is_narrow ? 2 : 4)));
    const ticks = [0];
    for (let power = Math.floor(Math.log10(reach)); 10 ** power > unit * 3; power -= every) ticks.push(10 ** power, -(10 ** power));
    const named = (value) => {
      const power = Math.round(Math.log10(Math.abs(value)));
      const sign = value < 0 ? "−" : "";
      if (value === 0) return "0";
      return Math.abs(power) <= 3 ? sign + grouped(10 ** power) : `${sign}10<sup>${power}</sup>`;
    };
    const short = (name) => {
      const most = is_narrow ? 16 : 32;
      return plain(name.length > most ? `…${name.slice(1 - most)}` : name);
    };
    const told = trail.map((s) => {
      const span = s.low === null ? "no finite value" : `${s.low.toPrecision(4)} to ${s.high.toPrecision(4)}`;
      return `${wrapped(`${s.module} (${s.kind}), ${s.op}, ${s.format}`)}<br>${span}${s.finite ? "" : "<br>non-finite values too"}`;
    });
    const bar = {
      type: "bar", orientation: "h", y: trail.map((_, i) => i), text: told, textposition: "none", hovertemplate: "%{text}<extra></extra>",
      base: trail.map((s) => (s.low === null ? 0 : scaled(s.low))),
      x: trail.map((s) => (s.low === null ? 0 : Math.max(scaled(s.high) - scaled(s.low), edge / 150))),
      width: 0.55, marker: { color: trail.map((s) => colours.of(s.finite ? "run-0" : "bad")), line: { width: 0 } },
    };
    const bad = trail.map((s, i) => [s, i]).filter(([s]) => !s.finite);
    const crosses = {
      type: "scatter", mode: "markers", x: bad.map(() => edge * 1.05), y: bad.map(([, i]) => i), text: bad.map(([, i]) => told[i]),
      hovertemplate: "%{text}<extra></extra>", marker: { symbol: "x", size: 9, color: colours.of("bad") }, cliponaxis: false,
    };
    const limited = trail.map((s, i) => [s, i]).filter(([s]) => near(s));
    const shapes = limited.flatMap(([s, i]) =>
      [s.limit, -s.limit].map((limit) => ({
        type: "line", x0: scaled(limit), x1: scaled(limit), y0: i - 0.5, y1: i + 0.5, line: { color: colours.of("ink"), width: 1.5, dash: "dot" },
      }))
    );
    const formats = new Map(limited.map(([s]) => [s.format, s.limit]));
    const annotations = [...formats].slice(0, 1).flatMap(([format, limit]) => [
      { x: scaled(limit), y: -0.6, yanchor: "bottom", xanchor: "right", showarrow: false, text: `${plain(format)} ends at ${grouped(limit)}`, font: { size: 11, color: colours.of("ink") } },
    ]);
    if (bad.length) {
      annotations.push({ x: edge * 1.05, y: trail.length - 0.5, yanchor: "top", showarrow: false, text: "non-finite", xanchor: "right", xshift: 6, font: { size: 11, color: colours.of("bad") } });
    }
    const layout = {
      width: place.clientWidth,
      height: 26 * trail.length + 68,
      margin: { l: is_narrow ? 118 : 240, r: 20, t: 26, b: 30 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: colours.sans, size: 12, color: colours.of("quiet") },
      hoverlabel: { bgcolor: colours.of("surface"), bordercolor: colours.of("line"), font: { family: colours.sans, color: colours.of("ink") }, align: "left" },
      showlegend: false, hovermode: "closest", dragmode: false, shapes, annotations,
      xaxis: { range: [-edge * 1.1, edge * 1.1], tickvals: ticks.map(scaled), ticktext: ticks.map(named), gridcolor: faded(colours.of("line"), 0.8), zerolinecolor: colours.of("quiet"), fixedrange: true },
      yaxis: { range: [trail.length - 0.4, -0.6], tickvals: trail.map((_, i) => i), ticktext: trail.map((s) => short(s.module)), tickfont: { color: colours.of("ink"), size: 12 }, showgrid: false, zeroline: false, fixedrange: true },
    };
    place.dataset.drawn = "yes";
    Plotly.react(place, [bar, crosses], layout, { displayModeBar: false, responsive: false, showTips: false });
  }

  function draw_open() {
    for (const place of document.querySelectorAll(".card[open] .trail")) draw(place);
  }

  return { draw, draw_open };
})();
