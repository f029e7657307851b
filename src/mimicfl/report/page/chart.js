// Charts as SVG, drawn at the width of their box so that text has the same size on every screen.
const tip = $("tip");
function showTip(event, html) {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - box.height - 4, event.clientY + 12)) + "px";
}
const hideTip = () => { tip.hidden = true; };
// Escape a value for the text of an element or for an attribute in double quotes.
const text = (value) => { const node = document.createElement("span"); node.textContent = value; return node.innerHTML.replaceAll('"', "&quot;"); };
const short = (v) => (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3)) ? v.toExponential(1) : String(+v.toPrecision(4));
const cut = (words, most) => (words.length > most ? words.slice(0, most - 1) + "…" : words);

// A name that may break after the separators of a spec, but not inside brackets, as in `label-correlated:classes=[0,1],rare=0.02`.
const named = (value) => text(value).replace(/[,:](?=\S)(?![^[\]]*\])/g, "$&<wbr>");

// Ticks at round numbers: multiples of 1, 2 or 5 times a power of ten; on a log scale, powers of ten and their 2- and 5-fold. `whole`: integers.
function ticks(low, high, count, log, whole) {
  if (log) {
    const marks = [];
    for (let e = Math.floor(low); e <= Math.ceil(high); e++) for (const k of high - low < 3 ? [1, 2, 5] : [1]) marks.push(e + Math.log10(k));
    const inside = marks.filter((v) => v >= low - 1e-9 && v <= high + 1e-9);
    if (inside.length > 1) return inside.filter((_, k) => k % Math.ceil(inside.length / count) === 0);
  }
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw && (s >= 1 || !whole || log)) || 1, marks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) marks.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return whole && !marks.length ? ticks(low, high, count, log) : marks;
}

// The stroke of a line; dash lengths are multiples of the line width.
function pen(g, width) {
  const [begin, pattern] = g.dash;
  const dashes = pattern.length ? ` stroke-dasharray="${pattern.map((v) => v * width).join(" ")}" stroke-dashoffset="${begin * width}"` : "";
  return `stroke="${g.color}" stroke-width="${width}"${dashes}`;
}
const swatchOf = (g) => `<svg class="swatch" viewBox="0 0 38 10" aria-hidden="true"><line x2="38" y1="5" y2="5" ${pen(g, 2.6)}/></svg>`;

// The least distance between two of these numbers, which increase.
const apart = (found) => found.slice(1).reduce((least, v, k) => Math.min(least, v - found[k]), Infinity);

// A frame with axes. `box`: width and height; `x`, `y`: { low, high, log, label }; `x.marks` are values to mark if they have room; `x.whole`: x counts. Lows and highs are of the logarithms on log scales.
function frame(box, x, y) {
  const M = { l: 58, r: 12, t: 8, b: 40 }, W = box.width, H = box.height;
  const to = (axis, v) => (axis.log ? Math.log10(Math.max(v, 1e-300)) : v), from = (axis, v) => (axis.log ? 10 ** v : v);
  const clamp = (v, axis) => Math.min(Math.max(v, axis.low - (axis.high - axis.low)), axis.high + (axis.high - axis.low));
  const X = (v) => M.l + (W - M.l - M.r) * (clamp(to(x, v), x) - x.low) / (x.high - x.low);
  const Y = (v) => H - M.b - (H - M.t - M.b) * (clamp(to(y, v), y) - y.low) / (y.high - y.low);
  let svg = "";
  for (const v of ticks(y.low, y.high, 5, y.log)) {
    const at = H - M.b - (H - M.t - M.b) * (v - y.low) / (y.high - y.low);
    svg += `<line class="grid" x1="${M.l}" x2="${W - M.r}" y1="${at}" y2="${at}"/><text x="${M.l - 7}" y="${at + 4}" text-anchor="end">${short(from(y, v))}</text>`;
  }
  const most = Math.max(2, Math.floor(W / 90)), own = (x.marks || []).map((v) => to(x, v));
  for (const v of own.length && own.length <= most && apart(own) * (W - M.l - M.r) >= 34 * (x.high - x.low) ? own : ticks(x.low, x.high, most, x.log, x.whole)) {
    const at = M.l + (W - M.l - M.r) * (v - x.low) / (x.high - x.low);
    svg += `<text x="${at}" y="${H - M.b + 17}" text-anchor="middle">${short(from(x, v))}</text>`;
  }
  svg += `<text x="${(W + M.l) / 2}" y="${H - 5}" text-anchor="middle">${text(x.label)}</text>`;
  svg += `<text transform="translate(12 ${(H - M.b) / 2}) rotate(-90)" text-anchor="middle">${text(cut(y.label, Math.floor(H / 7)))}</text>`;
  const path = (xs, ys) => xs.map((v, k) => (k ? "L" : "M") + X(v).toFixed(1) + " " + Y(ys[k]).toFixed(1)).join("");
  const back = (px) => from(x, x.low + (px - M.l) / (W - M.l - M.r) * (x.high - x.low));
  return { M, W, H, X, Y, path, svg, back, left: M.l, right: W - M.r, top: M.t, bottom: H - M.b };
}

// Limits of an axis that contains all values, with a margin.
function limits(values, log, margin = 0.03) {
  const usable = values.filter((v) => Number.isFinite(v) && (!log || v > 0)).map((v) => (log ? Math.log10(v) : v));
  let low = usable.reduce((a, b) => Math.min(a, b), Infinity), high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!usable.length) [low, high] = [0, 1];
  if (low === high) { low -= 1; high += 1; }
  const pad = (high - low) * margin;
  return { low: low - pad, high: high + pad, log };
}

// How wide each of `count` panels is, and how high.
function layout(node, count) {
  const room = node.clientWidth || 900;
  const columns = count === 1 ? 1 : Math.max(1, Math.min(count, Math.floor(room / 330)));
  node.style.setProperty("--columns", columns);
  const width = Math.floor((room - 14 * (columns - 1)) / columns);
  return { width, height: count === 1 ? Math.max(260, Math.min(420, 0.6 * width)) : Math.max(210, Math.min(280, 0.7 * width)) };
}

// The values of a curve that a zoom shows: those inside, and where it crosses the edges, which may lie between two points.
function shown(xs, ys) {
  if (!state.zoom) return ys;
  const [from, to] = state.zoom;
  const at = (x) => {
    const k = xs.findIndex((v) => v > x);
    return k > 0 ? ys[k - 1] + (ys[k] - ys[k - 1]) * (x - xs[k - 1]) / (xs[k] - xs[k - 1]) : NaN;
  };
  return [...ys.filter((_, k) => xs[k] >= from && xs[k] <= to), at(from), at(to)];
}

function drawChart() {
  const metric = $("metric").value, axis = $("axis").value, seeds = $("seeds").checked;
  const found = panels(withBestRate(kept()));
  for (const p of found) p.lines = p.lines.map((g) => curvesOf(g, metric, axis));
  $("early").textContent = found.some((p) => p.lines.some((g) => g.early && !state.hidden.has(g.name))) ? DATA.early : "";
  for (const p of found) p.lines = p.lines.filter((g) => g.x.length);
  drawLegend(found);
  for (const p of found) p.lines = p.lines.filter((g) => !state.hidden.has(g.name));
  const drawn = found.filter((p) => p.lines.length), lines = drawn.flatMap((p) => p.lines);
  $("unzoom").hidden = !state.zoom;
  if (!lines.length) { $("chart").innerHTML = "<p class='small'>Nothing to show: all curves are hidden or filtered out, or have no values.</p>"; return; }
  const logX = $("logx").checked, logY = $("logy").checked;
  const ys = lines.flatMap((g) => seeds ? g.every.flatMap((e) => shown(e.x, e.y))
    : [-1, 0, 1].flatMap((side) => shown(g.x, g.y.map((v, k) => v + side * g.s[k]))));
  const xs = state.zoom || lines.flatMap((g) => g.x);
  const x = { ...limits(state.zoom || logX ? xs : [0, ...xs], logX, state.zoom ? 0 : 0.01), label: DATA.axes[axis], whole: COUNTS.has(axis) };
  if (!logX && !state.zoom) x.low = Math.min(...xs, 0);
  const y = { ...limits(ys, logY), label: DATA.metrics[metric] };
  if (factorOf(metric) === 100 && !logY && !state.zoom) { y.low = Math.max(0, Math.floor(y.low / 10) * 10); y.high = Math.min(100, Math.ceil(y.high / 10) * 10); }
  const box = layout($("chart"), drawn.length);
  $("chart").innerHTML = drawn.map((p) => `<figure class="panel">${p.title ? `<figcaption>${named(p.title)}</figcaption>` : ""}${curvesSvg(p, frame(box, x, y), seeds)}</figure>`).join("");
  drawn.forEach((p, k) => hover($("chart").querySelectorAll("svg.plot")[k], p, frame(box, x, y), metric, axis));
}

function curvesSvg(panel, f, seeds) {
  let svg = `<svg class="plot" viewBox="0 0 ${f.W} ${f.H}" width="${f.W}" height="${f.H}">${f.svg}`;
  const [w, h] = [f.right - f.left, f.bottom - f.top];
  svg += `<svg x="${f.left}" y="${f.top}" width="${w}" height="${h}" viewBox="${f.left} ${f.top} ${w} ${h}" overflow="hidden">`;  // cuts off what is zoomed out
  for (const g of panel.lines) {
    if (seeds) for (const e of g.every) svg += `<path d="${f.path(e.x, e.y)}" fill="none" ${pen(g, 1)} opacity=".45"/>`;
    else if (g.s.some((v) => v > 0)) {
      const up = f.path(g.x, g.y.map((v, k) => v + g.s[k]));
      const down = f.path([...g.x].reverse(), g.y.map((v, k) => v - g.s[k]).reverse()).replace("M", "L");
      svg += `<path d="${up}${down}Z" fill="${g.color}" opacity=".14"/>`;
    }
  }
  for (const g of panel.lines) {
    svg += `<path d="${f.path(g.x, g.y)}" fill="none" ${pen(g, g.strong ? 2.8 : 1.8)} stroke-linejoin="round"/>`;
    if (g.x.length === 1) svg += `<circle cx="${f.X(g.x[0])}" cy="${f.Y(g.y[0])}" r="3.2" fill="${g.color}"/>`;  // one round so far
  }
  return svg + `</svg><rect class="zoom" y="${f.top}" height="${f.bottom - f.top}" visibility="hidden"/><line class="grid cursor" y1="${f.top}" y2="${f.bottom}" visibility="hidden"/></svg>`;
}

// Values under the mouse or the finger; dragging selects what to zoom into.
function hover(view, panel, f, metric, axis) {
  const cursor = view.querySelector(".cursor"), area = view.querySelector(".zoom"), factor = factorOf(metric);
  const at = (event) => { const box = view.getBoundingClientRect(); return (event.clientX - box.left) / box.width * f.W; };
  const show = (v) => (factor === 100 ? v.toFixed(1) : short(v));
  let from = null;
  const values = (event) => {
    const spot = f.back(at(event));
    const nearest = (g) => g.x.reduce((b, v, k) => Math.abs(v - spot) < Math.abs(g.x[b] - spot) ? k : b, 0);
    const rows = panel.lines.map((g) => ({ g, k: nearest(g) })).sort((a, b) => b.g.y[b.k] - a.g.y[a.k]);
    const x = rows[0].g.x[rows[0].k];
    cursor.setAttribute("x1", f.X(x)); cursor.setAttribute("x2", f.X(x)); cursor.setAttribute("visibility", "visible");
    showTip(event, `<b>${text(DATA.axes[axis])}: ${short(x)}</b>` + rows.slice(0, 14).map(({ g, k }) =>
      `${swatchOf(g)}${named(g.name)}${g.noted ? ` <small>${text(g.noted)}</small>` : ""} <span class="value">${show(g.y[k])}${g.s[k] ? " ± " + show(g.s[k]) : ""}</span><br>`).join(""));
  };
  view.onpointermove = (event) => {
    if (from === null) return values(event);
    const px = Math.min(Math.max(at(event), f.left), f.right);
    area.setAttribute("x", Math.min(from, px)); area.setAttribute("width", Math.abs(px - from)); area.setAttribute("visibility", "visible");
  };
  view.onpointerdown = (event) => {
    if (event.button) return; // not the first button
    from = Math.min(Math.max(at(event), f.left), f.right);
    try { view.setPointerCapture(event.pointerId); } catch { /* a pointer that is already gone */ }
    hideTip();
  };
  view.onpointerup = (event) => {
    const px = at(event), [a, b] = [Math.min(from ?? px, px), Math.max(from ?? px, px)].map((p) => f.back(Math.min(Math.max(p, f.left), f.right)));
    const dragged = from !== null && Math.abs(px - from) > 6;
    from = null;
    if (dragged) { hideTip(); state.zoom = [a, b]; update(); } else values(event);
  };
  view.ondblclick = () => { hideTip(); state.zoom = null; update(); };
  view.onpointercancel = view.onmouseleave = () => { hideTip(); from = null; for (const each of [cursor, area]) each.setAttribute("visibility", "hidden"); };
}

function drawLegend(found) {
  const lines = new Map();
  for (const p of found) for (const g of p.lines) if (!lines.has(g.name)) lines.set(g.name, g);
  $("legend").replaceChildren(...[...lines.values()].map((g) => {
    const button = document.createElement("button"), off = state.hidden.has(g.name);
    button.innerHTML = `${swatchOf(g)}${named(g.name)}`;
    button.className = off ? "off" : "";
    button.setAttribute("aria-pressed", String(!off));
    button.onclick = () => { off ? state.hidden.delete(g.name) : state.hidden.add(g.name); update(); };
    return button;
  }));
}

// The final value against the learning rate, one panel per setting; the best rate has a ring, a dashed one at the edge of what was tried.
function drawRates() {
  if (!$("rates")) return;
  const metric = DATA.main, factor = factorOf(metric), key = DATA.rate.setting;
  const found = panels(kept(), [key]);
  for (const p of found) {
    const lines = new Map();
    for (const g of p.lines.filter((g) => g.rate !== null && g.final[metric] && !state.hidden.has(g.name))) {
      if (!lines.has(g.name)) lines.set(g.name, { ...g, points: [] });
      lines.get(g.name).points.push({ x: g.rate, y: g.final[metric][0] * factor, s: (g.final[metric][1] || 0) * factor, is: g.settings[key] });
    }
    p.lines = [...lines.values()];
    for (const g of p.lines) {
      g.points.sort((a, b) => a.x - b.x);
      g.best = g.points.reduce((b, q) => ((DATA.higher ? q.y > b.y : q.y < b.y) ? q : b));
      g.edge = g.points.length > 1 && (g.best === g.points[0] || g.best === g.points[g.points.length - 1]);
    }
  }
  const drawn = found.filter((p) => p.lines.length);
  const points = drawn.flatMap((p) => p.lines.flatMap((g) => g.points));
  if (!points.length) { $("rates").innerHTML = "<p class='small'>Nothing to show: all runs are filtered out.</p>"; return; }
  const x = { ...limits(points.map((q) => q.x), true, 0.06), label: DATA.rate.label, marks: [...new Set(points.map((q) => q.x))].sort((a, b) => a - b) };
  const y = { ...limits(points.flatMap((q) => [q.y - q.s, q.y + q.s]), false, 0.06), label: DATA.metrics[metric] };
  const box = layout($("rates"), drawn.length);
  $("rates").innerHTML = drawn.map((p) => {
    const f = frame(box, x, y);
    let svg = `<svg class="plot" viewBox="0 0 ${f.W} ${f.H}" width="${f.W}" height="${f.H}">${f.svg}`;
    for (const g of p.lines) {  // below all points, which would otherwise not be reached by the pointer
      for (const q of g.points) if (q.s) svg += `<line x1="${f.X(q.x)}" x2="${f.X(q.x)}" y1="${f.Y(q.y - q.s)}" y2="${f.Y(q.y + q.s)}" stroke="${g.color}" opacity=".5"/>`;
      svg += `<path d="${f.path(g.points.map((q) => q.x), g.points.map((q) => q.y))}" fill="none" ${pen(g, 1.8)}/>`;
    }
    for (const g of p.lines) {
      for (const q of g.points) {
        const [cx, cy] = [f.X(q.x), f.Y(q.y)], best = q !== g.best ? "" : g.edge ? ": the best is at the edge of what was tried" : ": the best";
        const word = `${g.name}, ${key} ${q.is}: ${factor === 100 ? q.y.toFixed(1) : short(q.y)}${q.s ? " ± " + (factor === 100 ? q.s.toFixed(1) : short(q.s)) : ""}${best}`;
        svg += `<circle cx="${cx}" cy="${cy}" r="3.2" fill="${g.color}" data-tip="${text(word)}"/>`;
        if (q === g.best) svg += `<circle class="${g.edge ? "edge" : "best"}" cx="${cx}" cy="${cy}" r="7.5" fill="none" stroke="${g.edge ? "var(--warn)" : g.color}" stroke-width="2"${g.edge ? ' stroke-dasharray="3 2"' : ""} data-tip="${text(word)}"/>`;
      }
    }
    return `<figure class="panel">${p.title ? `<figcaption>${named(p.title)}</figcaption>` : ""}${svg}</svg></figure>`;
  }).join("");
  tips($("rates"));
}

function tips(node) {
  node.onmousemove = (event) => { const cell = event.target.closest("[data-tip]"); cell ? showTip(event, text(cell.dataset.tip)) : hideTip(); };
  node.onmouseleave = hideTip;
}
