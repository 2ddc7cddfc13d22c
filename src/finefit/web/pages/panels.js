// The parts of a run's page beside its curves. Each is drawn again only when what it shows has changed.
import { ago, at, button, gib, link, made, number, table } from "./page.js";

const drawn = new Map();
const PHASES = ["load", "batch", "forward", "loss", "backward", "update", "validation", "generation"];
const AFTER = { step: "after a step", start: "before the model", save: "at a save", end: "at the end" };
const WORDS = { learning: "Is it learning?", memory: "Does it fit?", end: "When is it done?", best: "Best checkpoint" };

function changed(id, value) {
  const text = JSON.stringify(value);
  if (drawn.get(id) === text) return false;
  drawn.set(id, text);
  return true;
}

export function status(state) {
  const pill = at("status");
  pill.textContent = state.status;
  pill.dataset.status = state.status;
  at("place").textContent = state.path;
}

export function answers(found) {
  if (!found || !changed("answers", found)) return;
  at("answers").replaceChildren(...Object.entries(WORDS).map(([name, title]) => {
    const card = made("article", undefined, "answer");
    card.dataset.level = found[name].level;
    card.append(made("h2", title), made("p", found[name].text, "text"), made("p", found[name].more, "dim"));
    return card;
  }));
}

export function facts(state) {
  const { training, host } = state;
  const saved = training?.saved;
  const pairs = [
    ["To go on", state.note],
    ["Next", training?.next?.join("; ")],
    ["Saved", saved ? `${saved.name}, ${saved.how}, ${ago(Date.now() / 1000 - saved.time)}` : training?.trains && "nothing yet"],
    ["Host", host && `${host.free_memory} of ${host.memory} GiB memory and ${host.free_disk} GiB disk free`],
  ].filter(([, text]) => text);
  at("facts").replaceChildren(...pairs.flatMap(([title, text]) => [made("dt", title), made("dd", text)]));
}

export function stages(state, chosen) {
  at("stages").hidden = !state.stages.length;
  if (!changed("stages", [state.stages, state.stage])) return;
  at("stages").replaceChildren(...state.stages.map((one) => {
    const box = link("", `?stage=${encodeURIComponent(one.name)}`);
    box.className = "stage";
    box.title = [one.reason, ...(one.lines ?? [])].join("\n");
    box.dataset.status = one.status;
    if (one.name === (chosen || state.stage).split("/")[0]) box.setAttribute("aria-current", "page");
    const facts = [one.status, one.time, one.peak_bytes && gib(one.peak_bytes)].filter(Boolean);
    const from = one.needs.length ? `${one.kind.replaceAll("_", " ")}, from ${one.needs.join(", ")}` : one.kind.replaceAll("_", " ");
    box.append(made("strong", one.name), made("span", from, "dim"), made("span", facts.join(" · ")));
    const place = made("div", undefined, one.needs.length ? "node" : "node first");
    place.style.gridColumn = one.depth + 1;
    place.append(box);
    return place;
  }));
}

export function scores(training, fetchItems) {
  const found = training?.evaluations ?? [];
  at("scores").hidden = !found.length;
  if (!found.length || !changed("scores", found)) return;
  const rows = found.map((one) => {
    const items = button("items", () => showItems(one, fetchItems, 0, false));
    items.setAttribute("aria-label", `items of ${one.checkpoint} on ${one.task}`);
    const cells = one.scores.map((score) => `${score.name} ${score.value} (${score.low} to ${score.high})`);
    const n = one.n === one.available ? one.n : `${one.n} of ${one.available}`;
    return { cells: [one.task, one.is_best ? `${one.checkpoint} *` : one.checkpoint, cells.join("\n"), `${n}`, items], kind: one.is_best ? "best" : "" };
  });
  at("board").replaceChildren(table(["task", "checkpoint", "score (95 % interval)", "n", ""], rows));
}

async function showItems(one, fetchItems, from, onlyWrong) {
  const found = await fetchItems({ task: one.task, checkpoint: one.checkpoint, from, wrong: onlyWrong ? 1 : 0 });
  if (!found) return;
  const bar = made("div", undefined, "line");
  const again = (start, wrong) => () => showItems(one, fetchItems, start, wrong);
  const toggle = button(onlyWrong ? "all items" : "only wrong ones", again(0, !onlyWrong));
  const end = from + found.items.length;
  bar.append(made("h3", `${one.checkpoint} on ${one.task}`), made("span", found.total ? `${from + 1} to ${end} of ${found.total}` : "none", "dim"), toggle);
  if (from > 0) bar.append(button("earlier", again(Math.max(0, from - 20), onlyWrong)));
  if (end < found.total) bar.append(button("later", again(end, onlyWrong)));
  at("items").replaceChildren(bar, ...found.items.map(item));
}

function item(one) {
  const box = made("article", undefined, "item");
  const marks = Object.entries(one.scores).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  box.append(made("p", `${one.place}: ${one.failure ?? marks}`, one.failure ? "bad" : "dim"));
  const sides = made("div", undefined, "sides");
  for (const part of ["prompt", "answer", "reference", "verdict"]) {
    if (!one[part]) continue;
    const side = made("div");
    side.append(made("h4", part), made("div", one[part], "words"));
    sides.append(side);
  }
  box.append(sides);
  return box;
}

export function checkpoints(training) {
  const found = training?.checkpoints ?? [];
  at("saved").hidden = !found.length;
  if (!found.length || !changed("saved", found)) return;
  const rows = [...found].reverse().map((one) => {
    const loss = one.validation_loss === null ? "" : number(one.validation_loss);
    const size = one.bytes === null ? one.problem : `${(one.bytes / 2 ** 20).toFixed(1)}\u00a0MiB`;
    return { cells: [one.name, one.names.join(", "), loss, size, new Date(1000 * one.time).toLocaleString([], { dateStyle: "short", timeStyle: "short" })] };
  });
  at("checkpoints").replaceChildren(table(["checkpoint", "", "validation loss", "size", "written"], rows));
}

export function phases(training) {
  const planned = training?.planned?.instants ?? {};
  const measured = training?.instants ?? {};
  const value = { planned, measured, peak: training?.planned?.peak_bytes };
  at("fit").hidden = !Object.keys(planned).length && !Object.keys(measured).length;
  if (!changed("fit", value)) return;
  const held = (found) => found && (found.allocated_bytes ?? found.resident_bytes);
  const same = { load: "loaded" };
  const peak = Math.max(0, ...Object.values(measured).map((found) => found.peak_bytes ?? 0));
  const most = Math.max(peak, value.peak ?? 0, ...Object.values(planned), ...Object.values(measured).map(held));
  const rows = Object.entries(planned).sort(([one], [other]) => PHASES.indexOf(one) - PHASES.indexOf(other)).map(([name, bytes]) => {
    const found = held(measured[same[name] ?? name]);
    return { cells: [name, bars(bytes, found, most), gib(bytes), found ? gib(found) : ""] };
  });
  const used = new Set(Object.keys(planned).map((name) => same[name] ?? name));
  for (const [name, found] of Object.entries(measured)) {
    if (!used.has(name)) rows.push({ cells: [AFTER[name] ?? name, bars(0, held(found), most), "", gib(held(found))] });
  }
  rows.push({ cells: ["peak", bars(value.peak, peak, most), value.peak ? gib(value.peak) : "", peak ? gib(peak) : ""], kind: "best" });
  const note = training.planned?.device === "cpu" ? made("p", "The plan counts tensors; measured is the whole process.", "dim") : "";
  at("phases").replaceChildren(table(["phase", "", "planned", "measured"], rows), note);
}

// planned above, measured below
function bars(planned, measured, most) {
  const box = made("div", undefined, "bars");
  for (const [kind, bytes] of [["planned", planned], ["measured", measured]]) {
    const bar = made("div", undefined, kind);
    bar.style.width = `${(100 * (bytes ?? 0)) / most}%`;
    box.append(bar);
  }
  return box;
}

export function events(training) {
  const found = training?.events ?? [];
  at("happened").hidden = !found.length;
  if (!found.length || !changed("events", found)) return;
  at("events").replaceChildren(...[...found].reverse().map((one) => {
    const line = made("li", undefined, one.kind);
    const when = one.time === null ? "" : new Date(1000 * one.time).toLocaleTimeString();
    line.append(made("span", `step ${one.step}`, "dim"), made("span", when, "dim"), made("span", one.text.replace(/^step \d+: /, "")));
    return line;
  }));
}

export function settings(found) {
  if (!found) return;
  const rows = found.values.map((one) => ({ cells: [one.key, text(one.value), one.source] }));
  at("settings").replaceChildren(table(["setting", "value", "source"], rows), made("h3", "spec.yaml"), made("pre", found.spec));
}

export function differences(found, here, there) {
  at("differences").replaceChildren();
  if (!found) return;
  const rows = found.differences.map((one) => ({ cells: [one.key, text(one.here), text(one.there)] }));
  at("differences").append(rows.length ? table(["setting", here, there], rows) : made("p", "All settings are equal."));
}

export async function rows(fetchRows, from = 0) {
  if (!from && at("examples").childElementCount) return;
  at("examples").replaceChildren(made("p", "Reading …", "dim"));
  const found = await fetchRows({ from });
  if (!found) return void at("examples").replaceChildren();
  const bar = made("div", undefined, "line");
  bar.append(made("span", found.rows.length ? `rows ${from + 1} to ${from + found.rows.length} of ${found.total.toLocaleString("en")}` : "none", "dim"), made("mark", "supervised"));
  if (from + found.rows.length < found.total) bar.append(button("next rows", () => rows(fetchRows, from + found.rows.length)));
  at("examples").replaceChildren(bar, ...found.rows.map((row) => {
    const box = made("article", undefined, "item");
    const shown = made("div", undefined, "words");
    shown.append(...row.pieces.map(([piece, isSupervised]) => made(isSupervised ? "mark" : "span", piece)));
    box.append(made("h4", row.title), shown);
    return box;
  }));
}

const text = (value) => (value === null || value === undefined) ? "–" : (typeof value === "string" ? value : JSON.stringify(value));

export function log(found) {
  if (!found) return;
  at("lines").textContent = found.text || "empty";
  at("lines").scrollTop = at("lines").scrollHeight;
}

export function onOpen(details, act) {
  details.addEventListener("toggle", () => { if (details.open) act(); });
}
