// Keyboard shortcuts, plots of tables, and clicks on maps. Pages also work without this script, and it
// loads nothing from other servers.
"use strict";

const GO = { h: "/", o: "/order", d: "/diff", b: "/blackbox", t: "/tensors", m: "/modules", r: "/ranks", q: "/query", l: "/live" };
const WAIT_MS = 1200;
let goSince = 0;

const CHOICE = ["tree", "job", "attempt"];

function keep(names, asked) {
  const known = new URLSearchParams(location.search);
  for (const name of names) if (known.get(name)) asked.set(name, known.get(name));
  return asked;
}

function address(path) {
  const kept = keep(CHOICE, new URLSearchParams()).toString();
  return kept ? `${path}?${kept}` : path;
}

function visibleRows() {
  const found = document.querySelectorAll("main .rows tbody tr, main .modules summary");
  return [...found].filter((row) => row.offsetParent !== null && (row.matches("summary") || row.querySelector("a")));
}

function move(step) {
  const rows = visibleRows();
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("selected") || row === document.activeElement);
  const next = rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? (step > 0 ? 0 : rows.length - 1) : at + step))];
  rows.forEach((row) => row.classList.remove("selected"));
  if (!next.matches("summary")) next.classList.add("selected");
  const target = next.matches("summary") ? next : next.querySelector("th a, a");
  target.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function followPager(relation) {
  const link = document.querySelector(`.pager a[rel="${relation}"]`);
  if (link) link.click();
}

function followShortcut(key) {
  const link = document.querySelector(`main a[aria-keyshortcuts="${key}"]`);
  if (link) link.click();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const dialog = document.getElementById("help");
  const inField = event.target.closest("input, textarea, select");
  if (inField) {
    if (event.key === "Escape") inField.blur();
    return;
  }
  if (dialog.open) return;
  const now = Date.now();
  if (goSince && now - goSince < WAIT_MS && GO[event.key]) {
    goSince = 0;
    if (event.key === "l" && !document.getElementById("live-link")) return;
    location.href = address(GO[event.key]);
    return;
  }
  goSince = event.key === "g" ? now : 0;
  const actions = {
    "/": () => document.getElementById("search")?.focus(),
    "?": () => dialog.showModal(),
    j: () => move(1), k: () => move(-1), n: () => followPager("next"), p: () => followPager("prev"),
    d: () => followShortcut("d"), D: () => followShortcut("Shift+D"),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function readTable(table) {
  const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const lines = [...table.tBodies[0].rows].map((row) => [...row.cells]);
  const columns = titles.map((_, at) => lines.map((cells) => {
    const cell = cells[at];
    const text = cell.dataset.value ?? (at === 0 ? cell.textContent.trim() : "");
    const number = text === "" ? NaN : Number(text);
    return Number.isFinite(number) ? number : null;
  }));
  const kept = titles.map((_, at) => at).filter((at) => at === 0 || columns[at].some((value) => value !== null));
  return { titles: kept.map((at) => titles[at]), columns: kept.map((at) => columns[at]) };
}

function isWide(values) {
  const sizes = values.filter((value) => value !== null && value !== 0).map(Math.abs);
  return values.every((value) => value === null || value > 0) && Math.max(...sizes) / Math.min(...sizes) > 1000;
}

function drawPlot(table) {
  const { titles, columns } = readTable(table);
  if (columns.length < 2 || columns[0].length < 2) return;
  const order = columns[0].map((_, at) => at).sort((a, b) => columns[0][a] - columns[0][b]);
  const data = columns.map((column) => order.map((at) => column[at]));
  const place = document.createElement("div");
  place.className = "plot";
  place.setAttribute("aria-hidden", "true");
  const container = table.closest(".scroll") || table;
  container.before(place);
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const plot = new uPlot({
    width: place.clientWidth, height: 220,
    cursor: { y: false, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: isWide(data.slice(1).flat()) ? 3 : 1 } },
    axes: [axis, { ...axis, size: 62 }],
    series: [
      { label: titles[0] },
      ...titles.slice(1).map((label, at) => ({ label, stroke: color(`--series-${at % 8}`), width: 1.5, points: { show: data[0].length < 60, size: 4 }, spanGaps: false })),
    ],
  }, data, place);
  new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: 220 })).observe(place);
}

function openMapCell(event) {
  const picture = event.currentTarget;
  const table = document.getElementById("map-numbers");
  const box = picture.getBoundingClientRect();
  const ranks = JSON.parse(picture.dataset.ranks), iterations = JSON.parse(picture.dataset.iterations);
  if (!ranks.length || !iterations.length) return;
  const row = Math.floor((event.clientY - box.top) / box.height * ranks.length);
  const column = Math.floor((event.clientX - box.left) / box.width * iterations.length);
  if (!table) return;
  if (String(ranks[row]) === picture.dataset.base) {
    location.href = `/tensors?${keep(["search", ...CHOICE], new URLSearchParams({ rank: ranks[row], iteration: iterations[column] }))}`;
    return;
  }
  location.href = picture.dataset.address.replaceAll("RANK", ranks[row]).replaceAll("ITERATION", iterations[column]);
}

// Update the live part of the page. Only elements that differ are replaced, so the focus and the scroll
// position of a table stay.
function watchJob(place) {
  const note = document.getElementById("live-note");
  let events = null;
  const open = () => {
    events = new EventSource(place.dataset.live);
    events.addEventListener("state", (event) => {
      note.textContent = "";
      htmx.swap({ text: event.data, target: place, sourceElement: place, swap: "innerMorph" });
    });
    events.addEventListener("time", (event) => {
      note.textContent = "";
      document.getElementById("live-time").textContent = event.data;
    });
    events.addEventListener("error", () => {
      note.textContent = events.readyState === EventSource.CLOSED
        ? "This page is not renewed any more: open it again."
        : "The server of this page does not answer; it is asked again.";
    });
  };
  // A hidden window closes its connection, because a browser opens at most six to one server.
  document.addEventListener("visibilitychange", () => {
    if (events) events.close();
    events = null;
    if (!document.hidden) open();
  });
  if (!document.hidden) open();
}

document.addEventListener("keydown", onKey);
document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());
document.querySelectorAll("table[data-plot]").forEach(drawPlot);
document.querySelectorAll("[data-live]").forEach(watchJob);
document.querySelectorAll("img[data-map]").forEach((picture) => picture.addEventListener("click", openMapCell));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.querySelectorAll(".plot").forEach((plot) => plot.remove());
  document.querySelectorAll("table[data-plot]").forEach(drawPlot);
});
