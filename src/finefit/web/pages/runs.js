// The list of runs. Two that are chosen can be laid over each other.
import { ago, at, get, link, login, made, number, table } from "./page.js";

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
  const steps = run.total_steps ? `${number(run.step ?? 0)} of ${number(run.total_steps)}` : "";
  const when = run.time ? ago(Date.now() / 1000 - run.time) : "";
  const loss = run.loss === undefined ? "" : number(run.loss);
  const cost = run.cost ? `$${run.cost.toFixed(2)}` : "";
  return { cells: [pick, link(run.name, `/run/${encodeURIComponent(run.name)}`), pill, steps, loss, run.best || run.note || "", cost, when] };
}

function commands() {
  const names = [...chosen];
  at("commands").hidden = !names.length;
  at("commands").replaceChildren();
  if (!names.length) return;
  const [first, ...rest] = names;
  if (rest.length) {
    const others = rest.map((name) => `with=${encodeURIComponent(name)}`).join("&");
    at("commands").append(link("Overlay their curves", `/run/${encodeURIComponent(first)}?${others}`), made("br"));
  }
  const paths = names.map((name) => `${folder}/${name}`).join(" ");
  at("commands").append(made("code", `finefit compare ${paths}`), made("br"), made("code", `finefit review ${names.slice(0, 2).map((name) => `${folder}/${name}`).join(" ")}`));
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
refresh();
