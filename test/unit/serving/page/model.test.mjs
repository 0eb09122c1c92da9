// The numbers behind the page, without a browser.  GRAFT_PAGE is the folder of the page,
// GRAFT_OVERVIEW an answer of /graft/overview.

import assert from "node:assert/strict";
import test from "node:test";

const model = await import(`${process.env.GRAFT_PAGE}/model.js`);
const overview = () => JSON.parse(process.env.GRAFT_OVERVIEW);
const total = (numbers) => numbers.reduce((sum, n) => sum + n, 0);

test("shares add up, and nothing that is there vanishes", () => {
  let state = 7;
  const random = (n) => {
    state = (state * 48271) % 2147483647;
    return state % n;
  };
  for (let turn = 0; turn < 500; turn += 1) {
    const sizes = Array.from({ length: 1 + random(40) }, () => (random(4) ? random(10 ** random(6)) : 0));
    const cells = 50 + random(500);
    const given = model.shareOut(sizes, cells);
    if (!total(sizes)) continue;
    assert.equal(total(given), cells);
    sizes.forEach((size, i) => assert.equal(given[i] > 0, size > 0));
  }
});

test("shares are proportional to within a cell where no part is tiny", () => {
  const given = model.shareOut([300, 200, 500], 480);
  assert.deepEqual(given, [144, 96, 240]);
  assert.deepEqual(model.shareOut([0, 0], 480), [0, 0]);
  assert.equal(total(model.shareOut(Array(60).fill(1), 50)), 60, "more parts than cells: one each");
});

test("the parts of the map add up to the pool", () => {
  const snapshot = overview().scheduler;
  const parts = model.parts(snapshot);
  assert.equal(total(parts.map((p) => p.size)), snapshot.pages.total);
  const kinds = parts.map((p) => `${p.name}: ${p.kind} ${p.size}`);
  assert.deepEqual(kinds, [
    "base model: kv 6", "legal: weights 24", "legal: kv 6", "running requests: running 4",
    "copies in flight: flight 24", "reserve for running requests: reserve 6", "free: free 130",
  ]);
});

test("what the list leaves out is on the map all the same", () => {
  const snapshot = overview().scheduler;
  snapshot.adapters_shown = snapshot.adapters_shown.slice(0, 1);
  const parts = model.parts(snapshot);
  assert.equal(total(parts.map((p) => p.size)), snapshot.pages.total);
  assert.deepEqual(parts.filter((p) => p.name === "other adapters").map((p) => p.size), [24, 6]);
});

test("an adapter keeps its hue while it is listed", () => {
  const make = (i, pages) => ({ identity: `i${i}`, pages, kv_pages: 0 });
  const kept = new Map();
  model.assignHues([make(1, 5), make(2, 9), { identity: null, pages: 0, kv_pages: 3 }], kept);
  assert.deepEqual([...kept], [["i2", 0], ["i1", 1]]);
  const many = Array.from({ length: 12 }, (_, i) => make(i, 100 - i));
  model.assignHues(many, kept);
  assert.equal(kept.get("i1"), 1);
  assert.equal(kept.size, model.HUES);
  assert.equal(new Set(kept.values()).size, model.HUES);
  model.assignHues([make(1, 5), make(11, 1)], kept);
  assert.deepEqual([...kept], [["i1", 1], ["i11", 0]]);
});

test("a counter that fell belongs to a server that began anew", () => {
  assert.equal(model.growth(7, 4), 3);
  assert.equal(model.growth(2, 4), 2);
});

test("quantiles lie in the bucket that has them", () => {
  const bounds = [1, 2, 4];
  assert.equal(model.quantile(0.5, bounds, [0, 0, 0, 0], null), null);
  assert.equal(model.quantile(0.5, bounds, [0, 4, 0, 0], null), 1.5);
  assert.equal(model.quantile(0.5, bounds, [9, 4, 0, 0], [9, 0, 0, 0]), 1.5);
  assert.equal(model.quantile(0.99, bounds, [0, 0, 0, 3], null), 4);
  assert.equal(model.quantile(0.5, bounds, [2, 0, 0, 0], [5, 5, 5, 5]), 0.5, "a new server");
});

test("points are rates a second", () => {
  const answer = overview();
  const before = model.totals(answer);
  answer.http.requests.legal += 20;
  answer.scheduler.host.loads += 5;
  answer.http.ttft.legal.counts[6] += 20;
  const point = model.point(model.totals(answer), before, 10);
  assert.equal(point.requests, 2);
  assert.equal(point.loads, 0.5);
  assert.equal(point.evicted, 0);
  assert.ok(point.ttft > 0.05 && point.ttft <= 0.1);
});

test("hit rates have no value before the first request", () => {
  const { host } = overview().scheduler;
  for (const key of Object.keys(host)) host[key] = 0;
  assert.equal(model.hitRate(host), null);
  assert.equal(model.reuse(host), null);
  assert.equal(model.percent(null), "–");
  Object.assign(host, { hits_device: 3, hits_disk: 1, tokens_host: 1, tokens_computed: 3 });
  assert.equal(model.percent(model.hitRate(host)), "75.0 %");
  assert.equal(model.percent(model.reuse(host)), "25.0 %");
});

test("numbers in words", () => {
  assert.equal(model.duration(0.0421), "42 ms");
  assert.equal(model.duration(1.234), "1.23 s");
  assert.equal(model.duration(null), "–");
  assert.equal(model.bytes(1474560), "1.4 MiB");
  assert.equal(model.percent(0), "0 %");
  assert.equal(model.percent(0.99999), "99.9 %");
  assert.equal(model.steps(41, 0), "never");
  assert.equal(model.steps(41, 41), "just now");
  assert.equal(model.steps(42, 41), "1 step ago");
});

test("departures say who, what and why", () => {
  const [kv, weights] = overview().scheduler.departures.map(model.departure);
  assert.deepEqual(kv, { who: "legal", text: "KV, 12 pages, to make room for a request", kept: true });
  assert.equal(weights.who, "aaaaaaaaaa");
  assert.match(weights.text, /^weights, 12 pages, because it was unloaded or replaced$/);
});

test("equal departures in a row are one line", () => {
  const one = overview().scheduler.departures[0];
  const lines = model.grouped([one, { ...one, pages: 3 }, { ...one, reason: "flush" }, one], 2);
  assert.deepEqual(lines.map((line) => [line.reason, line.pages]), [["request", 15], ["flush", 12]]);
});

test("names", () => {
  const [base, legal] = overview().scheduler.adapters_shown;
  assert.equal(model.nameOf(base), "base model");
  assert.equal(model.namesOf({ ...legal, names: ["legal", "law"] }), "legal, law");
  assert.equal(model.nameOf({ ...legal, names: [] }), "aaaaaaaaaa");
});
