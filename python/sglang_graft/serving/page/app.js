// Asks the server once a second and draws what it says; goes on when it is away.

import * as draw from "./draw.js";
import * as model from "./model.js";

const SECOND = 1000;
const SLOWEST = 5 * SECOND;
const PATIENCE = 8 * SECOND;
const KEY = "graft-admin-key";
const WINDOW = 10; // seconds over which a point of the charts is taken

const hues = new Map();
const open = new Set(["null"]);
const history = [];
const before = []; // {at, totals}, the oldest first
let picked; // identity whose pages stand out; the base model's is null
let last = null;
let pause = SECOND;
let timer = 0;
let asking = false;

/** Prefer the session's memory; without it (blocked storage) the key lives in this page alone. */
const memory = { key: "" };
function storedKey() {
  try {
    return sessionStorage.getItem(KEY) || memory.key;
  } catch {
    return memory.key;
  }
}
function storeKey(key) {
  memory.key = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // The page goes on with its own copy.
  }
}

async function ask() {
  const key = storedKey();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const signal = AbortSignal.timeout(PATIENCE);
  return fetch("/graft/overview", { headers, signal, cache: "no-store" });
}

function follow(answer) {
  const at = performance.now() / SECOND;
  const now = model.totals(answer);
  const oldest = before[0];
  if (oldest) history.push(model.point(now, oldest.totals, Math.max(at - oldest.at, 0.5)));
  if (history.length > model.HISTORY) history.shift();
  before.push({ at, totals: now });
  while (before.length > 1 && before[0].at < at - WINDOW) before.shift();
}

function paint(answer) {
  last = answer;
  const snapshot = answer.scheduler;
  model.assignHues(snapshot.adapters_shown, hues);
  const measured = history.map((point) => point.ttft).filter((value) => value !== null);
  draw.about(answer);
  draw.figures(answer, measured.length ? measured[measured.length - 1] : null);
  draw.map(snapshot, hues, picked);
  draw.table(snapshot, hues, picked, pick);
  draw.charts(history);
  draw.tree(snapshot, hues, open);
  draw.left(snapshot);
}

function pick(identity) {
  picked = picked === identity ? undefined : identity;
  if (last) paint(last);
}

function askForKey() {
  const dialog = document.getElementById("ask");
  if (storedKey()) {
    document.getElementById("ask-text").textContent = "The server did not take this key.";
    storeKey("");
  }
  draw.state("wait", "Waiting for the key");
  if (!dialog.open) dialog.showModal();
}

async function turn() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const response = await ask();
    if (response.status === 401 || response.status === 403) {
      askForKey();
      return;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    const answer = await response.json();
    const { stale, age } = answer.http;
    if (answer.scheduler) {
      if (!stale) follow(answer);
      paint(answer);
    }
    if (stale) draw.state("stale", `The scheduler is busy: figures of ${Math.round(age)} s ago`);
    else draw.state("live", "Live");
    pause = SECOND;
  } catch {
    draw.state("lost", "No answer from the server. Trying again");
    pause = Math.min(pause * 1.5, SLOWEST);
  } finally {
    asking = false;
  }
  if (!document.hidden) timer = setTimeout(turn, pause);
}

document.getElementById("ask-form").addEventListener("submit", () => {
  storeKey(document.getElementById("key").value);
  document.getElementById("key").value = "";
  turn();
});
document.getElementById("ask").addEventListener("cancel", (event) => event.preventDefault());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !document.getElementById("ask").open) turn();
});

turn();
