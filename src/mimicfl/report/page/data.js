"use strict";
// What is shown: the curves of groups, filtered, reduced to the best rate, and split into panels.
const $ = (id) => document.getElementById(id);
const ALGORITHM = "algorithm";
const state = { zoom: null, hidden: new Set(), off: Object.create(null) };  // hidden: labels; off: values of settings that are filtered out
const BY_POSITION = new Set(["megabytes", "seconds", "virtual_seconds"]);  // runs differ in these at the same round

const COUNTS = new Set(["round", "uploads"]);

// The points of one run; of rounds with the same x (empty rounds upload nothing) the last one counts.
function series(run, metric, axis) {
  const points = new Map(), ys = run.y[metric] || [], xs = run.x[axis] || [];
  ys.forEach((y, k) => { if (y !== null && xs[k] !== null && xs[k] !== undefined) points.set(xs[k], y); });
  return [...points].sort((a, b) => a[0] - b[0]);
}

// Mean and standard deviation over the seeds: at the x that all have, or by position.
function average(runs, axis) {
  const full = runs.filter((run) => run.length);
  if (!full.length) return { x: [], mean: [], std: [], early: false };
  let rows;
  if (BY_POSITION.has(axis)) {
    const length = Math.min(...full.map((run) => run.length));
    rows = [...Array(length).keys()].map((k) => [full.reduce((sum, run) => sum + run[k][0], 0) / full.length, full.map((run) => run[k][1])]);
  } else {
    const maps = full.map((run) => new Map(run));
    rows = full[0].map((p) => p[0]).filter((x) => maps.every((m) => m.has(x))).map((x) => [x, maps.map((m) => m.get(x))]);
  }
  const mean = rows.map(([, ys]) => ys.reduce((a, b) => a + b, 0) / ys.length);
  const std = rows.map(([, ys], k) => ys.length < 2 ? 0 : Math.sqrt(ys.reduce((sum, y) => sum + (y - mean[k]) ** 2, 0) / (ys.length - 1)));
  const early = BY_POSITION.has(axis) ? full.some((run) => run.length > rows.length) : full.some((run) => run.at(-1)[0] !== rows.at(-1)?.[0]);
  return { x: rows.map((r) => r[0]), mean, std, early };  // early: some seed has later points
}

function smoothed(values) {
  if (!$("smooth").checked) return values;
  const half = Math.max(1, Math.round(values.length / 40));
  return values.map((_, k) => {
    const part = values.slice(Math.max(0, k - half), k + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

const factorOf = (metric) => (DATA.percent.includes(metric) ? 100 : 1);
const filtered = (g) => Object.entries(g.settings).some(([key, value]) => (state.off[key] || new Set()).has(value));
const kept = () => DATA.groups.filter((g) => !filtered(g));

// Of the groups that differ only in the rate, the one that ends best.
function withBestRate(groups) {
  if (!DATA.rate || $("rates-shown").value !== "best") return groups;
  const best = new Map();
  for (const g of groups) {
    const key = JSON.stringify(Object.entries(g.settings).filter(([name]) => name !== DATA.rate.setting));
    const end = g.final[DATA.main];
    const known = best.get(key);
    const better = known === undefined || (end !== null && (known.final[DATA.main] === null ||
      (DATA.higher ? end[0] > known.final[DATA.main][0] : end[0] < known.final[DATA.main][0])));
    if (better) best.set(key, g);
  }
  return groups.filter((g) => [...best.values()].includes(g));
}

// Panels by the chosen setting; a line is named by its algorithm and by what the panel's title does not say.
function panels(groups, without = []) {
  const facet = $("facet") ? $("facet").value : "";
  const varied = DATA.settings.filter((key) => key !== ALGORITHM && !without.includes(key));
  const keys = facet === "*" ? varied : varied.filter((key) => key === facet);
  const best = DATA.rate && !without.length && $("rates-shown").value === "best" ? DATA.rate.setting : "";  // then a line needs no rate in its name
  const found = new Map();
  for (const g of groups) {
    const title = keys.map((key) => `${key} ${g.settings[key]}`).join(", ");
    const rest = varied.filter((key) => !keys.includes(key) && key !== best).map((key) => `${key} ${g.settings[key]}`).join(", ");
    if (!found.has(title)) found.set(title, []);
    const name = keys.length || without.length || best ? [g.settings[ALGORITHM], rest].filter(Boolean).join(", ") : g.label;
    found.get(title).push({ ...g, rest, name, noted: best && !keys.includes(best) ? `${best} ${g.settings[best]}` : "" });
  }
  const list = [...found].map(([title, lines]) => ({ title, lines }));
  if (list.length > 1 || without.length || best) {  // one colour per algorithm, one kind of dashes per remaining setting
    const rests = [...new Set(list.flatMap((p) => p.lines.map((g) => g.rest)))];
    for (const p of list) for (const g of p.lines) { g.color = g.base; g.dash = [0, DATA.patterns[rests.indexOf(g.rest) % DATA.patterns.length]]; }
  }
  return list;
}

function curvesOf(g, metric, axis) {
  const factor = factorOf(metric);
  const runs = g.runs.map((run) => series(run, metric, axis));
  const c = average(runs, axis);
  return { ...g, early: c.early, x: c.x, y: smoothed(c.mean).map((v) => v * factor), s: c.std.map((v) => v * factor),
    every: runs.map((run) => ({ x: run.map((p) => p[0]), y: smoothed(run.map((p) => p[1])).map((v) => v * factor) })) };
}
