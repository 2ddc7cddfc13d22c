// What both pages need. All text from outside is put in as text, never as markup.

export const at = (id) => document.getElementById(id);

export function made(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

export function link(text, address) {
  const element = made("a", text);
  element.href = address;
  return element;
}

export function button(text, act, kind) {
  const element = made("button", text, kind);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

// rows of cells; a cell is text or an element
export function table(heads, rows) {
  const element = made("table");
  const head = made("tr");
  head.append(...heads.map((text) => made("th", text)));
  element.append(head);
  for (const { cells, kind } of rows) {
    const row = made("tr", undefined, kind);
    for (const cell of cells) {
      const place = made("td");
      place.append(cell ?? "");
      row.append(place);
    }
    element.append(row);
  }
  return element;
}

// a page that another verb makes of runs, or of stages as run/stage
export function pageOf(verb, runs) {
  return `/api/page/${verb}?${new URLSearchParams(runs.map((run) => ["run", run]))}`;
}

export function sure(text, act) {
  at("sure-text").textContent = text;
  at("sure-yes").hidden = false;
  at("sure-no").textContent = "Cancel";
  at("sure-no").onclick = () => at("sure").close();
  at("sure-yes").onclick = () => {
    at("sure").close();
    act();
  };
  at("sure").showModal();
}

// opens a review after confirmation; browsers open no window by themselves, so its address is shown
export function judge(runs) {
  const what = runs.length > 1 ? "Which of two answers is better, without knowing whose it is" : "Whether an answer is good, item by item";
  sure(`${what}: open a review of ${runs.join(" and ")}? It gets a page of its own; verdicts are kept in the run directory.`, async () => {
    const found = await post("/api/review", { runs, is_sure: true });
    if (!found) return;
    at("sure-text").replaceChildren("The review is open: ", link(found.url, found.url));
    at("sure-yes").hidden = true;
    at("sure-no").textContent = "Close";
    at("sure").showModal();
  });
}

export function say(text) {
  at("message").textContent = text;
  at("message").hidden = !text;
}

// null where nothing came of it; the reason is on the page
export async function get(path) {
  return answered(() => fetch(path, { redirect: "error" }));
}

export async function post(path, body) {
  const asked = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), redirect: "error" };
  return answered(() => fetch(path, asked));
}

async function answered(ask) {
  let response;
  try {
    response = await ask();
  } catch {
    say("The page's server does not answer. Start it again with the same command; runs go on without it.");
    return null;
  }
  if (response.status === 204) return {};
  const isJson = (response.headers.get("Content-Type") ?? "").startsWith("application/json");
  const body = isJson ? await response.json() : { error: await response.text() };
  if (!response.ok) {
    say(body.error);
    return null;
  }
  return body;
}

// the token comes behind the #, which browsers do not send, and does not stay in the address
export async function login() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  await post("/api/login", { token: decodeURIComponent(given[1]) });
}

export function gib(bytes) {
  return `${(bytes / 2 ** 30).toFixed(2)}\u00a0GiB`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size && size < 0.001) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} d ago`;
}
