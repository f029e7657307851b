"use strict";
const $ = (id) => document.getElementById(id);
const tip = $("tip");
const hidden = new Set();

function showTip(event, html) {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.min(innerHeight - box.height - 4, event.clientY + 12) + "px";
}
const hideTip = () => { tip.hidden = true; };
// A value as text of an element or of an attribute in double quotes.
const text = (value) => { const node = document.createElement("span"); node.textContent = value; return node.innerHTML.replaceAll('"', "&quot;"); };

function options(select, entries) {
  for (const [value, label] of entries) select.add(new Option(label, value));
}

// Round numbers for the axis: 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const marks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) marks.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return marks;
}
const short = (v) => (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3)) ? v.toExponential(1) : String(+v.toPrecision(4));

function smoothed(values) {
  if (!$("smooth").checked) return values;
  const half = Math.max(1, Math.round(values.length / 40));
  return values.map((_, k) => {
    const part = values.slice(Math.max(0, k - half), k + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

// Dashes are in line widths.
function pen(g, width) {
  const [begin, pattern] = g.dash;
  const dashes = pattern.length ? ` stroke-dasharray="${pattern.map((v) => v * width).join(" ")}" stroke-dashoffset="${begin * width}"` : "";
  return `stroke="${g.color}" stroke-width="${width}"${dashes}`;
}

function drawChart() {
  const metric = $("metric").value, axis = $("axis").value;
  const factor = metric === "test_accuracy" ? 100 : 1, log = metric === "distance";
  const W = 940, H = 400, M = { l: 76, r: 14, t: 10, b: 44 };
  const groups = DATA.groups.filter((g) => !hidden.has(g.label)).map((g) => {
    const c = g.curves[metric][axis];
    return { ...g, x: c.x, y: smoothed(c.mean).map((v) => v * factor), s: c.std.map((v) => v * factor),
      every: g.seeds[metric][axis].map((run) => ({ x: run.map((p) => p[0]), y: smoothed(run.map((p) => p[1])).map((v) => v * factor) })) };
  }).filter((g) => g.x.length);
  const seeds = $("seeds").checked;
  const xs = groups.flatMap((g) => g.x);
  const ys = groups.flatMap((g) => [...g.y, ...(seeds ? g.every.flatMap((e) => e.y) : g.y.flatMap((v, k) => [v - g.s[k], v + g.s[k]]))]).filter((v) => !log || v > 0);
  if (!xs.length) { $("chart").innerHTML = "<p class='small'>Nothing to show: click a name below.</p>"; return; }
  const to = log ? Math.log10 : (v) => v;
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), to(Math.min(...ys)), to(Math.max(...ys))];
  if (metric === "test_accuracy") { y0 = Math.max(0, Math.floor(y0 / 10) * 10); y1 = Math.min(100, Math.ceil(y1 / 10) * 10); }
  x0 = Math.min(x0, 0);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { y0 -= 1; y1 += 1; }
  if (metric !== "test_accuracy") { const pad = (y1 - y0) * 0.03; y0 -= pad; y1 += pad; }
  const X = (v) => M.l + (W - M.l - M.r) * (v - x0) / (x1 - x0);
  const Y = (v) => H - M.b - (H - M.t - M.b) * (Math.min(Math.max(log ? to(Math.max(v, 1e-300)) : v, y0), y1) - y0) / (y1 - y0);
  const path = (x, y) => x.map((v, k) => (k ? "L" : "M") + X(v).toFixed(1) + " " + Y(y[k]).toFixed(1)).join("");
  let svg = `<svg viewBox="0 0 ${W} ${H}">`;
  for (const v of ticks(y0, y1, 6)) {
    const y = log ? 10 ** v : v;
    svg += `<line class="grid" x1="${M.l}" x2="${W - M.r}" y1="${Y(y)}" y2="${Y(y)}"/><text x="${M.l - 8}" y="${Y(y) + 4}" text-anchor="end">${short(y)}</text>`;
  }
  for (const v of ticks(x0, x1, 9)) svg += `<text x="${X(v)}" y="${H - M.b + 18}" text-anchor="middle">${short(v)}</text>`;
  svg += `<text x="${(W + M.l) / 2}" y="${H - 6}" text-anchor="middle">${text(DATA.axes[axis])}</text>`;
  svg += `<text transform="translate(13 ${(H - M.b) / 2}) rotate(-90)" text-anchor="middle">${text(DATA.metrics[metric])}</text>`;
  for (const g of groups) {
    if (seeds) for (const e of g.every) svg += `<path d="${path(e.x, e.y)}" fill="none" ${pen(g, 1)} opacity=".45"/>`;
    else {
      const up = path(g.x, g.y.map((v, k) => v + g.s[k]));
      const down = path([...g.x].reverse(), g.y.map((v, k) => v - g.s[k]).reverse()).replace("M", "L");
      svg += `<path d="${up}${down}Z" fill="${g.color}" opacity=".14"/>`;
    }
  }
  for (const g of groups) svg += `<path d="${path(g.x, g.y)}" fill="none" ${pen(g, g.strong ? 2.8 : 1.8)} stroke-linejoin="round"/>`;
  svg += `<line id="cursor" class="grid" y1="${M.t}" y2="${H - M.b}" visibility="hidden"/></svg>`;
  $("chart").innerHTML = svg;
  const view = $("chart").firstChild, cursor = $("cursor");
  view.onmousemove = (event) => {
    const box = view.getBoundingClientRect();
    const at = x0 + ((event.clientX - box.left) / box.width * W - M.l) / (W - M.l - M.r) * (x1 - x0);
    const nearest = (g) => g.x.reduce((b, v, k) => Math.abs(v - at) < Math.abs(g.x[b] - at) ? k : b, 0);
    const rows = groups.map((g) => ({ g, k: nearest(g) })).sort((a, b) => b.g.y[b.k] - a.g.y[a.k]);
    const spot = rows[0].g.x[rows[0].k];
    cursor.setAttribute("x1", X(spot)); cursor.setAttribute("x2", X(spot)); cursor.setAttribute("visibility", "visible");
    showTip(event, `<b>${text(DATA.axes[axis])}: ${short(spot)}</b>` + rows.map(({ g, k }) =>
      `${g.swatch}${text(g.label)} ${factor === 100 ? g.y[k].toFixed(1) : short(g.y[k])}${g.s[k] ? " ± " + (factor === 100 ? g.s[k].toFixed(1) : short(g.s[k])) : ""}<br>`).join(""));
  };
  view.onmouseleave = () => { hideTip(); cursor.setAttribute("visibility", "hidden"); };
}

function drawLegend() {
  $("legend").replaceChildren(...DATA.groups.map((g) => {
    const button = document.createElement("button");
    button.innerHTML = `${g.swatch}${text(g.label)}`;
    button.className = hidden.has(g.label) ? "off" : "";
    button.setAttribute("aria-pressed", String(!hidden.has(g.label)));
    button.onclick = () => { hidden.has(g.label) ? hidden.delete(g.label) : hidden.add(g.label); drawLegend(); drawChart(); };
    return button;
  }));
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const chosen = () => DATA.schedules[+$("schedule").value];

function drawAvailability() {
  const s = chosen(), canvas = $("availability");
  const room = canvas.parentElement.clientWidth || 936;
  const w = Math.max(2, Math.ceil(room / s.rounds)), h = s.clients > 200 ? 2 : s.clients > 60 ? 5 : 10;
  canvas.width = w * s.rounds; canvas.height = h * s.clients;
  canvas.style.width = 2 * s.rounds > room ? "" : "100%"; canvas.style.height = canvas.height + "px";
  const pen = canvas.getContext("2d");
  pen.fillStyle = css("--absent"); pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = css("--present");
  s.active.forEach((clients, t) => clients.forEach((i) => pen.fillRect(t * w, i * h, w - (w > 3), h - (h > 3))));
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const t = Math.floor((event.clientX - box.left) / box.width * s.rounds), i = Math.floor((event.clientY - box.top) / h);
    if (t < 0 || t >= s.rounds || i < 0 || i >= s.clients) return hideTip();
    showTip(event, `<b>round ${t}, client ${i}</b>${s.active[t].includes(i) ? "answered" : "absent"}; there in ${(100 * s.participation[i]).toFixed(0)} % of the rounds${s.labels ? `<br>holds ${text(s.labels[i])}` : ""}`);
  };
  canvas.onmouseleave = hideTip;
  $("observed").innerHTML = s.observed.map((line) => `<li>${text(line)}</li>`).join("");
}

// From orange at 0 over near-white to blue at 1, which colour-blind readers can tell apart, too.
function heat(v) {
  if (v === null || v === undefined) return "background:var(--panel)";
  const [from, to, k] = v < 0.5 ? [[200, 84, 10], [244, 240, 232], 2 * v] : [[244, 240, 232], [38, 110, 170], 2 * v - 1];
  const mix = from.map((c, i) => Math.round(c + (to[i] - c) * k));
  return `background:rgb(${mix.join(" ")});color:${v > 0.85 || v < 0.1 ? "#fff" : "#10151a"}`;
}
const percent = (v) => v === null || v === undefined ? "–" : (100 * v).toFixed(0);

function drawClasses() {
  if (!$("classes")) return;
  const count = Math.max(...DATA.groups.map((g) => g.classes.length));
  const head = "<tr><th></th>" + [...Array(count).keys()].map((c) => `<th>${c}</th>`).join("") + "<th>worst</th></tr>";
  $("classes").innerHTML = "<table class='heat'>" + head + DATA.groups.map((g) => {
    const worst = Math.min(...g.classes.filter((v) => v !== null));
    return `<tr><th>${text(g.label)}</th>` + g.classes.map((v) => `<td style="${heat(v)}">${percent(v)}</td>`).join("") + `<td style="${heat(worst)}">${percent(worst)}</td></tr>`;
  }).join("") + "</table>";
}

function drawClients() {
  if (!$("clients")) return;
  const s = chosen();
  const order = [...s.participation.keys()].sort((a, b) => s.participation[a] - s.participation[b] || a - b);
  const name = (i) => `client ${i}, there in ${(100 * s.participation[i]).toFixed(0)} % of the rounds${s.labels ? `, holds ${s.labels[i]}` : ""}`;
  const top = `<tr><th>present (%)</th>` + order.map((i) => `<td title="${text(name(i))}" style="background:color-mix(in srgb, var(--present) ${(15 + 85 * s.participation[i]).toFixed(0)}%, var(--absent))"></td>`).join("") + "<th>mean</th><th>worst</th></tr>";
  const rows = DATA.groups.filter((g) => g.clients[s.key]).map((g) => {
    const v = g.clients[s.key], mean = v.reduce((a, b) => a + b, 0) / v.length;
    return `<tr><th>${text(g.label)}</th>` + order.map((i) => `<td data-tip="${text(name(i))}: ${percent(v[i])} %" style="${heat(v[i])}"></td>`).join("") + `<th>${percent(mean)}</th><th>${percent(Math.min(...v))}</th></tr>`;
  });
  $("clients").innerHTML = `<table class='heat dense'>${top}${rows.join("")}</table>`;
  $("clients").onmousemove = (event) => {
    const cell = event.target.closest("[data-tip]");
    cell ? showTip(event, text(cell.dataset.tip)) : hideTip();
  };
  $("clients").onmouseleave = hideTip;
}

options($("metric"), Object.entries(DATA.metrics));
options($("axis"), Object.entries(DATA.axes));
options($("schedule"), DATA.schedules.map((s, k) => [k, s.title]));
for (const id of ["metric", "axis", "seeds", "smooth"]) $(id).onchange = drawChart;
$("schedule").onchange = () => { drawAvailability(); drawClients(); };
addEventListener("resize", drawAvailability);
drawLegend(); drawChart(); drawAvailability(); drawClasses(); drawClients();
document.body.dataset.ready = "yes";
