// Controls, export, and what the address remembers.
function options(select, entries) {
  for (const [value, label] of entries) select.add(new Option(label, value));
}

function update() {
  drawChart(); drawRates(); drawClasses(); drawParticipation(); drawClients(); drawTested();
  const drawn = new Map(panels(kept()).flatMap((p) => p.lines.map((g) => [g.label, g])));  // the table's lines look as those of the chart
  document.querySelectorAll("tr[data-group]").forEach((row) => {
    const g = DATA.groups[+row.dataset.group], swatch = row.querySelector(".swatch");
    row.hidden = filtered(g);
    if (swatch && drawn.has(g.label)) swatch.outerHTML = swatchOf(drawn.get(g.label));
  });
  for (const id of ["curves-csv", "curves-png", "curves-svg"]) $(id).disabled = !$("chart").querySelector("figure");  // nothing to export
  if ($("filtered")) $("filtered").textContent = notShown();
  remember();
}

// Which values of settings are filtered out: the filters may be folded.
function notShown() {
  const off = DATA.settings.flatMap((key) => DATA.groups.map((g) => g.settings[key]).filter((v, k, all) => all.indexOf(v) === k && (state.off[key] || new Set()).has(v)));
  return off.length ? ` (not shown: ${off.join("; ")})` : "";
}

function drawFilters() {
  if (!$("filters")) return;
  $("filters").replaceChildren(...DATA.settings.map((key) => {
    const set = document.createElement("fieldset"), values = [...new Set(DATA.groups.map((g) => g.settings[key]))];
    set.innerHTML = `<legend>${text(key)}</legend>` + values.map((v, k) => `<label><input type="checkbox" data-value="${k}"${(state.off[key] || new Set()).has(v) ? "" : " checked"}> ${named(v)}</label>`).join("");
    set.querySelectorAll("input").forEach((box, k) => { box.onchange = () => {
      state.off[key] ??= new Set();
      box.checked ? state.off[key].delete(values[k]) : state.off[key].add(values[k]);
      update();
    }; });
    return set;
  }));
}

// The state of the controls is kept in the address: a live page keeps it when it loads again, and a link shows the same view.
const CONTROLS = ["metric", "axis", "facet", "rates-shown", "schedule"], BOXES = ["seeds", "smooth", "logx", "logy"];
const FOLDED = [...document.querySelectorAll("details")];
function remember() {
  const held = { zoom: state.zoom, hidden: [...state.hidden], off: Object.fromEntries(Object.entries(state.off).map(([k, v]) => [k, [...v]])) };
  for (const id of CONTROLS) if ($(id)) held[id] = $(id).value;
  for (const id of BOXES) held[id] = $(id).checked;
  held.open = FOLDED.map((each) => each.open);
  try { history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(held))); } catch { /* not where the page has no address of its own */ }
}
function recall() {
  let held;
  try { held = JSON.parse(decodeURIComponent(location.hash.slice(1))); } catch { return; }
  if (typeof held !== "object" || held === null) return;
  for (const id of CONTROLS) if ($(id) && [...$(id).options].some((o) => o.value === held[id])) $(id).value = held[id];
  for (const id of BOXES) $(id).checked = held[id] === true;
  if (Array.isArray(held.open)) FOLDED.forEach((each, k) => { each.open = held.open[k] === true; });
  if (Array.isArray(held.zoom) && held.zoom.length === 2 && held.zoom.every(Number.isFinite)) state.zoom = held.zoom;
  if (Array.isArray(held.hidden)) state.hidden = new Set(held.hidden);
  for (const key of DATA.settings) if (held.off && Array.isArray(held.off[key])) state.off[key] = new Set(held.off[key]);
}

function download(name, kind, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
const cell = (v) => { const s = String(v ?? ""); return /[",\n]/.test(s) ? `"${s.replaceAll('"', '""')}"` : s; };

// The curves as they are shown, one line per point.
function curvesCsv() {
  const metric = $("metric").value, axis = $("axis").value, factor = factorOf(metric);
  const rows = [["curve", "panel", axis, metric, "std"]];
  for (const p of panels(withBestRate(kept()))) for (const g of p.lines.filter((g) => !state.hidden.has(g.name))) {
    const c = curvesOf(g, metric, axis);
    c.x.forEach((x, k) => rows.push([g.name, p.title, x, c.y[k] / factor, c.s[k] / factor]));
  }
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

// Lines of at most so many characters, broken after spaces and commas where possible.
function folded(words, most) {
  const lines = [""];
  for (const part of words.match(new RegExp(`[^ ,]{0,${most - 1}}[ ,]|[^ ,]{1,${most}}`, "g")) || []) {
    if (lines.at(-1) && (lines.at(-1) + part).trimEnd().length > most) lines.push("");
    lines[lines.length - 1] += part;
  }
  return lines.map((line) => line.trim());
}

// All panels as one SVG with the styles of the page.
function chartSvg() {
  const figures = [...$("chart").querySelectorAll("figure")], columns = +css("--columns") || +$("chart").style.getPropertyValue("--columns") || 1;
  const [w, h] = ["width", "height"].map((key) => +figures[0].querySelector("svg").getAttribute(key));
  const titles = figures.map((figure) => folded(figure.querySelector("figcaption")?.textContent ?? "", Math.floor((w - 58) / 8)));
  const head = figures.length > 1 ? 7 + 15 * Math.max(...titles.map((lines) => lines.length)) : 0;
  const legend = [...$("legend").querySelectorAll("button:not(.off)")];
  const W = columns * (w + 14), rows = Math.ceil(figures.length / columns), early = $("early").textContent;
  const H = rows * (h + head) + 20 * (legend.length + Boolean(early)) + 12;
  let svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${W}" height="${H}" font-family="sans-serif"><style>text{fill:${css("--ink")};font-size:12px}.grid{stroke:${css("--line")}}</style><rect width="100%" height="100%" fill="${css("--paper")}"/>`;
  figures.forEach((figure, k) => {
    const [x, y] = [(k % columns) * (w + 14), Math.floor(k / columns) * (h + head)], below = head - 7 - 15 * titles[k].length;
    titles[k].forEach((line, n) => { svg += `<text x="${x + 58}" y="${y + below + 15 * (n + 1)}" font-weight="bold">${text(line)}</text>`; });
    svg += `<svg x="${x}" y="${y + head}" width="${w}" height="${h}">${figure.querySelector("svg").innerHTML}</svg>`;
  });
  legend.forEach((button, k) => { svg += `<svg x="58" y="${rows * (h + head) + 6 + 20 * k}" width="38" height="10">${button.querySelector("svg").innerHTML}</svg><text x="104" y="${rows * (h + head) + 15 + 20 * k}">${text(button.textContent)}</text>`; });
  if (early) svg += `<text x="58" y="${H - 10}">${text(early)}</text>`;
  return svg + "</svg>";
}

function chartPng() {
  const svg = chartSvg(), picture = new Image(), canvas = document.createElement("canvas");
  const [, w, h] = svg.match(/width="([\d.]+)" height="([\d.]+)"/).map(Number);
  picture.onload = () => {
    [canvas.width, canvas.height] = [2 * w, 2 * h];
    canvas.getContext("2d").drawImage(picture, 0, 0, 2 * w, 2 * h);
    canvas.toBlob((blob) => { document.body.dataset.png = String(blob.size); download("curves.png", "image/png", blob); });
  };
  picture.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
}

const EXPORTS = {
  "curves-csv": () => download("curves.csv", "text/csv", curvesCsv()),
  "curves-svg": () => download("curves.svg", "image/svg+xml", chartSvg()),
  "curves-png": chartPng,
  "page-pdf": () => print(),
  "results-csv": () => download("results.csv", "text/csv", DATA.exports.csv),
  "pairs-csv": () => download("pairs.csv", "text/csv", DATA.exports.pairs),
  "results-tex": () => download("results.tex", "text/x-tex", DATA.exports.latex),
};

options($("metric"), Object.entries(DATA.metrics));
options($("axis"), Object.entries(DATA.axes));
$("axis").value = DATA.axis;
options($("schedule"), DATA.schedules.map((s, k) => [k, s.title]));
if ($("facet")) {
  const varied = DATA.settings.filter((key) => key !== ALGORITHM);
  options($("facet"), [["", "one chart"], ...varied.map((key) => [key, key]), ...(varied.length > 1 ? [["*", "all settings"]] : [])]);
  $("facet").value = DATA.facet;
}
if (DATA.main === "distance") $("logy").checked = true;
recall();
for (const id of [...CONTROLS, ...BOXES]) if ($(id)) $(id).onchange = () => { if (id === "axis" || id === "logx") state.zoom = null; update(); };
$("schedule").onchange = () => { drawAvailability(); drawClients(); drawTested(); remember(); };
$("metric").onchange = () => { $("logy").checked = $("metric").value === "distance"; update(); };
$("unzoom").onclick = () => { state.zoom = null; update(); };
for (const [id, act] of Object.entries(EXPORTS)) if ($(id)) $(id).onclick = act;
for (const each of FOLDED) each.ontoggle = remember;
addEventListener("resize", () => { drawAvailability(); update(); });
drawFilters(); drawAvailability(); update();

// A live page loads again, but not while it is used: that would fold an open list of choices, or end a drag.
const IDLE = 3000;  // milliseconds
let used = -IDLE;
for (const kind of ["pointerdown", "pointerup", "keydown"]) addEventListener(kind, () => { used = performance.now(); }, true);
function reload() {
  const idle = performance.now() - used;
  idle < IDLE ? setTimeout(reload, IDLE - idle) : location.reload();
}
if (DATA.live) setTimeout(reload, 1000 * DATA.live);
document.body.dataset.ready = "yes";
