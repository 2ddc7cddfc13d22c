// The list of runs. Two that are chosen can be laid over each other.
import { ago, at, button, get, judge, link, login, made, number, pageOf, table } from "./page.js";

const REFRESH_MS = 3000;
const chosen = new Set();
let shown = "";
let folder = "runs";

function row(run) {
  const pick = made("input");
  pick.type = "checkbox";
  pick.checked = chosen.has(run.name);
  pick.setAttribute("aria-label", `choose ${run.name}`);
  pick.addEventListener("change", () => {
    if (pick.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    commands();
  });
  const pill = made("span", run.status, "pill");
  pill.dataset.status = run.status;
  const steps = made("div", run.total_steps ? `${number(run.step ?? 0)} of ${number(run.total_steps)}` : "");
  if (run.total_steps) {
    const bar = made("progress");
    bar.max = run.total_steps;
    bar.value = run.step ?? 0;
    bar.setAttribute("aria-label", `steps of ${run.name}`);
    steps.append(bar);
  }
  const when = run.time ? ago(Date.now() / 1000 - run.time) : "";
  const loss = run.loss === undefined ? "" : number(run.loss);
  const cost = run.cost ? `$${run.cost.toFixed(2)}` : "";
  return { cells: [pick, link(run.name, `/run/${encodeURIComponent(run.name)}`), pill, steps, loss, run.best || run.note || "", cost, when] };
}

function commands() {
  const names = [...chosen];
  at("commands").replaceChildren();
  if (!names.length) return void at("commands").append(made("span", "Choose runs to lay their curves over each other, to compare their scores, or to judge their answers.", "dim"));
  const [first, ...rest] = names;
  const bar = made("div", undefined, "line");
  if (rest.length) {
    const others = rest.map((name) => `with=${encodeURIComponent(name)}`).join("&");
    bar.append(link("Overlay their curves", `/run/${encodeURIComponent(first)}?${others}`));
  }
  bar.append(link(rest.length ? "Compare their scores" : "Compare with its base", pageOf("compare", names)));
  if (names.length < 3) bar.append(button("Judge answers blind …", () => judge(names)));
  const paths = names.map((name) => `${folder}/${name}`).join(" ");
  bar.append(made("code", `finefit compare ${paths}`, "dim"));
  at("commands").append(bar);
}

async function refresh() {
  if (!document.hidden) {
    const found = await get("/api/runs");
    const text = JSON.stringify(found);
    if (found && text !== shown) {
      shown = text;
      folder = found.folder;
      at("count").textContent = `${found.runs.length}, newest first`;
      at("runs").replaceChildren(table(["", "run", "state", "steps", "loss", "best", "planned cost", "last step"], found.runs.map(row)));
    }
  }
  setTimeout(refresh, REFRESH_MS);
}

await login();
commands();
refresh();
