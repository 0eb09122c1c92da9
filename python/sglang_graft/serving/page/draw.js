// The document from the numbers of model.js. Names come from clients: only ever as text.

import * as model from "./model.js";

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const hueOf = (hues, identity) => (hues.has(identity) ? `hue-${hues.get(identity)}` : "");
const wide = window.matchMedia("(min-width: 40rem)");

export function state(kind, text) {
  const element = $("state");
  element.dataset.state = kind;
  if (element.textContent !== text) element.textContent = text; // a status is read out when it changes
}

export function figures(answer, latest) {
  const { scheduler, http } = answer;
  const rows = [
    ["free pages", model.percent(scheduler.pages.total ? scheduler.pages.free / scheduler.pages.total : 0)],
    ["adapters on the device", `${model.count(scheduler.adapters.device)} of ${model.count(scheduler.adapters_known)}`],
    ["adapter hit rate", model.percent(model.hitRate(scheduler.host))],
    ["prompt tokens reused", model.percent(model.reuse(scheduler.host))],
    ["first token, median", model.duration(latest)],
    ["requests under way", model.count(http.in_flight)],
    ["invalid KV pages", model.count(scheduler.invalid_kv_pages), scheduler.invalid_kv_pages > 0],
  ];
  $("figures").replaceChildren(
    ...rows.map(([name, value, alarm]) =>
      make("div", { className: alarm ? "alarm" : "" }, make("dt", { textContent: name }), make("dd", { textContent: value })),
    ),
  );
}

/** The grid: one cell stands for equally many pages, and every part has at least one. */
export function map(snapshot, hues, picked) {
  const found = model.parts(snapshot);
  const columns = wide.matches ? 48 : 24;
  const cells = Math.min(model.CELLS, Math.max(snapshot.pages.total, 1));
  const svg = $("map");
  const rows = Math.ceil(cells / columns);
  svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  svg.classList.toggle("picked", picked !== undefined);
  const given = model.shareOut(found.map((part) => part.size), cells);
  const drawn = [];
  let place = 0;
  found.forEach((part, i) => {
    const mine = part.identity === picked && (part.kind === "kv" || part.kind === "weights");
    const classes = `${part.kind} ${hueOf(hues, part.identity)} ${mine ? "mine" : ""}`;
    for (let n = 0; n < given[i]; n += 1, place += 1) {
      const cell = shape("rect", {
        x: (place % columns) + 0.06, y: Math.floor(place / columns) + 0.06,
        width: 0.88, height: 0.88, rx: 0.14, class: classes,
      });
      const title = shape("title", {});
      title.textContent = `${part.name}: ${part.kind}, ${model.count(part.size)} pages`;
      cell.append(title);
      drawn.push(cell);
    }
  });
  svg.replaceChildren(...drawn);
  $("pool-text").textContent = model.poolText(snapshot);
}

const WHERE = { device: "device", loading: "on its way", host: "host", disk: "disk" };

function number(value, more = "") {
  return make("td", { className: `n ${more} ${value ? "" : "zero"}`, textContent: model.count(value) });
}

export function table(snapshot, hues, picked, pick) {
  const focused = document.activeElement?.dataset?.identity;
  const rows = snapshot.adapters_shown.map((adapter) => {
    const button = make("button", { className: "pick", type: "button" });
    button.append(make("i", { className: `key ${hueOf(hues, adapter.identity)}` }), model.namesOf(adapter));
    button.dataset.identity = String(adapter.identity);
    button.setAttribute("aria-pressed", String(adapter.identity === picked));
    button.addEventListener("click", () => pick(adapter.identity));
    const head = make("th", { scope: "row" }, button);
    if (adapter.pinned) head.append(" ", make("span", { className: "tag", textContent: "pinned" }));
    if (adapter.locked) head.append(" ", make("span", { className: "tag", textContent: "in use" }));
    return make(
      "tr", {}, head, make("td", { textContent: WHERE[adapter.state] }),
      number(adapter.pages), number(adapter.kv_pages), number(adapter.host_kv_pages, "wide"),
      make("td", { className: "n wide", textContent: model.steps(snapshot.clock, adapter.last_use) }),
    );
  });
  $("adapters").replaceChildren(...rows);
  for (const button of $("adapters").querySelectorAll("button")) {
    if (button.dataset.identity === focused) button.focus({ preventScroll: true });
  }
  const hidden = snapshot.adapters_known + 1 - snapshot.adapters_shown.length;
  $("more").textContent = hidden > 0 ? `${model.count(hidden)} more, used longer ago, are not listed.` : "";
}

const CHARTS = [
  ["ttft", "First token, median", model.duration],
  ["requests", "Requests", model.rate],
  ["loads", "Adapter loads", model.rate],
  ["evicted", "Evictions", model.rate],
];

/** `history`: the latest points, the newest last; null where nothing was measured. */
export function charts(history) {
  const drawn = CHARTS.map(([name, title, text]) => {
    const values = history.map((point) => point[name]);
    const known = values.filter((value) => value !== null);
    const top = Math.max(...known, 0);
    const last = known.length ? known[known.length - 1] : null;
    const x = (i) => model.HISTORY - values.length + i;
    const y = (value) => 29 - (top ? (value / top) * 28 : 0);
    let line = "";
    values.forEach((value, i) => {
      if (value !== null) line += `${line && values[i - 1] !== null ? "L" : "M"}${x(i)} ${y(value).toFixed(2)}`;
    });
    const svg = shape("svg", {
      viewBox: `0 0 ${model.HISTORY - 1} 30`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${last === null ? "none yet" : `now ${text(last)}`}, at most ${text(top)}`,
    });
    svg.append(shape("path", { d: line }));
    const caption = make("figcaption", {}, make("span", { textContent: title }), make("strong", { textContent: last === null ? "–" : text(last) }));
    return make("figure", {}, caption, svg, make("p", { className: "top", textContent: top ? `at most ${text(top)}` : "\u00a0" }));
  });
  $("charts").replaceChildren(...drawn);
}

function run(child, snapshot, longest, hue) {
  const where = child.on_device ? (child.on_host ? "also on host" : "") : "on host only";
  const more = child.children ? `${model.count(child.children)} below` : "";
  const text = [
    `${model.count(child.pages * snapshot.page_tokens)} tokens`, more, where,
    child.locked ? "in use" : model.steps(snapshot.clock, child.last_use),
  ].filter(Boolean).join(" · ");
  const bar = make("div", { className: `bar ${hue} ${child.on_device ? "" : "away"}` });
  bar.style.setProperty("width", `${(100 * child.pages) / longest}%`);
  return make("li", {}, bar, make("span", { className: "meta", textContent: text }));
}

export function tree(snapshot, hues, open) {
  const longest = Math.max(1, ...snapshot.adapters_shown.flatMap((a) => a.children_shown.map((c) => c.pages)));
  const focused = document.activeElement?.dataset?.branch;
  const drawn = snapshot.adapters_shown.map((adapter) => {
    const hue = hueOf(hues, adapter.identity);
    const total = `${model.count(adapter.children)} run${adapter.children === 1 ? "" : "s"} of KV`;
    const head = [
      make("span", { className: "who" }, make("i", { className: `key ${hue}` }), model.namesOf(adapter)),
      make("span", { className: "meta", textContent: `${WHERE[adapter.state]} · ${total} · ${model.steps(snapshot.clock, adapter.last_use)}` }),
    ];
    if (!adapter.children) return make("li", {}, make("div", { className: "bare" }, ...head));
    const key = String(adapter.identity);
    const summary = make("summary", {}, ...head);
    summary.dataset.branch = key;
    const details = make("details", { open: open.has(key) }, summary);
    const runs = adapter.children_shown.map((child) => run(child, snapshot, longest, hue));
    const hidden = adapter.children - runs.length;
    if (hidden > 0) runs.push(make("li", {}, make("span", { className: "meta", textContent: `and ${model.count(hidden)} more` })));
    details.append(make("ul", {}, ...runs));
    details.addEventListener("toggle", () => (details.open ? open.add(key) : open.delete(key)));
    return make("li", {}, details);
  });
  $("tree").replaceChildren(...drawn);
  for (const summary of $("tree").querySelectorAll("summary")) {
    if (summary.dataset.branch === focused) summary.focus({ preventScroll: true });
  }
}

export function left(snapshot) {
  const rows = model.grouped(snapshot.departures, 12).map((one) => {
    const { who, text, kept } = model.departure(one);
    const at = new Date(one.at * 1000);
    const time = make("time", { dateTime: at.toISOString(), textContent: at.toLocaleTimeString("en-GB") });
    const line = make("span", {}, make("span", { className: "who", textContent: who }), ` ${text}`);
    const tag = kept ? [make("span", { className: "tag", textContent: "kept on host" })] : [];
    return make("li", {}, time, line, ...tag);
  });
  $("left").replaceChildren(...rows);
  $("left-none").hidden = rows.length > 0;
}

export function about(answer) {
  const { http, model: name } = answer;
  $("model").textContent = name;
  $("about").textContent = `Graft ${http.version} on SGLang ${http.sglang_version}, policy ${http.policy}. Figures for machines are at /metrics.`;
}
