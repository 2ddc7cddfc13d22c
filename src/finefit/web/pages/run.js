// The page of one run: what changes comes by server-sent events, the curves are fetched when there are new ones.
import { Chart, isMark } from "./charts.js";
import { at, button, get, judge, link, login, made, number, pageOf, post, say, sure } from "./page.js";
import * as panels from "./panels.js";

const name = decodeURIComponent(location.pathname.split("/")[2]);
const query = new URLSearchParams(location.search);
const root = `/api/run/${encodeURIComponent(name)}`;
const SERIES_MS = 1500;
const LOG_MS = 3000;
const RUNS = ["--violet", "--teal", "--rose", "--ochre", "--slate"];
const GIB = 2 ** 30;
const share = (value) => `${number(100 * value)} %`;

let state = null;
let said = "";
let series = null;
let others = {};
let range = null;
let source = null;
let shownLines = -1;
let isFetching = false;
const charts = new Map();

function inGib(found) {
  for (const [column, values] of Object.entries(found.memory.columns)) {
    found.memory.columns[column] = values.map((value) => (value === null ? null : value / GIB));
  }
  return found;
}

const stage = () => query.get("stage") ?? "";
const asked = (what, more = {}) => `${root}/${what}?${new URLSearchParams({ stage: stage(), ...more })}`;

// [title, columns, {lines, format, isWide}] of the curves that the run has
function planned() {
  const plan = state.training?.planned ?? {};
  const memory = series.memory.columns.reserved_bytes ? "reserved_bytes" : "resident_bytes";
  const limits = [{ value: plan.peak_bytes / GIB, label: "planned" }, { value: plan.budget_bytes / GIB, label: "room" }];
  const speed = [{ value: plan.tokens_per_second, label: "planned" }];
  const known = [
    ["Loss", ["loss", "smoothed_loss", "validation_loss"], { isWide: true, isMarked: true }],
    ["Rewards", ["rewards_chosen", "rewards_rejected"], {}],
    ["Margin of rewards", ["margin"], {}],
    ["Pairs ranked right", ["accuracy"], { format: share, ends: [0, 1] }],
    ["Learning rate", ["learning_rate"], {}],
    ["Gradient norm", ["grad_norm"], {}],
    ["Tokens per second", ["tokens_per_second"], { lines: speed }],
    [plan.device === "cuda" ? "Memory reserved" : "Memory of the process", [memory], { format: inGiB, lines: limits }],
    ["Time of a step", PARTS, { format: (value) => `${number(value)} s`, lines: [{ value: plan.step_seconds, label: "planned" }], ends: [0] }],
    ["Supervised share of tokens", ["supervised"], { format: share, ends: [0] }],
    ["Card in use", ["card_utilisation"], { format: share, ends: [0, 1] }],
    ["Card power", ["card_watts"], { format: (value) => `${number(value)} W`, ends: [0] }],
    ["Card temperature", ["card_celsius"], { format: (value) => `${number(value)} °C` }],
    ["Host memory free", ["host_free_bytes"], { format: inGiB, ends: [0] }],
    ["Disk free", ["disk_free_bytes"], { format: inGiB, ends: [0] }],
  ];
  const used = new Set(known.flatMap(([, columns]) => columns));
  const rest = [...Object.keys(series.steps.columns), ...Object.keys(series.validations.columns)].filter((column) => !used.has(column));
  return [...known, ...[...new Set(rest)].map((column) => [column.replaceAll("_", " "), [column], {}])];
}

const inGiB = (value) => `${number(value)} GiB`;
const PARTS = ["seconds", "wait_seconds", "forward_seconds", "backward_seconds", "update_seconds"];
const STYLES = {
  rewards_chosen: { label: "chosen", colour: "--good" },
  rewards_rejected: { label: "rejected", colour: "--bad" },
  seconds: { label: "whole", colour: "--accent" },
  wait_seconds: { label: "waiting for rows", colour: "--bad" },
  forward_seconds: { label: "forward", colour: "--violet" },
  backward_seconds: { label: "backward", colour: "--orange" },
  update_seconds: { label: "update", colour: "--good" },
  loss: { label: "loss", colour: "--accent", width: 1, faint: true },
  smoothed_loss: { label: "smoothed", colour: "--accent", width: 2 },
  validation_loss: { label: "validation", colour: "--orange", width: 1.5, points: true },
};

function tablesOf(found, columns, suffix, style) {
  const tables = [];
  const styles = [];
  for (const part of ["steps", "validations", "memory"]) {
    const there = columns.filter((column) => found[part].columns[column]?.some((value) => value !== null));
    if (!there.length || tables.some((one) => one.has(there[0]))) continue;
    const one = new Map([["step", found[part].step], ...there.map((column) => [column, found[part].columns[column]])]);
    tables.push(one);
    for (const column of there) {
      const points = part === "validations" ? { points: true } : {};
      const own = STYLES[column] ?? { label: column.replaceAll("_", " "), colour: "--accent", ...points };
      styles.push({ ...own, ...style, label: own.label + suffix });
    }
  }
  return [tables.map((one) => [...one.values()]), styles];
}

function drawCharts() {
  if (!series || !state) return;
  const step = series.steps.step;
  at("curves").hidden = !step.length && !series.memory.step.length;
  const marks = series.marks.filter(isMark);
  for (const [title, columns, { lines = [], format, isWide, isMarked, ends }] of planned()) {
    let [tables, styles] = tablesOf(series, columns, "", {});
    if (!tables.length) continue;
    const shared = columns === PARTS ? ["seconds"] : columns.filter((column) => column !== "loss");
    for (const [place, [other, found]] of Object.entries(others).entries()) {
      const [more, theirs] = tablesOf(found, shared, ` (${other})`, { colour: RUNS[place % RUNS.length], dash: [6, 4] });
      tables = [...tables, ...more];
      styles = [...styles, ...theirs];
    }
    if (!charts.has(title)) {
      charts.set(title, new Chart(title, { format, isWide, ends, zoom }));
      at("charts").append(charts.get(title).box);
    }
    charts.get(title).draw(uPlot.join(tables), styles, { lines, marks: isMarked ? marks : [], range });
  }
  at("window").textContent = range ? `steps ${range[0].toLocaleString("en")} to ${range[1].toLocaleString("en")}` : "";
  at("whole").hidden = !range;
}

async function fetchSeries() {
  if (isFetching || document.hidden) return;
  isFetching = true;
  try {
    const lines = state?.training?.lines;
    const more = { points: Math.min(3000, 2 * Math.max(300, at("charts").clientWidth)), ...(range && { first: range[0], last: range[1] }) };
    const found = await get(asked("series", more));
    if (!found?.steps) return;
    series = inGib(found);
    await fetchOthers(more);
    shownLines = [found, ...Object.values(others)].some((one) => one.is_behind) ? -1 : lines;
    drawCharts();
  } finally {
    setTimeout(() => { isFetching = false; refresh(); }, SERIES_MS);
  }
}

async function refreshLog() {
  if (!at("log").open) return;
  if (!document.hidden) panels.log(await get(asked("log")));
  setTimeout(refreshLog, LOG_MS);
}

async function fetchOthers(more) {
  const names = query.getAll("with");
  const found = await Promise.all(names.map((other) => get(`/api/run/${encodeURIComponent(other)}/series?${new URLSearchParams(more)}`)));
  others = Object.fromEntries(names.map((other, place) => [other, found[place]]).filter(([, one]) => one?.steps).map(([other, one]) => [other, inGib(one)]));
}

function refresh() {
  if (state?.training && state.training.lines !== shownLines) fetchSeries();
}

async function zoom(ends) {
  const last = state?.training?.total_steps ?? Infinity;
  range = ends && [Math.max(0, ends[0]), Math.min(last, ends[1])];
  drawCharts();  // at once with what is here; the finer curve follows
  isFetching = false;
  await fetchSeries();
}

function keys(event) {
  if (at("sure").open || event.target.closest("input, select, textarea, pre, ol") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "0") return void zoom(null);
  const [first, last] = range ?? [series?.steps.step.at(0) ?? 0, series?.steps.step.at(-1) ?? 0];
  const width = last - first;
  const moves = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] };
  const move = moves[event.key];
  if (!move || width < 2) return;
  event.preventDefault();
  zoom([Math.round(first + move[0] * width), Math.round(last + move[1] * width)]);
}

function show(next) {
  if (!next.name) return void say((next.problems ?? []).join("\n"));
  state = next;
  const words = [...next.problems, next.failure, next.is_behind ? "Reading the curves …" : ""].filter(Boolean).join("\n");
  if (words !== said) say(words);
  said = words;
  const training = next.training;
  document.title = training?.trains ? `${training.step}/${training.total_steps} ${next.name}` : next.name;
  at("name").textContent = next.name;
  panels.status(next);
  panels.answers(training?.answers);
  at("actions").hidden = next.pid === null;
  for (const action of ["save", "validate"]) at(action).hidden = !training?.trains || training.step >= training.total_steps;
  panels.facts(next);
  panels.stages(next, stage());
  panels.scores(training, (more) => get(asked("items", more)));
  panels.checkpoints(training);
  at("rows").hidden = !training?.trains;
  panels.phases(training);
  panels.events(training);
  refresh();
}

function listen() {
  source?.close();
  source = new EventSource(asked("live"));
  source.addEventListener("message", (event) => show(JSON.parse(event.data)));
  source.addEventListener("open", () => say(said));
  source.addEventListener("error", () => say("The page's server does not answer; this is what it said last. Runs go on without it."));
}

const ACTIONS = {
  save: "Write a checkpoint after the current step? Training goes on, and older checkpoints beyond save.keep are removed as usual.",
  validate: "Validate after the current step? Training waits for it and goes on.",
  stop: "Finish the current step, write a checkpoint and stop? The same command goes on from there.",
};

function askFor(action) {
  sure(ACTIONS[action], async () => {
    const done = await post(`${root}/act`, { action, stage: stage(), is_sure: true });
    if (done) say("Requested; it happens after the current step.");
  });
}

async function links() {
  at("links").append(link("Report", pageOf("report", [path()])));
  if (state.training?.evaluations?.length && state.status === "finished") {
    at("links").append(link("Compare with base", pageOf("compare", [path()])));
    at("judging").append(button("Judge answers blind …", () => judge([path()])));
  }
  const found = await get("/api/runs");
  const names = (found?.runs ?? []).map((run) => run.name).filter((other) => other !== name);
  if (!names.length) return;
  at("links").append(link("All runs", "/"));
  at("overlay").hidden = at("against").hidden = false;
  at("overlays").append(...names.map((other) => {
    const label = made("label");
    const box = made("input");
    box.type = "checkbox";
    box.checked = query.getAll("with").includes(other);
    box.addEventListener("change", () => overlay(other, box.checked));
    label.append(box, ` ${other}`);
    return label;
  }));
  at("other").append(new Option("another run …", ""), ...names.map((other) => new Option(other)));
  at("other").addEventListener("change", async () => {
    const other = at("other").value;
    panels.differences(other && (await get(asked("plan", { against: other }))), name, other);
  });
}

const path = () => (stage() ? `${name}/${stage()}` : name);

function overlay(other, isShown) {
  const names = query.getAll("with").filter((one) => one !== other);
  query.delete("with");
  for (const one of isShown ? [...names, other] : names) query.append("with", one);
  history.replaceState(null, "", `?${query}`);
  shownLines = -1;
  isFetching = false;
  fetchSeries();
}

function wire() {
  for (const action of Object.keys(ACTIONS)) at(action).addEventListener("click", () => askFor(action));
  at("whole").addEventListener("click", () => zoom(null));
  document.addEventListener("keydown", keys);
  document.addEventListener("visibilitychange", () => (document.hidden ? source.close() : listen()));
  new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(at("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of charts.values()) chart.shape = "";
    drawCharts();
  });
  panels.onOpen(at("plan"), async () => panels.settings(await get(asked("plan"))));
  panels.onOpen(at("log"), refreshLog);
  panels.onOpen(at("rows"), () => panels.rows((more) => get(asked("rows", more))));
}

await login();
wire();
const first = await get(asked("state"));
if (first) {
  show(first);
  listen();
  links();
}
