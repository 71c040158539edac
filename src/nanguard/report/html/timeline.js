"use strict";
// The timeline. What is drawn is made anew after each zoom, so that zooming in comes down to every single step.
const timeline = (() => {
  const { runs, panels, kinds, groups, first_at, seen, plain, palette, faded } = curves;
  const GAP = 26;
  const MOST_LINES = 250;
  const LEAST_APART = 3;
  const LABEL = 14;
  const MARK = 8;
  const MARKS_APART = 14;
  const NUMBER_APART = 34;
  const MOST_ROWS = 16;
  const MOST_MARKS = 6;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const WORTH_LOG = { loss: 200, norm: 50, lr: 30, scale: 3 };
  const PASSING = new Set(["overflow", "eased", "other"]);
  const box = document.getElementById("chart");
  const hidden = { runs: new Set(), kinds: new Set(), groups: new Set() };
  const logs = {};
  const is_one = runs.length === 1;
  let margin = { l: 0, r: 0, t: 16, b: 42 };
  let lanes = { height: 22, spread: 0.3, above: 0.5, below: 0.5 };
  let placed = [];
  let marks_height = 0;
  let width = 1;
  let whole = [0, 1];
  let range = [0, 1];

  // One run: a colour for each parameter group. Several: a colour for each run, and a dash for each group.
  // What is of no group, the loss, goes with the first group of its optimizer.
  const place_of = (label) => Math.max(0, groups.indexOf(label));
  const group_of = (run, curve) => {
    if (groups.includes(curve.label)) return curve.label;
    return [...run.panels.norm, ...run.panels.lr].find((other) => other.owner === curve.owner)?.label;
  };
  const dash_of = (label) => DASHES[is_one ? 0 : place_of(label) % DASHES.length];
  const line_colour = (run, curve) => `run-${(is_one ? place_of(group_of(run, curve)) : run.number) % 8}`;
  const mark_colour = (run, kind) => (is_one ? `kind-${kind}` : `run-${run.number % 8}`);
  // Marks of several runs lie side by side in their lane.
  const shift_of = (run) => (is_one ? 0 : (run.number / (runs.length - 1) - 0.5) * 2 * lanes.spread);
  const shown_runs = () => runs.filter((run) => !hidden.runs.has(run.number));
  const shown_curves = (run, panel) => run.panels[panel.name].filter((curve) => !hidden.groups.has(curve.label));
  const is_seen = (mark) => !hidden.kinds.has(mark.kind) && mark.x >= range[0] && mark.x <= range[1];

  function bounds() {
    const ends = runs.flatMap((run) => [
      ...panels.flatMap((panel) => run.panels[panel.name].flatMap((curve) => [curve.x[0], curve.x.at(-1)])),
      ...run.marks.map((mark) => mark.x),
    ]);
    if (!ends.length) return [0, 1];
    const low = ends.reduce((a, b) => Math.min(a, b));
    const high = ends.reduce((a, b) => Math.max(a, b));
    const spare = Math.max((high - low) * 0.012, 0.5);
    return [low - spare, high + spare];
  }

  // Where the values span much. Learning rates fall to zero by themselves: what counts is how far the groups are apart.
  function suits_log({ name }) {
    let low = Infinity;
    let high = 0;
    for (const curve of runs.flatMap((run) => run.panels[name])) {
      let [lowest, highest] = [Infinity, 0];
      for (const value of curve.y) {
        if (!Number.isFinite(value) || value === 0) continue;
        if (value < 0) return false;
        lowest = Math.min(lowest, value);
        highest = Math.max(highest, value);
      }
      if (highest) low = Math.min(low, name === "lr" ? highest : lowest);
      high = Math.max(high, highest);
    }
    return high / low > WORTH_LOG[name];
  }

  // ---- what is drawn -----------------------------------------------------------------------------------------

  function line_traces(panel, axis, colours) {
    const traces = [];
    for (const run of shown_runs()) {
      for (const curve of shown_curves(run, panel)) {
        const points = seen(curve, range, width);
        const colour = colours.of(line_colour(run, curve));
        const shared = { type: "scatter", yaxis: axis, hoverinfo: "skip", showlegend: false, name: plain(run.label) };
        const shape = panel.name === "scale" ? "hv" : "linear";
        if (points.band) {
          const fill = { fill: "toself", fillcolor: faded(colour, 0.3), line: { width: 0.6, color: faded(colour, 0.45) } };
          traces.push({ ...shared, ...fill, ...points.band, mode: "lines", meta: "band" });
        }
        traces.push({
          ...shared,
          x: points.x,
          y: points.y,
          mode: !points.band && points.x.length < width / 10 ? "lines+markers" : "lines",
          line: { color: colour, width: 1.6, dash: dash_of(group_of(run, curve)), shape },
          marker: { size: 4 },
          meta: "line",
        });
      }
    }
    return traces;
  }

  // Marks that overlap are drawn as one, with their number beside it.
  function grouped_marks(run, kind) {
    const per = (range[1] - range[0]) / width;
    const groups = [];
    for (const mark of run.marks.filter((each) => each.kind === kind.name && is_seen(each)).sort((a, b) => a.x - b.x)) {
      const group = groups.at(-1);
      const apart = group?.length > 1 ? NUMBER_APART : MARKS_APART;
      if (group && mark.x - group[0].x < apart * per) group.push(mark);
      else groups.push([mark]);
    }
    return groups;
  }

  function mark_traces(colours) {
    placed = [];
    return kinds.flatMap((kind, lane) =>
      shown_runs().map((run) => {
        const groups = grouped_marks(run, kind);
        const marks = groups.map((group) => group[0]);
        placed.push(...groups.map((group) => ({ group, run, lane: lane + shift_of(run) })));
        const is_open = kind.symbol.endsWith("open");
        const colour = colours.of(mark_colour(run, kind.name));
        return {
          type: "scatter",
          mode: "markers+text",
          x: marks.map((mark) => mark.x),
          y: marks.map(() => lane + shift_of(run)),
          text: groups.map((group) => (group.length > 1 ? `×${curves.grouped(group.length)}` : "")),
          textposition: "middle right",
          textfont: { size: 11, color: colours.of("ink") },
          customdata: marks.map((mark) => mark.to),
          name: plain(kind.label),
          hoverinfo: "none",
          showlegend: false,
          cliponaxis: false,
          marker: {
            symbol: kind.symbol,
            size: is_open ? 9 : 11,
            color: colour,
            line: { width: is_open ? 1.6 : 1, color: is_open ? colour : colours.of("surface") },
          },
        };
      })
    ).filter((trace) => trace.x.length);
  }

  // A line for each incident; for those that lie closer than a few pixels, one: all of the width has its lines.
  function guide_lines(colours) {
    const drawn = new Map();
    const per = (range[1] - range[0]) * Math.max(LEAST_APART / width, 1 / MOST_LINES);
    for (const run of shown_runs()) {
      for (const mark of run.marks) {
        const at = Math.floor(mark.x / per);
        if (PASSING.has(mark.kind) || !is_seen(mark) || drawn.has(at)) continue;
        const line = { width: 1, color: faded(colours.of(mark_colour(run, mark.kind)), 0.18) };
        drawn.set(at, { type: "line", layer: "below", yref: "paper", x0: mark.x, x1: mark.x, y0: 0, y1: 1, line });
      }
    }
    return [...drawn.values()];
  }

  function y_range(traces, is_log) {
    let low = Infinity;
    let high = -Infinity;
    for (const trace of traces) {
      for (let i = 0; i < trace.y.length; i++) {
        const value = trace.y[i];
        if (value === null || (is_log && value <= 0) || trace.x[i] < range[0] || trace.x[i] > range[1]) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (!(low <= high)) return [0, 1];
    if (is_log) [low, high] = [Math.log10(low), Math.log10(high)];
    const is_flat = high - low <= Math.abs(high) * 1e-9;
    const spare = (is_flat ? Math.abs(high) * 0.1 : (high - low) * 0.08) || 0.5;
    return [low - spare, high + spare];
  }

  // Loss scales are powers of two, and are named as such.
  function powers_of_two([low, high]) {
    const first = Math.ceil(low / Math.log10(2));
    const last = Math.floor(high / Math.log10(2));
    const every = Math.max(1, Math.ceil((last - first) / 3));
    const powers = [];
    for (let power = last; power >= first; power -= every) powers.push(power);
    const named = (power) => (power < 0 || power > 17 ? `2<sup>${power}</sup>` : curves.grouped(2 ** power));
    return powers.length ? { tickvals: powers.map((power) => 2 ** power), ticktext: powers.map(named) } : {};
  }

  function value_axis(panel, traces) {
    const is_log = logs[panel.name] ?? false;
    const ends = y_range(traces, is_log);
    const span = ends[1] - ends[0];
    const axis = { range: ends, nticks: Math.max(3, Math.floor(panel.height / 20)), exponentformat: "power" };
    if (!is_log) return { ...axis, type: "linear", tickformat: "~g" };
    if (panel.name === "scale") return { ...axis, type: "log", ...powers_of_two(ends) };
    return { ...axis, type: "log", dtick: span < 1.3 ? "D2" : span < 6 ? 1 : undefined };
  }

  // In units of lanes, how far the marks of several runs spread, and what there is above and below them. Where it is
  // narrow, the name of a lane stands above its marks instead of beside them.
  function laid_out(is_narrow) {
    if (!is_narrow) return { height: Math.min(22 + 9 * (runs.length - 1), 60), spread: 0.3, above: 0.5, below: 0.5 };
    const height = Math.min(36 + 9 * (runs.length - 1), 72);
    const spread = is_one ? 0 : 0.15;
    return { height, spread, above: spread + (MARK + LABEL) / height, below: spread + MARK / height };
  }

  function lane_names(colours) {
    return kinds.map((kind, lane) => ({
      text: plain(kind.label),
      showarrow: false,
      xref: "paper",
      x: 0,
      xanchor: "left",
      yref: "y",
      y: lane - lanes.spread - MARK / lanes.height,
      yanchor: "bottom",
      borderpad: 0,
      height: LABEL,
      font: { size: 11, color: colours.of("ink") },
    }));
  }

  function draw() {
    box.hidden = !panels.length && !kinds.length;
    if (box.hidden) return;
    leave();
    const colours = palette();
    const is_narrow = box.clientWidth < 640;
    margin = { l: is_narrow ? 56 : 168, r: is_narrow ? 14 : 24, t: 16, b: 42 };
    width = Math.max(120, box.clientWidth - margin.l - margin.r);
    lanes = laid_out(is_narrow);
    const all_lanes = lanes.height * (kinds.length - 1 + lanes.above + lanes.below) + (is_narrow ? 0 : 10);
    marks_height = kinds.length ? all_lanes : 0;
    const parts = kinds.length ? [{ name: "marks", height: all_lanes }, ...panels] : panels;
    const title_of = (part) => (is_narrow && part.name !== "marks" ? 18 : 0);
    const total = parts.reduce((sum, part) => sum + part.height + title_of(part) + GAP, -GAP);
    const grid = faded(colours.of("line"), 0.7);
    const layout = {
      width: margin.l + width + margin.r,
      height: total + margin.t + margin.b,
      margin,
      paper_bgcolor: colours.of("surface"),
      plot_bgcolor: colours.of("surface"),
      font: { family: colours.sans, size: 12, color: colours.of("quiet") },
      hovermode: "closest",
      dragmode: is_narrow ? false : "zoom",
      shapes: guide_lines(colours),
      annotations: [],
      xaxis: {
        range: [...range],
        anchor: parts.length > 1 ? `y${parts.length}` : "y",
        title: { text: "step", standoff: 6 },
        tickformat: ",d",
        nticks: Math.max(3, Math.floor(width / 90)),
        gridcolor: grid,
        linecolor: colours.of("line"),
        zeroline: false,
      },
    };
    const traces = [];
    let top = 1;
    parts.forEach((part, place) => {
      const number = place ? String(place + 1) : "";
      top -= title_of(part) / total;
      const axis = {
        domain: [Math.max(0, top - part.height / total), top],
        anchor: "x",
        fixedrange: true,
        zeroline: false,
        gridcolor: grid,
        tickfont: { color: colours.of(part.name === "marks" ? "ink" : "quiet"), size: part.name === "marks" ? 12 : 11 },
      };
      if (part.name === "marks") {
        const words = kinds.map((kind) => (is_narrow ? "" : plain(kind.label)));
        const ends = [kinds.length - 1 + lanes.below, -lanes.above];
        layout.yaxis = { ...axis, range: ends, tickvals: [...kinds.keys()], ticktext: words };
        if (is_narrow) layout.annotations.push(...lane_names(colours));
        traces.push(...mark_traces(colours));
      } else {
        const mine = line_traces(part, `y${number}`, colours);
        layout[`yaxis${number}`] = { ...axis, ...value_axis(part, mine) };
        layout.annotations.push({
          text: plain(part.title),
          showarrow: false,
          xref: "paper",
          yref: "paper",
          x: 0,
          y: top,
          xanchor: "left",
          yanchor: is_narrow ? "bottom" : "top",
          xshift: is_narrow ? 0 : 12 - margin.l,
          font: { size: 12, color: colours.of("ink") },
        });
        traces.push(...mine);
      }
      top -= (part.height + GAP) / total;
    });
    const config = { displayModeBar: false, doubleClick: false, scrollZoom: false, showTips: false, responsive: false };
    Plotly.react(box, traces, layout, config);
  }

  // ---- what is under the pointer -------------------------------------------------------------------------------

  const readout = document.createElement("div");
  const cursor = document.createElement("div");
  readout.className = "readout";
  cursor.className = "cursor";
  for (const part of [readout, cursor]) part.setAttribute("aria-hidden", "true");

  function leave() {
    readout.remove();
    cursor.remove();
  }

  function nearest(x, value) {
    const after = first_at(x, value);
    if (after === 0) return 0;
    return after === x.length || value - x[after - 1] < x[after] - value ? after - 1 : after;
  }

  // The marks that are drawn as one under the pointer.
  function marks_under(x, y) {
    const per = (range[1] - range[0]) / width;
    const all = kinds.length - 1 + lanes.above + lanes.below;
    const away = ({ group, lane }) => {
      const down = margin.t + ((lane + lanes.above) / all) * marks_height;
      return Math.max(Math.abs((group[0].x - range[0]) / per - x), Math.abs(down - y));
    };
    const near = placed.filter((each) => away(each) <= MARK + 4);
    return near.reduce((best, each) => (!best || away(each) < away(best) ? each : best), null);
  }

  const rows_of = ({ run, group }) =>
    group.map((mark) => {
      const at = group.length > 1 ? `step ${curves.grouped(mark.x)}: ` : "";
      return [mark_colour(run, mark.kind), `${at}${mark.text}`, ""];
    });

  function* marks_at(step, reach) {
    for (const run of shown_runs()) {
      for (const mark of run.marks) {
        if (is_seen(mark) && Math.abs(mark.x - step) <= reach / 2) yield [mark_colour(run, mark.kind), mark.text, ""];
      }
    }
  }

  function* values_at(step, reach) {
    for (const panel of panels) {
      for (const run of shown_runs()) {
        for (const curve of shown_curves(run, panel)) {
          const at = nearest(curve.x, step);
          if (Math.abs(curve.x[at] - step) > reach) continue;
          const value = curve.y[at];
          const told = Number.isFinite(value) ? String(Number(value.toPrecision(7))) : String(value);
          const name = [is_one ? "" : run.label, panel.title, run.panels[panel.name].length > 1 ? curve.label : ""];
          yield [line_colour(run, curve), name.filter(Boolean).join(" · "), told];
        }
      }
    }
  }

  function point_at(event) {
    const place = box.getBoundingClientRect();
    const x = event.clientX - place.left - margin.l;
    if (event.buttons || x < 0 || x > width) return leave();
    const per = (range[1] - range[0]) / width;
    const wanted = range[0] + x * per;
    const under = marks_under(x, event.clientY - place.top);
    const candidates = under ? [under.group[0].x] : shown_runs().flatMap((run) => [
      ...panels.flatMap((panel) => shown_curves(run, panel).slice(0, 1).map((curve) => curve.x[nearest(curve.x, wanted)])),
      ...run.marks.filter(is_seen).map((mark) => mark.x),
    ]);
    if (!candidates.length) return leave();
    const step = candidates.reduce((best, at) => (Math.abs(at - wanted) < Math.abs(best - wanted) ? at : best));
    const marks = under ? rows_of(under) : [...marks_at(step, per)];
    const shown_marks = marks.slice(0, MOST_MARKS);
    if (marks.length > MOST_MARKS) shown_marks.push([marks[0][0], `and ${curves.grouped(marks.length - MOST_MARKS)} more`, ""]);
    const rows = [...shown_marks, ...values_at(step, per)];
    const head = document.createElement("strong");
    const last = under?.group.at(-1).x ?? step;
    head.textContent = last === step ? `step ${curves.grouped(step)}` : `steps ${curves.grouped(step)} to ${curves.grouped(last)}`;
    const lines = rows.slice(0, MOST_ROWS).map(([colour, name, value]) => {
      const line = document.createElement("div");
      const dot = document.createElement("span");
      const [words, number] = [document.createElement("span"), document.createElement("span")];
      dot.className = "swatch";
      dot.style.background = `var(--${colour})`;
      words.textContent = name.length > 160 ? `${name.slice(0, 159)}…` : name;
      number.textContent = value;
      line.append(dot, words, number);
      return line;
    });
    if (rows.length > MOST_ROWS) lines.push(`and ${rows.length - MOST_ROWS} more`);
    readout.replaceChildren(head, ...lines);
    const at = margin.l + (step - range[0]) / per;
    cursor.style.left = `${at}px`;
    box.append(cursor, readout);
    const spare = box.clientWidth - at - 18 >= readout.offsetWidth;
    readout.style.left = `${Math.max(4, spare ? at + 14 : at - 14 - readout.offsetWidth)}px`;
    const down = Math.min(event.clientY - place.top + 14, box.clientHeight - readout.offsetHeight - 8);
    readout.style.top = `${Math.max(4, down)}px`;
    return undefined;
  }

  // ---- zoom ----------------------------------------------------------------------------------------------------

  function show(from, to) {
    const span = Math.min(Math.max(to - from, 2), whole[1] - whole[0]);
    const begin = Math.min(Math.max((from + to - span) / 2, whole[0]), whole[1] - span);
    range = [begin, begin + span];
    draw();
  }

  function move(how) {
    const [from, to] = range;
    const half = (to - from) / 2;
    if (how === "in") show(from + half / 2, to - half / 2);
    if (how === "out") show(from - half, to + half);
    if (how === "left") show(from - half, to - half);
    if (how === "right") show(from + half, to + half);
    if (how === "reset") show(...whole);
  }

  function begin(open) {
    whole = bounds();
    range = [...whole];
    for (const panel of panels) logs[panel.name] = suits_log(panel);
    draw();
    if (box.hidden) return;
    box.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"], change["xaxis.range[1]"]);
    });
    box.on("plotly_doubleclick", () => move("reset"));
    box.on("plotly_click", ({ points }) => {
      const mark = points.find((point) => point.customdata);
      if (mark) open(mark.customdata);
    });
    box.addEventListener("pointermove", point_at);
    box.addEventListener("pointerleave", leave);
  }

  return { begin, draw, move, hidden, logs, dash_of, is_one };
})();
