// Opens folded sections for links and for printing, sorts tables, compares two runs, and draws the figures from their
// data. Without this script the page shows the PNG of each figure.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, content, attributes = {}) => {
    const element = document.createElement(tag);
    element.append(...[content].flat());
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // Folds ------------------------------------------------------------------------------------------------
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  addEventListener("load", reveal);
  document.addEventListener("click", event => {  // the same link again
    const link = event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) reveal();
  });
  let opened = [];
  addEventListener("beforeprint", () => { opened = all("details:not([open])"); opened.forEach(d => d.open = true); });
  addEventListener("afterprint", () => opened.forEach(d => d.open = false));

  for (const table of all("table.runs")) {  // names of the fields, for rows that a phone shows as blocks
    const labels = all("thead th", table).map(head => head.textContent);
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.label = labels[i]; });
    table.classList.add("labeled");
  }

  // Tables -----------------------------------------------------------------------------------------------
  const key = cell => {  // the first number of a column of numbers
    const text = cell.textContent.trim();
    const number = cell.classList.contains("number") ? parseFloat(text.replace(/[,×]/g, "")) : NaN;
    return text === "" || text === "–" ? null : Number.isNaN(number) ? text.toLowerCase() : number;
  };
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = make("button", head.textContent, { type: "button" });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(h => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = all("tr", body).map(row => [key(row.cells[column]), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);  // missing values last
          const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // Two runs side by side --------------------------------------------------------------------------------
  const stored = document.getElementById("runs-data");
  if (stored) {
    const { fields, runs } = JSON.parse(stored.textContent), picked = [];
    const panel = make("div", [], { class: "compared scroll", "aria-live": "polite" });
    const hint = make("p", "Select two runs to see the fields in which they differ.", { class: "note" });
    const table = document.querySelector("#runs table.sortable");
    table.closest(".scroll").before(hint);
    table.closest(".scroll").after(panel);
    for (const row of all("tbody tr", table)) {
      if (!runs[row.id]) continue;
      const box = make("input", [], { type: "checkbox", "aria-label": `compare ${runs[row.id].name}` });
      row.cells[0].prepend(box);
      box.addEventListener("change", () => {
        if (box.checked) picked.push([row.id, box]);
        else picked.splice(picked.findIndex(([id]) => id === row.id), 1);
        if (picked.length > 2) picked.shift()[1].checked = false;
        panel.replaceChildren();
        if (picked.length < 2) return;
        const [a, b] = picked.map(([id]) => runs[id]);
        const cells = (...texts) => make("tr", texts.map((t, i) => make(i ? "td" : "th", t, i ? {} : { scope: "row" })));
        const differing = fields.map((f, i) => [f, a.values[i], b.values[i]]).filter(([, x, y]) => x !== y);
        const of = picked.map(([id]) => [...document.getElementById(id).cells].map(cell => cell.textContent));
        const results = of[0].map((text, i) => [row.cells[i].dataset.label, text, of[1][i]]).slice(2);
        const rows = [...differing, ...results].map(r => cells(...r));
        const head = make("tr", ["", a.name, b.name].map(t => make("th", t, { scope: "col" })));
        const caption = make("caption", `${differing.length} fields differ; below them the results.`);
        panel.append(make("table", [caption, make("thead", head), make("tbody", rows)]));
      });
    }
  }

  // Figures ----------------------------------------------------------------------------------------------
  let paper = false;  // on paper the colors are those of the light theme
  const LIGHT = { "--ink": "#1b1f24", "--grid": "#e6e9ec", "--faint": "#8b929b" };
  const ink = name => paper ? LIGHT[name] : getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = v => v == null ? "" : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2)
    : Number(v.toPrecision(4)).toLocaleString("en");
  const figures = [];

  function chart(host, panel, shown, log, width) {
    const lines = panel.lines.filter(shown);
    if (!lines.length) { host.replaceChildren(make("p", "Nothing is selected.", { class: "note" })); return null; }
    const usable = y => log && !(y > 0) ? null : y;
    const data = uPlot.join(lines.map(l => {  // rising and distinct x, as uPlot needs them
      const points = new Map(l.at.map((x, i) => [x, usable(l.is[i])]));
      const xs = [...points.keys()].sort((a, b) => a - b);
      return [xs, xs.map(x => points.get(x))];
    }));
    const tip = make("div", [], { class: "tip", hidden: "" });
    const axis = { stroke: ink("--ink"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { stroke: ink("--faint"), width: 1, size: 4 },
      font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18 };
    const names = panel.ticks, tall = names.some(t => t.includes("\n"));
    const categories = names.length ? { splits: () => names.map((_, i) => i), values: () => names, size: tall ? 56 : 34, grid: { show: false } }
      : { label: panel.x, size: 34 };
    const x = names.length ? { time: false, range: [-.6, names.length - .4] } : { time: false, ...(panel.xlog ? { distr: 3 } : {}) };
    const y = { distr: log ? 3 : 1, ...(panel.top && !log ? { range: (u, low, high) => uPlot.rangeNum(low, Math.min(high, panel.top), .05, true) } : {}) };
    const place = v => names[v]?.replaceAll("\n", " ") ?? `${panel.x === "optimizer step" ? "step" : panel.x} ${short(v)}`;
    host.replaceChildren();
    const made = new uPlot({
      width, height: Math.round(Math.max(200, width * .44)), title: panel.title, legend: { show: false }, scales: { x, y },
      axes: [{ ...axis, ...categories }, { ...axis, label: panel.y, size: 54, values: (u, v) => v.map(short) }],
      series: [{}, ...lines.map(l => ({
        label: l.name, stroke: l.color === "#000000" ? ink("--ink") : l.color, width: l.width, dash: l.dash,
        spanGaps: true, points: { show: l.marker, size: 7, fill: l.color }, paths: l.marker ? () => null : undefined,
      }))],
      cursor: { focus: { prox: 24 }, points: { size: 7 }, drag: { x: true, y: false } },
      focus: { alpha: .25 },
      hooks: {
        setCursor: [u => {
          const i = u.cursor.idx, near = u.series.findIndex((s, n) => n && s._focus);
          if (i == null || near < 1 || u.data[near][i] == null) { tip.hidden = true; return; }
          tip.textContent = `${lines[near - 1].name} · ${place(u.data[0][i])} · ${short(u.data[near][i])}`;
          tip.hidden = false;
        }],
      },
    }, data, host);
    host.append(tip);
    return made;
  }

  function enliven(figure) {
    const content = figure.querySelector("script.chart-data");
    if (figure.dataset.live) return;
    figure.dataset.live = "1";
    const panels = JSON.parse(content.textContent), lines = panels.flatMap(p => p.lines);
    const cells = all(".panels > div:not(.gap)", figure), off = new Set(), logs = panels.map(p => p.log);
    const shown = l => !["group", "modality", "seed"].some(name => off.has(`${name}:${l[name]}`));
    let live = [];
    const draw = () => {
      live.forEach(u => u && u.destroy());
      live = panels.map((panel, i) => chart(cells[i], panel, shown, logs[i], cells[i].clientWidth));
    };
    const bar = make("div", [], { class: "controls", role: "group", "aria-label": "What the figure shows" });
    const toggle = (text, pressed, act, color) => {
      const button = make("button", text, { type: "button", "aria-pressed": String(pressed) });
      if (color) button.prepend(make("span", [], { class: "swatch", style: `background:${color === "#000000" ? "var(--black)" : color}` }));
      button.addEventListener("click", () => {
        const now = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(now));
        act(now);
        draw();
      });
      bar.append(button);
    };
    for (const name of ["group", "modality", "seed"]) {
      const found = [...new Set(lines.map(l => l[name]))].filter(Boolean);
      if (found.length < 2 && name !== "group") continue;
      for (const value of found) {
        const of = lines.filter(l => l[name] === value);
        const dashed = name === "modality" && of.some(l => l.seed !== "QK-Norm bound" && l.dash.length) ? " (dashed)" : "";
        toggle(value + dashed, true, on => off[on ? "delete" : "add"](`${name}:${value}`), name === "group" ? of.at(-1).color : "");
      }
    }
    if (lines.some(l => l.is.some(y => y > 0))) toggle("logarithmic", logs.some(Boolean), on => logs.fill(on));
    figure.querySelector(".panels").before(bar);
    draw();
    figures.push({ draw, width: () => cells[0].clientWidth, last: cells[0].clientWidth });
  }
  const enlivenIn = root => all("figure", root).filter(f => !f.closest("details:not([open])")).forEach(enliven);
  addEventListener("load", () => enlivenIn(document));
  document.addEventListener("toggle", event => { if (event.target.open) enlivenIn(event.target); }, true);
  addEventListener("resize", () => figures.forEach(f => { if (f.width() && f.width() !== f.last) { f.last = f.width(); f.draw(); } }));
  const redraw = () => figures.forEach(f => f.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { paper = true; enlivenIn(document); redraw(); });
  addEventListener("afterprint", () => { paper = false; redraw(); });
})();
