"use strict";
const $ = id => document.getElementById(id);
const { themes, page: { watch, ...first } } = JSON.parse($("data").textContent);
let page = first, charts = [];
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = dark.matches ? "dark" : "light";
const view = { axis: "steps", smooth: 0, log: {}, zoom: null, hidden: new Set(), theme, layer: {} };

// Elements. Text goes in as text nodes alone, so nothing of a run is read as HTML.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined));
  return element;
}
const div = (name, ...children) => h("div", { class: name }, ...children);
const muted = (...children) => div("muted", ...children);
const card = (title, ...content) => div("card wide", h("h3", {}, title), ...content);
const dot = color => h("span", { class: "dot", style: `background:${color}` });
const legend = texts => muted(texts.map((text, i) => [dot(colorOf(i)), text + "  "]));
const folded = (attributes, title, ...content) => h("details", attributes, h("summary", {}, title), ...content);
const button = (text, attributes, change) => h("button", { ...attributes, onclick: changing(change) }, text);
const changing = change => event => { change(event.target); render(); };
function table(heads, rows, numeric = []) {
  const cell = tag => (content, i) => h(tag, { class: numeric.includes(i) && "number" }, content ?? "–");
  const line = (row, tag) => h("tr", {}, row.map(cell(tag)));
  const body = h("tbody", {}, rows.map(row => line(row, "td")));
  return rows.length ? div("scroll", h("table", {}, h("thead", {}, line(heads, "th")), body)) : null;
}
const section = (title, ...content) => content.flat().some(Boolean) ? [h("h2", {}, title), ...content.flat()] : [];

// Numbers in words.
function number(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return typeof x === "object" ? JSON.stringify(x) : String(x);
  const size = Math.abs(x);
  if (size >= 1e5) {
    const power = Math.min(6, Math.floor(Math.log10(size) / 3));
    return +(x / 1000 ** power).toPrecision(4) + ["", "k", "M", "G", "T", "P", "E"][power];
  }
  return size !== 0 && size < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(Number.isInteger(x) ? 6 : 4));
}
function bytes(x) {
  const power = x > 0 ? Math.min(4, Math.floor(Math.log2(x) / 10)) : 0;
  return (x / 1024 ** power).toFixed(power ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
function duration(s) {
  if (s < 90) return s.toFixed(s < 10 ? 1 : 0) + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  return s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
}
const CLOCK = { dateStyle: "medium", timeStyle: "short" };
const clock = seconds => new Date(seconds * 1000).toLocaleString(undefined, CLOCK);
const moment = text => text ? clock(Date.parse(text) / 1000) : "–";
const sum = parts => Object.values(parts ?? {}).reduce((a, b) => a + b, 0);
const lastOf = values => values?.findLast(x => x !== null);
function median(values) {
  const known = values.filter(x => x !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}
function label(name) {
  const plain = name.replace(/_/g, " ").replace(/^(phase|rank) seconds\./, "");
  return plain.replace(/\.(\d)$/, (_, i) => " " + (["min", "median", "max"][i] ?? i));
}

// Runs.
const many = () => page.runs.length > 1;
const shown = () => page.runs.map((run, r) => [run, r]).filter(([, r]) => !view.hidden.has(r));
const titleOf = (run, alone) => many() ? run.name : alone;
const colors = () => themes[view.theme];
const colorOf = run => colors().series[run % colors().series.length];
const meansOf = (run, name) => run.steps.series[name]?.mean ?? [];
function layoutOf({ layout, world_size }) {
  const split = Object.entries(layout).filter(([axis, n]) => n > 1 && !["edp", "etp", "zero_stage"].includes(axis));
  const parts = [...split.map(([axis, n]) => axis.toUpperCase() + n), "ZeRO " + layout.zero_stage];
  return `${world_size} ranks: ${parts.join(" × ")}`;
}
// Where a step lies on the chosen axis.
function placed(run, step) {
  const { steps, [view.axis]: xs } = run.steps.x;
  return xs?.[steps.findIndex(x => x >= step)] ?? null;
}
function marksOf(run) {
  const mark = (step, text, color, dash) => ({ x: placed(run, step), text, color, dash });
  const { muted: gray, series } = colors(), dashed = [4, 3];
  return [
    ...run.starts.filter(s => s.iteration > 0).map(s => mark(s.iteration, "resumed " + moment(s.time), gray, dashed)),
    ...run.marks.map(m => mark(m.before, `went back from step ${m.before} to ${m.iteration}`, series[1], dashed)),
    ...run.incidents.map(i => mark(i.iteration, `${i.kind}: ${i.summary}`, series[3], [])),
  ].filter(({ x }) => x !== null);
}

// The lines of a chart: uPlot's series, bands and tables, and what a cursor tells of each.
class Lines {
  series = [{}];
  bands = [];
  tables = [];
  hints = [];
  add(data, { color, dash, text }) {
    const xs = data.xs, at = this.series.length, known = data.mean.filter(x => x !== null).length;
    // A series with values at some steps alone is a line from each to the next.
    const kept = known < xs.length / 2 && !data.low ? xs.map((_, i) => i).filter(i => data.mean[i] !== null) : null;
    const mean = kept ? kept.map(i => data.mean[i]) : data.mean, columns = [kept ? kept.map(i => xs[i]) : xs, mean];
    const stroke = view.smooth ? color + "55" : color;
    this.series.push({ stroke, width: 1.4, dash, points: { show: known < 60, size: 4 } });
    this.hints.push({ at, text, color, low: data.low ? at + 1 : null });
    if (data.low) {
      const unseen = { stroke: "transparent", points: { show: false } };
      columns.push(data.low, data.high);
      this.series.push(unseen, unseen);
      this.bands.push({ series: [at + 2, at + 1], fill: color + "30" });
    }
    if (view.smooth) {
      columns.push(smoothed(mean));
      this.hints.at(-1).at = this.series.length;
      this.series.push({ stroke: color, width: 1.8, dash, points: { show: false } });
    }
    this.tables.push(columns);
  }
  addRings(pairs, color, text) {
    const unique = [...new Map(pairs.sort((a, b) => a[0] - b[0]))];
    if (!unique.length) return;
    const points = { show: true, size: 8, fill: colors().paper, stroke: color, width: 2 };
    this.hints.push({ at: this.series.length, text, color });
    this.series.push({ stroke: color, width: 1, dash: [2, 4], points });
    this.tables.push([unique.map(p => p[0]), unique.map(p => p[1])]);
  }
}
function smoothed(values) {
  let mean = 0, weights = 0;
  return values.map(x => {
    if (x === null) return x;
    mean = view.smooth * mean + (1 - view.smooth) * x;
    weights = view.smooth * weights + (1 - view.smooth);
    return mean / weights;
  });
}
// A chart of one or several series of all runs: [name, text] pairs; `option` has unit, log, points, marks.
function linesOf(title, names, option) {
  const lines = new Lines(), several = names.length > 1;
  const fit = values => values?.map(x => x === null || (view.log[title] && x <= 0) ? null : x * (option.scale ?? 1));
  for (const [run, r] of shown()) {
    const xs = run.steps.x[view.axis];
    if (!xs) continue;
    names.forEach(([name, label], n) => {
      const data = run.steps.series[name], color = colorOf(several ? n : r);
      const text = [many() && run.name, (several || !many()) && label].filter(Boolean).join(" ");
      const dash = r >= colors().series.length && !several ? [6, 3] : null;
      const fitted = data && { xs, mean: fit(data.mean), low: fit(data.low), high: fit(data.high) };
      if (data) lines.add(fitted, { color, dash, text });
      const splits = option.points ? [...new Set(run.evaluations.map(e => e.split))] : [];
      splits.forEach((split, s) => {  // of several sets, each has a colour
        const own = run.evaluations.filter(e => e.split === split && typeof e[name] === "number");
        const pairs = own.map(e => [placed(run, e.iteration), e[name]]).filter(([x]) => x !== null);
        lines.addRings(pairs, split.startsWith("validation-") && !many() ? colorOf(s + 1) : color, `${text} ${split}`.trim());
      });
    });
  }
  return lines;
}
function chart(title, names, option = {}) {
  const { series, bands, tables, hints } = linesOf(title, names, option), logarithmic = !!view.log[title];
  if (!tables.length) return null;
  const box = h("div"), tip = h("div", { class: "tip", hidden: true });
  const marks = option.marks ? shown().flatMap(([run]) => marksOf(run)) : [];
  const line = { stroke: colors().grid, width: 1 };
  const axis = { stroke: colors().muted, grid: line, ticks: line, font: "11px system-ui" };
  axis.values = (_, ticks) => ticks.map(t => t === null ? "" : number(t));
  const options = () => ({
    width: box.clientWidth, height: option.wide ? 320 : 210, series, bands,
    scales: { x: { time: false }, y: logarithmic ? { distr: 3, range: (_, low, high) => [low / 1.03, high * 1.03] } : {} },
    axes: [{ ...axis, space: 70, size: 28 }, { ...axis, size: 56 }],
    cursor: { y: false, sync: { key: "runs", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      setScale: [(u, key) => { if (key === "x") zoomed(u); }],
      setCursor: [u => tell(u, tip, hints, marks)],
      draw: [u => marks.forEach(mark => drawMark(u, mark))],
    },
  });
  charts.push({ box, make: () => new uPlot(options(), uPlot.join(tables), box) });
  const pressed = { "aria-pressed": String(logarithmic) };
  const head = h("div", { style: "display:flex;justify-content:space-between" },
    h("h3", {}, title + (option.unit ? `, ${option.unit}` : "")),
    option.log ? button("log", pressed, () => { view.log[title] = !logarithmic; }) : null);
  return h("div", { class: option.wide ? "card wide" : "card", "data-chart": title }, head,
    option.wide ? muted("Rings are evaluations, dashed marks resumes and ways back, whole ones incidents.") : null,
    names.length > 1 ? legend(names.map(([, text]) => text)) : null, box, tip);
}
function drawMark(u, { x: value, color, dash }) {
  const x = u.valToPos(value, "x", true), { left, top, width, height } = u.bbox;
  if (x < left || x > left + width) return;
  const context = u.ctx, size = 5 * devicePixelRatio;
  context.save();
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = devicePixelRatio;
  context.setLineDash(dash);
  context.stroke(new Path2D(`M${x} ${top} V${top + height}`));
  context.fill(new Path2D(`M${x - size} ${top} H${x + size} L${x} ${top + 1.6 * size} Z`));
  context.restore();
}
function zoomed(u) {
  const xs = u.data[0], { min, max } = u.scales.x;
  if (min === null || !xs.length) return;
  view.zoom = min <= xs[0] && max >= xs.at(-1) ? null : { min, max };
}
// The value at a place, or the nearest one within 40 places.
function near(values, i) {
  for (let d = 0; d < 40; d++) for (const j of [i - d, i + d]) if (values[j] !== undefined) return values[j];
  return null;
}
function tell(u, tip, hints, marks) {
  const { left, top, idx } = u.cursor;
  tip.hidden = left < 0 || idx === null;
  if (tip.hidden) return;
  const rows = hints.map(line => {
    const value = at => near(u.data[at], idx), [low, high] = line.low ? [value(line.low), value(line.low + 1)] : [];
    const range = low !== high ? ` (${number(low)} to ${number(high)})` : "";
    return h("div", {}, dot(line.color), `${line.text} ${number(value(line.at))}${range}`);
  });
  const here = marks.filter(mark => u.root.matches(":hover") && Math.abs(u.valToPos(mark.x, "x") - left) < 7);
  const texts = here.map(mark => h("div", { style: `color:${mark.color}` }, mark.text));
  tip.replaceChildren(muted(`${number(u.data[0][idx])} ${view.axis}`), ...rows, ...texts);
  const right = left > u.over.clientWidth / 2, x = u.over.offsetLeft + left;
  tip.style.left = right ? "" : `${x + 28}px`;
  tip.style.right = right ? `${u.root.clientWidth - x + 4}px` : "";
  tip.style.top = `${Math.max(0, top) + 44}px`;
}

// What the page shows, part by part.
function chartCards() {
  const names = [...new Set(page.runs.flatMap(run => Object.keys(run.steps.series)))], used = new Set();
  const take = (title, wanted, option) => {
    wanted.forEach(n => used.add(n));
    return chart(title, wanted.map(n => [n, label(n)]), option);
  };
  const several = (title, prefix, option) => {
    const group = names.filter(n => n.startsWith(prefix));
    return many() ? group.map(n => take(`${title}: ${label(n)}`, [n], option)) : [take(title, group, option)];
  };
  const evaluated = new Set(page.runs.flatMap(run => run.evaluations.flatMap(Object.keys)));
  const terms = names.filter(n => n.endsWith("loss") || (evaluated.has(n) && n !== "seconds"));
  terms.sort((a, b) => (b === "lm_loss") - (a === "lm_loss"));
  const main = [
    ...terms.map((n, i) => take(label(n), [n], { wide: i === 0, log: true, points: true, marks: true })),
    take("learning rate", ["learning_rate"]),
    take("gradient norm", ["grad_norm"], { log: true, marks: true }),
    take("throughput", ["tokens_per_second"], { unit: "tokens/s" }),
    take("TFLOP/s per rank", ["tflops"]),
    take("share of the measured matmul rate", ["matmul_share"], { unit: "%", scale: 100 }),
    take("step", ["seconds"], { unit: "s", log: true }),
    ...several("phases of a step", "phase_seconds.", { unit: "s", log: true }),
    ...several("ranks: own time of a step", "rank_seconds.own.", { unit: "s" }),
    ...several("ranks: waited in a step", "rank_seconds.waited.", { unit: "s" }),
  ];
  const varies = n => page.runs.some(run => new Set(meansOf(run, n).filter(x => x !== null)).size > 1);
  const more = names.filter(n => !used.has(n) && varies(n)).map(n => take(label(n), [n], { log: true }));
  const title = more.length ? h("h3", { style: "margin:18px 0 8px" }, "Further metrics") : null;
  return [div("grid", main), title, div("grid", more)];
}

const STATES = { silent: "no sign of life", idle: "not running" };
function overview(run, r) {
  const { state, steps, forecast } = run, start = run.starts.at(-1), total = start?.end?.iteration;
  const recent = name => median(meansOf(run, name).slice(-200));
  const speed = recent("tokens_per_second"), share = recent("matmul_share"), flops = recent("tflops");
  const loss = ["lm_loss", "total_loss", "loss"].find(n => steps.series[n]);
  const splits = [...new Set(run.evaluations.map(e => e.split))].filter(s => s.startsWith("validation"));
  const evaluated = splits.map(s => run.evaluations.findLast(e => e.split === s));
  const tokens = lastOf(steps.x.tokens), hours = lastOf(steps.x.hours);
  const own = [0, 1, 2].map(i => lastOf(meansOf(run, "rank_seconds.own." + i)));
  const facts = {
    progress: `step ${number(state.at)}` + (total ? ` of ${number(total)}` : "")
      + (tokens ? `, ${number(tokens)} tokens` : ""),
    "time left": state.eta !== undefined && `${duration(state.eta)}, until ${clock(Date.now() / 1000 + state.eta)}`,
    [label(loss ?? "")]: loss && number(lastOf(meansOf(run, loss))),
    validation: loss && evaluated.map(e => `${e.split.slice(11)} ${number(e[loss])}`.trim()).join(", "),
    [`forecast of the ${label(forecast?.name ?? "")}`]: forecast && `${number(forecast.value)} ± `
      + `${number(forecast.spread)} at step ${number(forecast.step)}, if it goes on as over its latest half`,
    throughput: speed && `${number(speed)} tokens/s`,
    "per rank": flops && `${number(flops)} TFLOP/s, ${number(100 * share)}% of its matmul rate`
      + (start?.nominal_rate ? `, MFU ${number(100e12 * flops / start.nominal_rate)}%` : ""),
    layout: start && layoutOf(start),
    device: start?.device,
    hosts: start && Object.entries(start.hosts).map(([name, n]) => `${name} (${n})`).join(", "),
    "own time of ranks, s": own[1] && own.map(number).join(" / ") + " (least / median / most)",
    parameters: start && number(start.parameters),
    training: hours && duration(3600 * hours),
    incidents: String(run.incidents.length),
    "skipped steps": steps.skipped.length,
    starts: run.starts.length,
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  const when = (state.word === "running" ? "last heard " : "") + clock(state.when);
  const title = [dot(colorOf(r)), run.name + "  ",
    h("span", { class: `state ${state.word}` }, STATES[state.word] ?? state.word),
    h("span", { class: "muted" }, "  " + (state.when ? when : ""))];
  const done = `width:${Math.min(100, 100 * state.at / total)}%;background:${colorOf(r)}`;
  return card(title, state.why ? h("pre", {}, state.why) : null,
    h("dl", { class: "facts" }, known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    total ? div("bar", h("i", { style: done })) : null);
}

// Experts: more than an even share in blue, less in orange; an even one is the paper's color.
function heatMap(rows, describe) {
  const width = Math.max(...rows.map(row => row.length)), height = Math.max(60, Math.min(360, 22 * rows.length));
  const canvas = h("canvas", { class: "map", width, height: rows.length, style: `height:${height}px` });
  const says = muted("\u00a0"), context = canvas.getContext("2d");
  rows.forEach((row, y) => row.forEach((share, x) => {
    context.fillStyle = colors().series[share >= 1 ? 0 : 1];
    context.globalAlpha = share >= 1 ? Math.min(1, (share - 1) / 2) : 1 - share;
    context.fillRect(x * width / row.length, y, width / row.length, 1);
  }));
  const place = (offset, size, count) => Math.min(count - 1, Math.floor(offset / size * count));
  canvas.onmousemove = event => {
    const y = place(event.offsetY, canvas.clientHeight, rows.length);
    says.textContent = describe(y, place(event.offsetX, canvas.clientWidth, rows[y].length));
  };
  return [canvas, says];
}
function experts(run, r) {
  const { steps, layers, shares } = run.experts, last = shares.at(-1), chosen = view.layer[r] ?? 0;
  const cells = last.flatMap((row, l) => row.map((share, e) => ({ share, l, e }))).sort((a, b) => a.share - b.share);
  const name = ({ share, l, e }) => `expert ${e} of layer ${layers[l]} (${share.toFixed(2)})`;
  const times = last[chosen].map((_, e) => shares.map(record => record[chosen]?.[e] ?? 0));
  const option = (layer, i) => h("option", { value: i, selected: i === chosen }, `layer ${layer}`);
  const choose = changing(select => { view.layer[r] = +select.value; });
  return card(titleOf(run, "Share of tokens, of an even one"),
    h("p", { class: "muted" }, `At step ${steps.at(-1)} the busiest is ${name(cells.at(-1))}, the idlest `
      + `${name(cells[0])}; ${cells.filter(c => c.share < 0.1).length} of ${cells.length} get less than 0.1. `
      + "Blue is more than an even share, orange less."),
    div("grid",
      h("div", {}, muted(`layers (down) and experts (across) at step ${steps.at(-1)}`),
        heatMap(last, (y, x) => `layer ${layers[y]}, expert ${x}: ${last[y][x].toFixed(2)}`)),
      h("div", {}, muted(h("select", { "aria-label": "layer", onchange: choose }, layers.map(option)),
        ` experts (down) over time, steps ${steps[0]} to ${steps.at(-1)}`),
        heatMap(times, (y, x) => `step ${steps[x]}, expert ${y}: ${times[y][x].toFixed(2)}`))));
}

const HELD = ["weights", "masters", "moments", "gradients", "buffers", "activations"];
function memory(run) {
  const ranksOf = {};  // ranks that hold the same
  run.memory.forEach((places, rank) => (ranksOf[JSON.stringify(places)] ??= []).push(rank));
  const rows = Object.entries(ranksOf).flatMap(([key, ranks]) =>
    Object.entries(JSON.parse(key)).map(([place, part]) => ({ place, part, ranks, all: sum(part) })));
  const most = Math.max(...rows.map(row => row.all));
  const piece = (size, all, i) =>
    h("i", { title: `${HELD[i]} ${bytes(size)}`, style: `width:${100 * size / all}%;background:${colorOf(i)}` });
  const bar = ({ place, part, ranks, all }) => h("div", { style: "margin-top:6px" },
    muted(`rank ${ranks.join(", ")} (${place}): ${bytes(all)}`),
    h("div", { class: "stack", style: `width:${100 * all / most}%` },
      HELD.map((kind, i) => part[kind] ? piece(part[kind], all, i) : null)));
  return card(titleOf(run, "Each rank in its first step"), legend(HELD), rows.filter(row => row.all).map(bar));
}

function planned(run) {
  const { plan } = run, measured = name => median(meansOf(run, name).slice(1));
  const fullest = parts => parts?.length ? Math.max(...parts.map(places => sum(places.device))) : null;
  const rows = [
    ["step, s", plan.seconds_per_step, measured("seconds"), number],
    ["tokens/s", plan.tokens_per_second, measured("tokens_per_second"), number],
    ["fullest device", fullest(plan.stages?.map(stage => stage.memory)), fullest(run.memory), bytes],
  ].map(([name, a, b, words]) => {
    const off = a && b ? `${b >= a ? "+" : ""}${(100 * (b / a - 1)).toFixed(1)}%` : null;
    return [name, ...[a, b].map(x => x ? words(x) : null), off];
  });
  return card((many() ? run.name + ", " : "") + `planned for ${plan.ranks} x ${plan.device}`,
    table(["", "planned", "measured (median)", "measured beside planned"], rows, [1, 2, 3]));
}

function settings() {
  const known = page.runs.filter(run => Object.keys(run.config).length);
  if (known.length > 1) {
    const keys = [...new Set(known.flatMap(run => Object.keys(run.config)))].sort();
    const rows = keys.map(key => [key, ...known.map(run => JSON.stringify(run.config[key] ?? null))]);
    const differ = rows.filter(([, ...values]) => new Set(values).size > 1);
    const heads = ["setting", ...known.map(run => run.name)];
    return [div("card", table(heads, differ) ?? "All settings are the same.")];
  }
  const own = known[0]?.starts.at(-1).settings;
  if (!own) return [];
  const rows = Object.entries(own).map(([key, value]) => [key, JSON.stringify(value)]);
  const title = `${rows.length} that are not at their defaults`;
  return [folded({ class: "card" }, title, table(["setting", "value"], rows))];
}

// What a damaged file holds must not take the rest of the page with it.
function safe(make, ...values) {
  try {
    return make(...values);
  } catch (error) {
    return div("card warn", `A part cannot be shown: ${error.message}`);
  }
}
function content() {
  const cards = (test, make) => shown().filter(([run]) => test(run)).map(([run, r]) => safe(make, run, r));
  const listed = (heads, rowsOf) => {
    const rows = shown().flatMap(([run]) => rowsOf(run).map(row => many() ? [run.name, ...row] : row));
    return table(many() ? ["run", ...heads] : heads, rows);
  };
  const damage = page.runs.flatMap(run => run.damage.map(line => h("div", {}, line)));
  const scored = name => name.endsWith("loss") || ["perplexity", "accuracy"].includes(name);
  const terms = [...new Set(page.runs.flatMap(run => run.evaluations.flatMap(Object.keys)))].filter(scored);
  const incident = i =>
    [number(i.iteration), i.time && moment(i.time), i.kind, i.action, i.ranks?.join(", ") || "all", i.summary];
  const evaluation = e => [number(e.iteration), e.split, ...terms.map(term => number(e[term]))];
  const start = s => [moment(s.time), number(s.iteration), layoutOf(s), s.device, Object.keys(s.hosts).join(", "),
    Object.entries(s.versions).filter(v => v[1]).map(v => v.join(" ")).join(", "),
    folded({}, "command", h("pre", {}, s.command))];
  const sample = run => s => div("card",
    muted(`${many() ? run.name + ", " : ""}step ${number(s.iteration)}, ${moment(s.time)}`),
    h("pre", {}, h("b", {}, s.prompt), s.text));
  const samples = page.runs.flatMap(run => run.samples.map(sample(run))).reverse();
  const message = e => `${moment(e.time)}  ${e.text ?? e.state + (e.reason ? ": " + e.reason : "")}`;
  const log = run => div("card scroll", many() ? h("h3", {}, run.name) : null, h("pre", {}, run.log.map(message).join("\n")));
  return [
    damage.length ? div("card warn", h("h3", {}, "Not everything could be read"), damage) : null,
    ...page.runs.map((run, r) => safe(overview, run, r)),
    ...section("Training", safe(chartCards)),
    ...section("Experts", cards(run => run.experts, experts)),
    ...section("Memory", cards(run => run.memory.length, memory)),
    ...section("Incidents", listed(["step", "when", "what", "done", "ranks", "summary"], run => run.incidents.map(incident))),
    ...section("Evaluations", listed(["step", "split", ...terms.map(label)], run => run.evaluations.map(evaluation).reverse())),
    ...section("Samples", samples.length ? div("grid", samples) : null),
    ...section("Plan beside what was measured", cards(run => run.plan, planned)),
    ...section(many() ? "Settings that differ" : "Settings", settings()),
    ...section("Starts", listed(["when", "at step", "layout", "device", "hosts", "versions", ""], run => run.starts.map(start))),
    ...section("Last messages", cards(run => run.log.length, log)),
  ].filter(Boolean);
}

function controls() {
  const chip = (run, r) => button([dot(colorOf(r)), run.name], { class: view.hidden.has(r) ? "chip off" : "chip" },
    () => { if (!view.hidden.delete(r)) view.hidden.add(r); });
  const pressed = name => ({ "aria-pressed": String(view.axis === name) });
  const axis = name => button(name, pressed(name), () => Object.assign(view, { axis: name, zoom: null }));
  const smooth = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, "aria-label": "smoothing",
    onchange: changing(input => { view.smooth = +input.value; }),
  });
  const other = view.theme === "dark" ? "light" : "dark";
  return [
    ...(many() ? page.runs.map(chip) : []),
    h("span", { class: "group" }, ["steps", "tokens", "hours"].map(axis)),
    h("label", {}, "smoothing ", smooth),
    button(other, {}, () => { view.theme = other; }),
    h("span", { class: "muted", id: "fresh" }, (watch ? "watched, " : "") + clock(page.written)),
  ];
}
function render() {
  const zoom = view.zoom, open = [...document.querySelectorAll("details[open] > summary")].map(s => s.textContent);
  charts.forEach(chart => chart.plot?.destroy());
  charts = [];
  document.documentElement.dataset.theme = view.theme;
  $("title").textContent = page.title;
  $("controls").replaceChildren(...controls());
  $("main").replaceChildren(...content());
  document.querySelectorAll("details > summary").forEach(s => { s.parentElement.open = open.includes(s.textContent); });
  charts.forEach(chart => { chart.plot = safe(chart.make); });
  charts = charts.filter(chart => chart.plot.setScale);
  if (zoom) charts.forEach(chart => chart.plot.setScale("x", zoom));
  view.zoom = zoom;
}
async function refresh() {
  try {
    const answer = await fetch(`data?${new URLSearchParams({ token: watch, since: page.revision })}`);
    if (answer.status === 200) {
      page = await answer.json();
      render();
    } else if (answer.status !== 204) throw new Error(await answer.text());
  } catch (error) {
    $("fresh").textContent = `no answer, as of ${clock(page.written)}`;
  }
  setTimeout(refresh, 3000);
}
dark.onchange = changing(({ matches }) => { view.theme = matches ? "dark" : "light"; });
onresize = () => charts.forEach(({ box, plot }) => plot.setSize({ width: box.clientWidth, height: plot.height }));
render();
if (watch) setTimeout(refresh, 3000);
