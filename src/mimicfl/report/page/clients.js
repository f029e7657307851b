// Views of clients: the schedule, accuracy by class, by participation group and by client.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const chosen = () => DATA.schedules[+$("schedule").value];
const NOTHING = "<p class='small'>Nothing to show: no run that is shown has these values.</p>";
const percent = (v) => v === null || v === undefined ? "–" : (100 * v).toFixed(0);

function drawAvailability() {
  const s = chosen(), canvas = $("availability");
  const room = canvas.parentElement.clientWidth || 936;
  const w = Math.max(2, Math.ceil(room / s.rounds)), h = s.clients > 200 ? 2 : s.clients > 60 ? 5 : 10;
  canvas.width = w * s.rounds; canvas.height = h * s.clients;
  canvas.style.width = 2 * s.rounds > room ? "" : "100%"; canvas.style.height = canvas.height + "px";
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = css("--present");
  s.active.forEach((clients, t) => clients.forEach((i) => pen.fillRect(t * w, i * h, w - (w > 3), h - (h > 3))));
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const t = Math.floor((event.clientX - box.left) / box.width * s.rounds), i = Math.floor((event.clientY - box.top) / h);
    if (t < 0 || t >= s.rounds || i < 0 || i >= s.clients) return hideTip();
    showTip(event, `<b>round ${t}, client ${i}</b>${s.active[t].includes(i) ? "active" : "not active"}; participates in ${percent(s.participation[i])} % of the rounds${s.labels ? `<br>holds ${text(s.labels[i])}` : ""}`);
  };
  canvas.onmouseleave = hideTip;
  $("observed").innerHTML = s.observed.map((line) => `<li>${text(line)}</li>`).join("");
}

// From orange at 0 through near-white to blue at 1; colour-blind readers can distinguish them.
function heat(v) {
  if (v === null || v === undefined) return "background:var(--panel)";
  const [from, to, k] = v < 0.5 ? [[200, 84, 10], [244, 240, 232], 2 * v] : [[244, 240, 232], [38, 110, 170], 2 * v - 1];
  const mix = from.map((c, i) => Math.round(c + (to[i] - c) * k));
  return `background:rgb(${mix.join(" ")});color:${v > 0.85 || v < 0.1 ? "#fff" : "#10151a"}`;
}

function drawClasses() {
  if (!$("classes")) return;
  const groups = withBestRate(kept()).filter((g) => g.classes.length);
  if (!groups.length) return void ($("classes").innerHTML = NOTHING);
  const count = Math.max(0, ...groups.map((g) => g.classes.length));
  const head = "<tr><th></th>" + [...Array(count).keys()].map((c) => `<th>${c}</th>`).join("") + "<th>worst</th></tr>";
  $("classes").innerHTML = "<table class='heat'>" + head + groups.map((g) => {
    const worst = Math.min(...g.classes.filter((v) => v !== null));
    return `<tr><th>${named(g.label)}</th>` + g.classes.map((v) => `<td style="${heat(v)}">${percent(v)}</td>`).join("") + `<td style="${heat(worst)}">${percent(worst)}</td></tr>`;
  }).join("") + "</table>";
}

// Thirds of the clients by how often they participate.
function drawParticipation() {
  if (!$("participation")) return;
  const groups = withBestRate(kept()).filter((g) => g.thirds.length);
  if (!groups.length) return void ($("participation").innerHTML = NOTHING);
  $("participation").innerHTML = "<table class='heat wide'><tr><th></th><th>rarest third</th><th>middle</th><th>most frequent</th><th>gap</th></tr>" + groups.map((g) => {
    const gap = 100 * (g.thirds[2] - g.thirds[0]);
    return `<tr><th>${named(g.label)}</th>` + g.thirds.map((v) => `<td style="${heat(v)}">${(100 * v).toFixed(1)}</td>`).join("") + `<td>${gap < 0 ? "−" : "+"}${Math.abs(gap).toFixed(1)}</td></tr>`;
  }).join("") + "</table>";
}

function drawClients() {
  if (!$("clients")) return;
  const s = chosen(), groups = withBestRate(kept()).filter((g) => g.clients[s.key]);
  const order = [...s.participation.keys()].sort((a, b) => s.participation[a] - s.participation[b] || a - b);
  const name = (i) => `client ${i}, participates in ${percent(s.participation[i])} % of the rounds${s.labels ? `, holds ${s.labels[i]}` : ""}`;
  const top = `<tr><th>participation</th>` + order.map((i) => `<td data-tip="${text(name(i))}" style="background:color-mix(in srgb, var(--present) ${(15 + 85 * s.participation[i]).toFixed(0)}%, var(--absent))"></td>`).join("") + "<th>mean</th><th>worst</th></tr>";
  const rows = groups.map((g) => {
    const v = g.clients[s.key], known = v.filter((a) => a !== null), mean = known.reduce((a, b) => a + b, 0) / known.length;
    return `<tr><th>${named(g.label)}</th>` + order.map((i) => `<td data-tip="${text(name(i))}: ${percent(v[i])} %" style="${heat(v[i])}"></td>`).join("") + `<th>${percent(mean)}</th><th>${percent(Math.min(...known))}</th></tr>`;
  });
  $("clients").innerHTML = groups.length ? `<table class='heat dense'>${top}${rows.join("")}</table>` : NOTHING;
  tips($("clients"));
  drawPoints($("scatter"), s, groups, (g) => g.clients[s.key], 100, "accuracy on the client's samples (%)");
}

// One point per client: a value against how often the client participates.
function drawPoints(node, s, groups, values, factor, label) {
  const points = groups.flatMap((g) => values(g).map((v, i) => ({ g, i, x: 100 * s.participation[i], y: v === null ? null : v * factor }))).filter((p) => p.y !== null);
  if (!points.length) { node.innerHTML = ""; return; }
  const box = layout(node, 1);
  const x = { ...limits([0, ...points.map((p) => p.x)], false), label: "rounds in which the client participates (%)" };
  const y = { ...limits(factor === 100 ? [0, 100] : points.map((p) => p.y), false, 0.04), label };
  const f = frame({ width: box.width, height: Math.min(box.height, 320) }, x, y);
  const dots = points.map((p) => {
    const said = `${p.g.label}, client ${p.i}, participates in ${p.x.toFixed(0)} % of the rounds: ${factor === 100 ? p.y.toFixed(1) + " %" : short(p.y)}`;
    return `<circle cx="${f.X(p.x).toFixed(1)}" cy="${f.Y(p.y).toFixed(1)}" r="3.6" fill="${p.g.base}" fill-opacity=".65" data-tip="${text(said)}"/>`;
  });
  node.innerHTML = `<svg class="plot" viewBox="0 0 ${f.W} ${f.H}" width="${f.W}" height="${f.H}">${f.svg}${dots.join("")}</svg>`;
  tips(node);
}

// The metric on the clients' own test samples.
function drawTested() {
  if (!$("tested")) return;
  const s = chosen(), inPercent = $("tested").dataset.percent === "yes";
  drawPoints($("tested"), s, withBestRate(kept()).filter((g) => g.tested[s.key]), (g) => g.tested[s.key], inPercent ? 100 : 1, $("tested").dataset.metric + (inPercent ? " (%)" : ""));
}
