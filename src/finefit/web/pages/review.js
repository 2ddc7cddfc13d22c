// A rater's page. All text from outside is put in as text, never as markup; the server alone decides what comes next.
"use strict";

const at = (id) => document.getElementById(id);
const REASON_KEYS = { fabricated: "f", contradiction: "c", unsupported: "p", "wrong inference": "w", other: "o" };
let settings = null;
let rater = "";
let turn = null;
let marked = [];
let isBusy = false;
let showsChanges = false;

function made(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function say(text) {
  at("message").textContent = text;
  at("message").hidden = !text;
}

function show(...ids) {
  for (const id of ["name", "item", "end", "results", "sure"]) at(id).hidden = !ids.includes(id);
}

// null where nothing came of it; what went wrong stands on the page
async function ask(path, body) {
  let response;
  try {
    response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), redirect: "error" });
  } catch {
    say("The server does not answer, and nothing was saved. Start it again with the same command, then continue here or at its new address.");
    return null;
  }
  if (response.status === 204) return {};
  const text = await response.text();
  if (response.status === 409) {
    say("That item was already judged; this is the next one.");
    return JSON.parse(text);
  }
  if (!response.ok) {
    say(response.headers.get("Content-Type").startsWith("application/json") ? JSON.parse(text).error : text);
    return null;
  }
  say("");
  return JSON.parse(text);
}

// one request at a time: a key that is held down decides once
async function alone(work) {
  if (isBusy) return;
  isBusy = true;
  try { await work(); } finally { isBusy = false; }
}

function draw(next) {
  turn = next;
  const done = turn.judged + turn.skipped;
  at("progress").hidden = false;
  at("count").textContent = `${done} of ${turn.total}` + (turn.skipped ? `, ${turn.skipped} skipped` : "");
  at("bar").setAttribute("aria-valuemax", turn.total);
  at("bar").setAttribute("aria-valuenow", done);
  at("filled").style.width = turn.total ? `${(100 * done) / turn.total}%` : "0";
  at("who").textContent = turn.rater;
  marked = turn.draft.reasons.map((names) => new Set(names));
  at("note").value = turn.draft.note;
  at("note-part").hidden = !turn.draft.note;
  if (turn.item) drawItem(turn.item);
  show(turn.item ? "item" : "end");
  drawLegend();
}

function drawItem(item) {
  at("place").textContent = item.place;
  drawImages(item);
  at("prompt").replaceChildren(...item.prompt.map(said));
  at("reference-part").hidden = item.reference === null;
  at("reference").textContent = item.reference ?? "";
  at("answers").className = item.answers.length === 2 ? "two" : "";
  at("answers").replaceChildren(...item.answers.map((text, side) => answer(item, text, side)));
  for (const box of document.querySelectorAll(".text")) box.scrollTop = 0;
  window.scrollTo(0, 0);
}

// redrawn only for another item: marking words must not load images again
function drawImages(item) {
  const part = at("images");
  if (part.dataset.item === item.handle) return;
  part.dataset.item = item.handle;
  part.hidden = !item.images.length;
  part.replaceChildren(...item.images.map((image, number) => imageFigure(image, item.images.length > 1 ? `Image ${number + 1}: ${image.name}` : image.name)));
}

function imageFigure(image, name) {
  const figure = made("figure");
  const shown = made("img");
  const address = `/api/image/${image.sha256}`;
  shown.alt = name;
  shown.addEventListener("error", () => gone(figure, address, name));
  shown.addEventListener("click", () => figure.classList.toggle("large"));
  shown.src = address;
  figure.append(shown, made("figcaption", name, "dim"));
  return figure;
}

// what the server says of an image that it cannot show stands in its place
async function gone(figure, address, name) {
  let reason = `${name}: the server does not answer.`;
  try {
    const response = await fetch(address, { redirect: "error" });
    if (!response.ok) reason = response.headers.get("Content-Type").startsWith("application/json") ? (await response.json()).error : await response.text();
  } catch { /* as said */ }
  figure.replaceChildren(made("p", reason, "gone"));
}

function said(message) {
  const part = made("div", undefined, "said");
  if (message.role) part.append(made("span", message.role, "role"));
  part.append(made("span", message.text));
  return part;
}

function answer(item, text, side) {
  const part = made("section", undefined, "answer");
  part.append(made("h2", item.answers.length === 2 ? `Answer ${side + 1}` : "Answer"));
  const box = made("div", undefined, "text");
  box.tabIndex = 0;
  if (!text.trim()) box.append(made("span", "The answer is empty.", "empty"));
  else if (showsChanges && item.answers.length === 2) box.append(...changed(text, item.answers[1 - side]));
  else box.textContent = text;
  part.append(box, marks(side));
  return part;
}

function marks(side) {
  const line = made("div", undefined, "marks");
  for (const reason of settings.reasons) {
    const key = REASON_KEYS[reason];
    const button = made("button");
    button.append(made("kbd", side ? `⇧${key.toUpperCase()}` : key), reason);
    button.setAttribute("aria-pressed", marked[side].has(reason));
    button.addEventListener("click", () => toggle(side, reason));
    line.append(button);
  }
  return line;
}

function toggle(side, reason) {
  if (!marked[side].delete(reason)) marked[side].add(reason);
  document.querySelectorAll(".marks")[side].replaceWith(marks(side));
}

// words of `text` that are not in the longest row of words that both have in common are marked
function changed(text, other) {
  const words = (of) => of.match(/\s*\S+/g) ?? [];
  const mine = words(text), theirs = words(other);
  if (mine.length * theirs.length > 4e6) return [text];
  const same = (i, j) => mine[i].trim() === theirs[j].trim();
  const width = theirs.length + 1;
  const longest = new Uint32Array((mine.length + 1) * width);
  for (let i = mine.length - 1; i >= 0; i--)
    for (let j = theirs.length - 1; j >= 0; j--)
      longest[i * width + j] = same(i, j) ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  const parts = [];
  let run = "";
  for (let i = 0, j = 0; i < mine.length; i++) {
    while (j < theirs.length && !same(i, j) && longest[i * width + j + 1] >= longest[(i + 1) * width + j]) j++;
    if (j < theirs.length && same(i, j)) {
      if (run) parts.push(...marking(run));
      parts.push(mine[i]);
      run = "";
      j++;
    } else run += mine[i];
  }
  return [...parts, ...marking(run)];
}

// the space before the first word is no difference
function marking(run) {
  const space = run.match(/^\s*/)[0];
  return run ? [space, made("mark", run.slice(space.length))] : [];
}

const judge = (press) => alone(async () => {
  const body = { rater, item: turn.item.handle, press, reasons: marked.map((names) => [...names]), note: at("note").value };
  const next = await ask("/api/verdict", body);
  if (next) draw(next);
});

const undo = () => alone(async () => {
  const next = await ask("/api/undo", { rater });
  if (next) draw(next);
});

function writeNote() {
  at("note-part").hidden = false;
  at("note").focus();
}

function changes() {
  showsChanges = !showsChanges;
  drawItem(turn.item);
}

function askForResults() {
  if (turn.has_seen_results) return reveal();
  const open = turn.total - turn.judged - turn.skipped;
  at("sure-text").textContent = open
    ? `Results name the models. You have ${open} items still to judge, and verdicts given afterwards count as not blind.`
    : "Results name the models. It is recorded that you have seen them.";
  at("sure").hidden = false;
  drawLegend();
  at("sure-no").focus();
}

const reveal = () => alone(async () => {
  const found = await ask("/api/results", { rater, is_sure: true });
  if (!found) return;
  turn.has_seen_results = true;
  at("tables").replaceChildren(...resultTables(found));
  show("results");
  drawLegend();
});

const goOn = () => alone(async () => {
  const next = await ask("/api/turn", { rater });
  if (next) draw(next);
});

const percent = (value) => `${(100 * value).toFixed(1)} %`;

function interval(found, show) {
  return `${show(found.value)} (${show(found.low)} to ${show(found.high)})`;
}

function share(found) {
  return found ? interval(found, percent) : "nothing judged";
}

function kappa(found) {
  return found ? interval(found, (value) => value.toFixed(2)) : "none: both always chose the same";
}

function table(caption, head, rows) {
  const whole = made("table");
  whole.append(made("caption", caption), line(head, "th"), ...rows.map((cells) => line(cells, "td")));
  return whole;
}

function line(cells, tag) {
  const row = made("tr");
  row.append(...cells.map((cell) => made(tag, cell)));
  return row;
}

function resultTables(found) {
  const counts = `${found.judged} of ${found.items} judged, ${found.skipped} only skipped, ${found.split} on which raters are split`;
  return [
    made("p", counts),
    ...(found.preference ? preferred(found.preference) : []),
    faults(found),
    raters(found.raters),
    ...(found.agreement.length ? [agreement(found.agreement)] : []),
  ];
}

function preferred({ model, over, wins, losses, ties, share: found, p }) {
  const words = `${model} over ${over}: ${share(found)}, where a tie counts as half and 50 % means no preference.`;
  const test = `Sign test on the ${wins + losses} items without a tie: p = ${p.toPrecision(3)}`;
  return [table("Preference", ["preferred", "items"], [[model, wins], [over, losses], ["neither", ties]]), made("p", `${words} ${test}`)];
}

function faults(found) {
  const title = found.models.length === 2 ? "Answers with a reason marked" : "Bad answers";
  const each = (name, value) => [name, ...found.faults.map(value)];
  const rows = settings.reasons.map((reason) => each(reason, (one) => one.reasons[reason]));
  return table(title, each("", (one) => one.model), [each("share, 95 % interval", (one) => share(one.bad)), ...rows]);
}

function raters(found) {
  const rows = found.map((one) => [one.rater, one.judged, one.skipped, one.undone, one.not_blind]);
  return table("Raters", ["rater", "judged", "skipped", "undone", "not blind"], rows);
}

function agreement(found) {
  const rows = found.map((one) => [one.raters.join(", "), one.n, percent(one.observed.value), kappa(one.kappa)]);
  return table("Agreement", ["raters", "items", "agree", "Cohen's kappa, 95 % interval"], rows);
}

// what can be done now, in the order of the legend; null is a gap in it
function actions() {
  if (!turn || !at("sure").hidden) return [];
  if (!at("results").hidden) return [{ key: "b", name: "back", act: goOn, isMain: true }];
  const always = [
    { key: "u", name: "undo", act: undo, isOff: !turn.can_undo },
    { key: "r", name: "results", act: askForResults },
  ];
  return turn.item ? [...verdicts(), null, ...always] : always;
}

function verdicts() {
  const isPair = settings.models === 2;
  return [
    { key: "1", name: isPair ? "answer 1" : "good", act: () => judge("1"), isMain: true },
    { key: "2", name: isPair ? "answer 2" : "bad", act: () => judge("2"), isMain: true },
    ...(isPair ? [{ key: "t", other: "0", name: "tie", act: () => judge("tie"), isMain: true }] : []),
    { key: "s", name: "skip", act: () => judge("skip") },
    { key: "n", name: "note", act: writeNote },
    ...(isPair ? [{ key: "d", name: "differences", act: changes }] : []),
  ];
}

function drawLegend() {
  const buttons = actions().map((action) => {
    if (!action) return made("span", undefined, "gap");
    const button = made("button", undefined, action.isMain ? "main" : "");
    button.append(made("kbd", action.other ? `${action.key} ${action.other}` : action.key), action.name);
    button.disabled = Boolean(action.isOff);
    button.addEventListener("click", () => { action.act(); button.blur(); });
    return button;
  });
  at("legend").replaceChildren(...buttons);
  at("legend").hidden = !buttons.length;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  if (event.key === "Escape") {
    at("sure").hidden = true;
    drawLegend();
    document.activeElement.blur();
    return;
  }
  if (event.target.matches("input, textarea") || !at("sure").hidden) return;
  const key = event.key.toLowerCase();
  const reason = settings.reasons.find((name) => REASON_KEYS[name] === key);
  if (reason && turn && turn.item && !at("item").hidden) {
    toggle(event.shiftKey && settings.models === 2 ? 1 : 0, reason);
    event.preventDefault();
    return;
  }
  const found = actions().find((action) => action && [action.key, action.other].includes(key) && !action.isOff);
  if (!found) return;
  event.preventDefault();
  found.act();
}

async function enter(name) {
  rater = name;
  const next = await ask("/api/turn", { rater });
  if (!next) return;
  rater = next.rater;
  sessionStorage.setItem("rater", rater);
  draw(next);
}

// the token stands behind the #, which no browser sends anywhere
async function login() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return true;
  history.replaceState(null, "", "/");
  return (await ask("/api/login", { token })) !== null;
}

async function begin() {
  at("name-form").addEventListener("submit", (event) => { event.preventDefault(); enter(at("rater").value); });
  at("note").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("note").blur(); } });
  at("sure-yes").addEventListener("click", () => { at("sure").hidden = true; drawLegend(); reveal(); });
  at("sure-no").addEventListener("click", () => { at("sure").hidden = true; drawLegend(); });
  if (!(await login())) return;
  settings = await ask("/api/begin", {});
  if (!settings) return;
  document.addEventListener("keydown", onKey);
  at("rater").maxLength = settings.name_length;
  at("note").maxLength = settings.note_length;
  const known = settings.rater ?? sessionStorage.getItem("rater");
  if (known) return enter(known);
  show("name");
  at("rater").focus();
}

begin();
