"use strict";
const themes = JSON.parse(document.getElementById("data").textContent), { watch, ...first } = themes.page;
let page = first;
const dark = matchMedia("(prefers-color-scheme: dark)");
const view = { axis: "steps", smooth: 0, log: {}, zoom: null, hidden: new Set(), theme: dark.matches ? "dark" : "light", layer: {} };
let charts = [];

// Elements, and numbers in words. Text goes in as text nodes alone, so nothing of a run is read as HTML.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined));
  return element;
}
const colors = () => themes.themes[view.theme];
const colorOf = run => colors().series[run % colors().series.length];
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
const clock = seconds => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
const moment = text => text ? clock(Date.parse(text) / 1000) : "–";
function median(values) {
  const known = values.filter(x => x !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}
const lastOf = values => [...values].reverse().find(x => x !== null);
function table(heads, rows, numeric = []) {
  const cells = (row, tag) => row.map((cell, i) => h(tag, { class: numeric.includes(i) ? "number" : null }, cell ?? "–"));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, cells(heads, "th"))),
    h("tbody", {}, rows.map(row => h("tr", {}, cells(row, "td"))))));
}
const section = (title, ...content) => content.flat().some(Boolean) ? [h("h2", {}, title), ...content.flat()] : [];
const label = name => name.replace(/_/g, " ").replace(/^(phase|rank) seconds\./, "").replace(/\.(\d)$/, (_, i) => " " + (["min", "median", "max"][i] ?? i));
const layoutOf = start => start ? Object.entries(start.layout).filter(([axis, size]) => size > 1 && !["edp", "etp", "zero_stage"].includes(axis))
  .map(([axis, size]) => axis.toUpperCase() + size).concat("ZeRO " + start.layout.zero_stage).join(" × ") : null;

// Where a step lies on the chosen axis.
function placed(run, step) {
  const { steps, [view.axis]: xs } = run.steps.x;
  if (!xs || !steps.length) return null;
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
  return step > steps[high] ? null : xs[low];
}
function smoothed(values, weight) {
  let mean = 0, sum = 0;
  return values.map(x => {
    if (x === null || x === undefined) return x;
    mean = weight * mean + (1 - weight) * x; sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}
function marksOf(run) {
  return [
    ...run.starts.filter(s => s.iteration > 0).map(s => ({ step: s.iteration, text: "resumed " + moment(s.time), color: colors().muted, dash: [4, 3] })),
    ...run.marks.map(m => ({ step: m.before, text: `went back from step ${m.before} to ${m.iteration}`, color: colors().series[1], dash: [4, 3] })),
    ...run.incidents.map(i => ({ step: i.iteration, text: `${i.kind}: ${i.summary}`, color: colors().series[3], dash: [] })),
  ].map(mark => ({ ...mark, x: placed(run, mark.step) })).filter(mark => mark.x !== null);
}

// A chart of one or several series of all runs: [name, text] pairs; `option` has unit, log, points, marks.
function chart(title, names, option = {}) {
  const lines = [], tables = [], series = [{}], bands = [], many = names.length > 1;
  page.runs.forEach((run, r) => {
    const xs = run.steps.x[view.axis];
    if (view.hidden.has(r) || !xs) return;
    names.forEach(([name, text], n) => {
      const data = run.steps.series[name], scale = option.scale ?? 1, logs = view.log[title];
      const fit = values => values.map(x => x === null || (logs && x <= 0) ? null : x * scale);
      const color = many ? colorOf(n) : colorOf(r), dash = r >= colors().series.length && !many ? [6, 3] : null;
      const tell = [page.runs.length > 1 ? run.name : null, many || page.runs.length < 2 ? text : null].filter(Boolean).join(" ");
      if (data) {
        const all = fit(data.mean), known = all.filter(x => x !== null).length, at = series.length;
        // A series with values at some steps alone is a line from each to the next.
        const kept = known < all.length / 2 && !data.low ? all.flatMap((x, i) => x === null ? [] : [i]) : null;
        const mean = kept ? kept.map(i => all[i]) : all, columns = [kept ? kept.map(i => xs[i]) : xs, mean];
        series.push({ stroke: view.smooth || data.low ? color + (view.smooth ? "55" : "") : color, width: 1.4, dash, points: { show: known < 60, size: 4 } });
        lines.push({ at, tell, color, low: data.low ? at + 1 : null });
        if (data.low) {
          columns.push(fit(data.low), fit(data.high));
          series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
          bands.push({ series: [at + 2, at + 1], fill: color + "30" });
        }
        if (view.smooth) {
          columns.push(smoothed(mean, view.smooth));
          series.push({ stroke: color, width: 1.8, dash, points: { show: false } });
          lines[lines.length - 1].at = series.length - 1;
        }
        tables.push(columns);
      }
      for (const split of option.points ? ["validation", "test"] : []) {
        const points = run.evaluations.filter(e => e.split === split && typeof e[name] === "number").map(e => [placed(run, e.iteration), e[name]]).filter(p => p[0] !== null);
        const unique = [...new Map(points.sort((a, b) => a[0] - b[0])).entries()];
        if (!unique.length) continue;
        lines.push({ at: series.length, tell: `${tell} ${split}`.trim(), color });
        series.push({ stroke: color, width: 1, dash: [2, 4], points: { show: true, size: 8, fill: colors().paper, stroke: color, width: 2 } });
        tables.push([unique.map(p => p[0]), unique.map(p => p[1])]);
      }
    });
  });
  if (!tables.length) return null;
  const box = h("div"), tip = h("div", { class: "tip", hidden: true });
  const logButton = option.log ? h("button", { "aria-pressed": String(!!view.log[title]), onclick: () => { view.log[title] = !view.log[title]; render(); } }, "log") : null;
  const card = h("div", { class: "card" + (option.wide ? " wide" : ""), "data-chart": title },
    h("div", { style: "display:flex;justify-content:space-between" }, h("h3", {}, title + (option.unit ? `, ${option.unit}` : "")), logButton),
    option.wide ? h("div", { class: "muted" }, "Rings are evaluations, dashed marks resumes and ways back, whole ones incidents.") : null,
    many ? h("div", { class: "muted" }, names.map(([, text], n) => [h("span", { class: "dot", style: `background:${colorOf(n)}` }), text + "  "])) : null, box, tip);
  const marks = option.marks ? page.runs.flatMap((run, r) => view.hidden.has(r) ? [] : marksOf(run)) : [];
  const axis = { stroke: colors().muted, grid: { stroke: colors().grid, width: 1 }, ticks: { stroke: colors().grid, width: 1 }, font: "11px system-ui", values: (_, ticks) => ticks.map(t => t === null ? "" : number(t)) };
  charts.push({ box, make: () => new uPlot({
    width: box.clientWidth, height: option.wide ? 320 : 210, series, bands,
    scales: { x: { time: false }, y: view.log[title] ? { distr: 3, range: (_, low, high) => [low / 1.03, high * 1.03] } : {} },
    axes: [{ ...axis, space: 70, size: 28 }, { ...axis, size: 56 }],
    cursor: { y: false, sync: { key: "runs", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      setScale: [(u, key) => { if (key === "x") zoomed(u); }],
      setCursor: [u => tell(u, tip, lines, marks)],
      draw: [u => marks.forEach(mark => {
        const x = u.valToPos(mark.x, "x", true), { left, top, width, height } = u.bbox;
        if (x < left || x > left + width) return;
        const c = u.ctx; c.save(); c.strokeStyle = c.fillStyle = mark.color; c.lineWidth = devicePixelRatio; c.setLineDash(mark.dash);
        c.beginPath(); c.moveTo(x, top); c.lineTo(x, top + height); c.stroke();
        const s = 5 * devicePixelRatio; c.beginPath(); c.moveTo(x - s, top); c.lineTo(x + s, top); c.lineTo(x, top + 1.6 * s); c.fill(); c.restore();
      })],
    },
  }, uPlot.join(tables), box) });
  return card;
}
function zoomed(u) {
  const xs = u.data[0], { min, max } = u.scales.x;
  if (min === null || !xs.length) return;
  view.zoom = min <= xs[0] && max >= xs[xs.length - 1] ? null : { min, max };
}
function tell(u, tip, lines, marks) {
  const { left, top, idx } = u.cursor;
  tip.hidden = left < 0 || idx === null;
  if (tip.hidden) return;
  const value = (s, i) => { for (let d = 0; d < 40; d++) for (const j of [i - d, i + d]) if (u.data[s][j] !== undefined) return u.data[s][j]; return null; };
  const rows = lines.map(line => {
    const now = value(line.at, idx), low = line.low ? value(line.low, idx) : null, high = line.low ? value(line.low + 1, idx) : null;
    return h("div", {}, h("span", { class: "dot", style: `background:${line.color}` }), `${line.tell} ${number(now)}` + (low !== null && low !== high ? ` (${number(low)} to ${number(high)})` : ""));
  });
  const near = marks.filter(mark => u.root.matches(":hover") && Math.abs(u.valToPos(mark.x, "x") - left) < 7).map(mark => h("div", { style: `color:${mark.color}` }, mark.text));
  tip.replaceChildren(h("div", { class: "muted" }, `${number(u.data[0][idx])} ${view.axis}`), ...rows, ...near);
  const right = left > u.over.clientWidth / 2, x = u.over.offsetLeft + left;
  tip.style.left = right ? "" : `${x + 28}px`;
  tip.style.right = right ? `${u.root.clientWidth - x + 4}px` : "";
  tip.style.top = `${Math.max(0, top) + 44}px`;
}

function chartCards() {
  const names = [...new Set(page.runs.flatMap(run => Object.keys(run.steps.series)))], shown = new Set();
  const evaluated = new Set(page.runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e))));
  const take = (title, wanted, option) => { wanted.forEach(n => shown.add(n)); return wanted.some(n => names.includes(n)) ? chart(title, wanted.map(n => [n, label(n)]), option) : null; };
  const terms = names.filter(n => n.endsWith("loss") || (evaluated.has(n) && n !== "seconds")).sort((a, b) => (b === "lm_loss") - (a === "lm_loss"));
  const several = (title, prefix, option) => {
    const group = names.filter(n => n.startsWith(prefix));
    return page.runs.length > 1 ? group.map(n => take(`${title}: ${label(n)}`, [n], option)) : [group.length ? take(title, group, option) : null];
  };
  const main = [
    ...terms.map((n, i) => take(label(n), [n], { wide: i === 0, log: true, points: true, marks: true })),
    take("learning rate", ["learning_rate"]), take("gradient norm", ["grad_norm"], { log: true, marks: true }),
    take("throughput", ["tokens_per_second"], { unit: "tokens/s" }), take("TFLOP/s of a rank", ["tflops"]),
    take("share of the measured matmul rate", ["matmul_share"], { unit: "%", scale: 100 }), take("step", ["seconds"], { unit: "s", log: true }),
    ...several("phases of a step", "phase_seconds.", { unit: "s", log: true }),
    ...several("ranks: own time of a step", "rank_seconds.own.", { unit: "s" }), ...several("ranks: waited in a step", "rank_seconds.waited.", { unit: "s" }),
  ];
  const more = names.filter(n => !shown.has(n)).filter(n => page.runs.some(run => new Set(run.steps.series[n]?.mean.filter(x => x !== null)).size > 1));
  return [h("div", { class: "grid" }, main), more.length ? h("h3", { style: "margin:18px 0 8px" }, "Further metrics") : null, h("div", { class: "grid" }, more.map(n => chart(label(n), [[n, label(n)]], { log: true })))];
}

function overview(run, r) {
  const { state, steps } = run, start = run.starts.at(-1), total = start?.end?.iteration, series = name => steps.series[name]?.mean ?? [];
  const words = { silent: "no sign of life", idle: "not running", running: "running", finished: "finished", stopped: "stopped", failed: "failed" };
  const speed = median(series("tokens_per_second").slice(-200)), share = median(series("matmul_share").slice(-200)), flops = median(series("tflops").slice(-200));
  const loss = ["lm_loss", "total_loss", "loss"].find(n => steps.series[n]), evaluated = run.evaluations.filter(e => e.split === "validation").at(-1);
  const fact = (name, value) => value ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : null;
  return h("div", { class: "card wide" },
    h("h3", {}, h("span", { class: "dot", style: `background:${colorOf(r)}` }), run.name + "  ", h("span", { class: `state ${state.word}` }, words[state.word] ?? state.word), h("span", { class: "muted" }, "  " + (state.when ? (state.word === "running" ? "last heard " : "") + clock(state.when) : ""))),
    state.why ? h("pre", {}, state.why) : null,
    h("dl", { class: "facts" },
      fact("progress", `step ${number(state.at)}` + (total ? ` of ${number(total)}` : "") + (lastOf(steps.x.tokens ?? []) ? `, ${number(lastOf(steps.x.tokens))} tokens` : "")),
      fact("time left", state.eta !== undefined ? `${duration(state.eta)}, until ${clock(Date.now() / 1000 + state.eta)}` : null),
      fact(loss ? label(loss) : "", loss ? number(lastOf(series(loss))) : null), fact("validation", evaluated && loss ? number(evaluated[loss]) : null),
      fact("forecast of the " + label(run.forecast?.name ?? ""), run.forecast ? `${number(run.forecast.value)} ± ${number(run.forecast.spread)} at step ${number(run.forecast.step)}, if it goes on as over its latest half` : null),
      fact("throughput", speed ? `${number(speed)} tokens/s` : null), fact("of a rank", flops ? `${number(flops)} TFLOP/s, ${number(100 * share)}% of its matmul rate` + (start?.nominal_rate ? `, MFU ${number(100e12 * flops / start.nominal_rate)}%` : "") : null),
      fact("layout", start ? `${start.world_size} ranks: ${layoutOf(start)}` : null), fact("device", start?.device), fact("hosts", start ? Object.entries(start.hosts).map(([n, k]) => `${n} (${k})`).join(", ") : null),
      fact("own time of ranks, s", lastOf(series("rank_seconds.own.1")) ? ["0", "1", "2"].map(i => number(lastOf(series("rank_seconds.own." + i)))).join(" / ") + " (least / median / most)" : null),
      fact("parameters", start ? number(start.parameters) : null), fact("training", lastOf(steps.x.hours ?? []) ? duration(3600 * lastOf(steps.x.hours)) : null),
      fact("incidents", String(run.incidents.length)), fact("skipped steps", steps.skipped.length ? String(steps.skipped.length) : null), fact("starts", run.starts.length ? String(run.starts.length) : null)),
    total ? h("div", { class: "bar" }, h("i", { style: `width:${Math.min(100, 100 * state.at / total)}%;background:${colorOf(r)}` })) : null);
}

// Experts: more than an even share in blue, less in orange; an even one is the paper's color.
function shade(share) {
  const mix = (a, b, t) => "#" + [1, 3, 5].map(i => Math.round(parseInt(a.slice(i, i + 2), 16) * (1 - t) + parseInt(b.slice(i, i + 2), 16) * t).toString(16).padStart(2, "0")).join("");
  return share >= 1 ? mix(colors().paper, colors().series[0], Math.min(1, (share - 1) / 2)) : mix(colors().paper, colors().series[1], 1 - share);
}
function heatMap(rows, describe) {
  const width = Math.max(...rows.map(row => row.length)), canvas = h("canvas", { class: "map", width, height: rows.length, style: `height:${Math.max(60, Math.min(360, 22 * rows.length))}px` });
  const says = h("div", { class: "muted" }, "\u00a0"), context = canvas.getContext("2d");
  rows.forEach((row, y) => row.forEach((share, x) => { context.fillStyle = shade(share); context.fillRect(x * width / row.length, y, width / row.length, 1); }));
  canvas.onmousemove = event => {
    const y = Math.min(rows.length - 1, Math.floor(event.offsetY / canvas.clientHeight * rows.length)), x = Math.min(rows[y].length - 1, Math.floor(event.offsetX / canvas.clientWidth * rows[y].length));
    says.textContent = describe(y, x);
  };
  return h("div", {}, canvas, says);
}
function experts(run, r) {
  const { steps, layers, shares } = run.experts, last = shares.at(-1), chosen = view.layer[r] ?? 0;
  const flat = last.flatMap((row, l) => row.map((share, e) => ({ share, l, e }))).sort((a, b) => a.share - b.share), worst = flat[0], best = flat.at(-1);
  const times = last[chosen].map((_, e) => shares.map(record => record[chosen]?.[e] ?? 0));
  const name = cell => `expert ${cell.e} of layer ${layers[cell.l]} (${cell.share.toFixed(2)})`;
  return h("div", { class: "card wide" }, h("h3", {}, page.runs.length > 1 ? run.name : "Share of tokens, of an even one"),
    h("p", { class: "muted" }, `At step ${steps.at(-1)} the busiest is ${name(best)}, the idlest ${name(worst)}; ${flat.filter(c => c.share < 0.1).length} of ${flat.length} get less than 0.1. Blue is more than an even share, orange less.`),
    h("div", { class: "grid" },
      h("div", {}, h("div", { class: "muted" }, `layers (down) and experts (across) at step ${steps.at(-1)}`), heatMap(last, (y, x) => `layer ${layers[y]}, expert ${x}: ${last[y][x].toFixed(2)}`)),
      h("div", {}, h("div", { class: "muted" }, h("select", { "aria-label": "layer", onchange: event => { view.layer[r] = +event.target.value; render(); } }, layers.map((l, i) => h("option", { value: i, selected: i === chosen }, `layer ${l}`))), ` experts (down) over time, steps ${steps[0]} to ${steps.at(-1)}`),
        heatMap(times, (y, x) => `step ${steps[x]}, expert ${y}: ${times[y][x].toFixed(2)}`))));
}

function memory(run) {
  const kinds = ["weights", "masters", "moments", "gradients", "buffers", "activations"], groups = new Map(), sum = part => Object.values(part).reduce((a, b) => a + b, 0);
  run.memory.forEach((places, rank) => { const key = JSON.stringify(places); groups.set(key, [...(groups.get(key) ?? []), rank]); });
  const rows = [...groups].flatMap(([key, ranks]) => Object.entries(JSON.parse(key)).filter(([, part]) => sum(part)).map(([place, part]) => ({ place, part, ranks })));
  const most = Math.max(...rows.map(row => sum(row.part)));
  return h("div", { class: "card wide" }, h("h3", {}, page.runs.length > 1 ? run.name : "Each rank in its first step"), h("div", { class: "muted" }, kinds.map((kind, i) => [h("span", { class: "dot", style: `background:${colorOf(i)}` }), kind + "  "])),
    rows.map(({ place, part, ranks }) => h("div", { style: "margin-top:6px" }, h("div", { class: "muted" }, `rank ${ranks.join(", ")} (${place}): ${bytes(sum(part))}`),
      h("div", { class: "stack", style: `width:${100 * sum(part) / most}%` }, kinds.map((kind, i) => part[kind] ? h("i", { title: `${kind} ${bytes(part[kind])}`, style: `width:${100 * part[kind] / sum(part)}%;background:${colorOf(i)}` }) : null)))));
}

function planned(run) {
  const plan = run.plan, seconds = median((run.steps.series.seconds?.mean ?? []).slice(1)), speed = median((run.steps.series.tokens_per_second?.mean ?? []).slice(1));
  const device = places => Object.values(places.device ?? {}).reduce((a, b) => a + b, 0);
  const most = run.memory.length ? Math.max(...run.memory.map(device)) : null, least = plan.stages ? Math.max(...plan.stages.map(s => device(s.memory))) : null;
  const off = (a, b) => a && b ? `${b >= a ? "+" : ""}${(100 * (b / a - 1)).toFixed(1)}%` : "–";
  const rows = [["step, s", plan.seconds_per_step, seconds, number], ["tokens/s", plan.tokens_per_second, speed, number], ["fullest device", least, most, bytes]];
  return h("div", { class: "card wide" }, h("h3", {}, (page.runs.length > 1 ? run.name + ", " : "") + `planned for ${plan.ranks} x ${plan.device}`), table(["", "planned", "measured (median)", "measured beside planned"], rows.map(([name, a, b, show]) => [name, a ? show(a) : "–", b ? show(b) : "–", off(a, b)]), [1, 2, 3]));
}

function settings() {
  const known = page.runs.filter(run => Object.keys(run.config).length);
  if (known.length > 1) {
    const keys = [...new Set(known.flatMap(run => Object.keys(run.config)))].sort(), text = (run, key) => JSON.stringify(run.config[key] ?? null);
    const rows = keys.filter(key => new Set(known.map(run => text(run, key))).size > 1).map(key => [key, ...known.map(run => text(run, key))]);
    return [h("div", { class: "card" }, rows.length ? table(["setting", ...known.map(run => run.name)], rows) : "All settings are the same.")];
  }
  const own = known[0]?.starts.at(-1).settings;
  return own ? [h("details", { class: "card" }, h("summary", {}, `${Object.keys(own).length} that are not at their defaults`), table(["setting", "value"], Object.entries(own).map(([key, value]) => [key, JSON.stringify(value)])))] : [];
}

// What a damaged file holds must not take the rest of the page with it.
function safe(make, ...values) {
  try { return make(...values); } catch (error) { return h("div", { class: "card warn" }, `A part cannot be shown: ${error.message}`); }
}
function content() {
  const many = page.runs.length > 1, of = (test, make) => page.runs.map((run, r) => !view.hidden.has(r) && test(run) ? safe(make, run, r) : null), rowsOf = make => page.runs.flatMap((run, r) => view.hidden.has(r) ? [] : make(run).map(row => many ? [run.name, ...row] : row));
  const heads = names => many ? ["run", ...names] : names, damage = page.runs.flatMap(run => run.damage);
  const incidents = rowsOf(run => run.incidents.map(i => [number(i.iteration), i.time ? moment(i.time) : null, i.kind, i.action, (i.ranks ?? []).join(", ") || "all", i.summary]));
  const terms = [...new Set(page.runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e).filter(k => k.endsWith("loss") || ["perplexity", "accuracy"].includes(k)))))];
  const evaluations = rowsOf(run => run.evaluations.map(e => [number(e.iteration), e.split, ...terms.map(t => number(e[t]))]).reverse());
  const starts = rowsOf(run => run.starts.map(s => [moment(s.time), number(s.iteration), `${s.world_size} ranks: ${layoutOf(s)}`, s.device, Object.keys(s.hosts).join(", "), Object.entries(s.versions).filter(v => v[1]).map(v => v.join(" ")).join(", "), h("details", {}, h("summary", {}, "command"), h("pre", {}, s.command))]));
  const samples = page.runs.flatMap(run => run.samples.map(s => h("div", { class: "card" }, h("div", { class: "muted" }, `${many ? run.name + ", " : ""}step ${number(s.iteration)}, ${moment(s.time)}`), h("pre", {}, h("b", {}, s.prompt ?? ""), s.text ?? "")))).reverse();
  return [
    damage.length ? h("div", { class: "card warn", id: "damage" }, h("h3", {}, "Not everything could be read"), damage.map(line => h("div", {}, line))) : null,
    ...page.runs.map((run, r) => safe(overview, run, r)), ...section("Training", safe(chartCards)), ...section("Experts", of(run => run.experts, experts)), ...section("Memory", of(run => run.memory.length, memory)),
    ...section("Incidents", incidents.length ? table(heads(["step", "when", "what", "done", "ranks", "summary"]), incidents) : null),
    ...section("Evaluations", evaluations.length ? table(heads(["step", "split", ...terms.map(label)]), evaluations) : null), ...section("Samples", samples.length ? h("div", { class: "grid" }, samples) : null),
    ...section("Plan beside what was measured", of(run => run.plan, planned)), ...section(many ? "Settings that differ" : "Settings", settings()),
    ...section("Starts", starts.length ? table(heads(["when", "at step", "layout", "device", "hosts", "versions", ""]), starts) : null),
    ...section("Last messages", of(run => run.log.length, run => h("div", { class: "card scroll" }, many ? h("h3", {}, run.name) : null, h("pre", {}, run.log.map(e => `${moment(e.time)}  ${e.text ?? e.state + (e.reason ? ": " + e.reason : "")}`).join("\n"))))),
  ].filter(Boolean);
}

function controls() {
  const axes = ["steps", "tokens", "hours"].map(axis => h("button", { "aria-pressed": String(view.axis === axis), onclick: () => { view.axis = axis; view.zoom = null; render(); } }, axis));
  const smooth = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, "aria-label": "smoothing", onchange: event => { view.smooth = +event.target.value; render(); } });
  const chips = page.runs.length > 1 ? page.runs.map((run, r) => h("button", { class: view.hidden.has(r) ? "chip off" : "chip", onclick: () => { view.hidden.has(r) ? view.hidden.delete(r) : view.hidden.add(r); render(); } }, h("span", { class: "dot", style: `background:${colorOf(r)}` }), run.name)) : [];
  return [...chips, h("span", { class: "group" }, axes), h("label", {}, "smoothing ", smooth), h("button", { onclick: () => { view.theme = view.theme === "dark" ? "light" : "dark"; render(); } }, view.theme === "dark" ? "light" : "dark"), h("span", { class: "muted", id: "fresh" }, (watch ? "watched, " : "") + clock(page.written))];
}
function render() {
  const zoom = view.zoom, open = [...document.querySelectorAll("details[open] > summary")].map(s => s.textContent);
  charts.forEach(c => c.plot?.destroy()); charts = [];
  document.documentElement.dataset.theme = view.theme;
  document.getElementById("title").textContent = page.title;
  document.getElementById("controls").replaceChildren(...controls());
  document.getElementById("main").replaceChildren(...content());
  document.querySelectorAll("details > summary").forEach(s => { if (open.includes(s.textContent)) s.parentElement.open = true; });
  charts = charts.filter(c => { c.plot = safe(c.make); return c.plot.setScale; });
  if (zoom) charts.forEach(c => c.plot.setScale("x", zoom));
  view.zoom = zoom;
}
dark.addEventListener("change", event => { view.theme = event.matches ? "dark" : "light"; render(); });
addEventListener("resize", () => charts.forEach(c => c.plot.setSize({ width: c.box.clientWidth, height: c.plot.height })));
async function refresh() {
  try {
    const answer = await fetch(`data?${new URLSearchParams({ token: watch, since: page.revision })}`);
    if (answer.status === 200) { page = await answer.json(); render(); }
    else if (answer.status !== 204) throw new Error(await answer.text());
  } catch (error) { document.getElementById("fresh").textContent = `no answer, as of ${clock(page.written)}`; }
  setTimeout(refresh, 3000);
}
render();
if (watch) setTimeout(refresh, 3000);
