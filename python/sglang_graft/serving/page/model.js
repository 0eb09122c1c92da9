// What the page shows, computed from what the server says. No document in here: node runs it too.

export const CELLS = 480;
export const HUES = 8;
export const HISTORY = 120;

/** Name of a node: its first name, the base model, or the start of its identity. */
export function nameOf(adapter) {
  if (adapter.identity === null) return "base model";
  if (adapter.names.length) return adapter.names[0];
  return adapter.identity.slice(0, 10);
}

/** Names of equal weights share a node: "legal, contracts". */
export function namesOf(adapter) {
  return adapter.names.length > 1 ? adapter.names.join(", ") : nameOf(adapter);
}

/**
 * Share `cells` among parts by size, so that they add up and nothing that is there vanishes.
 * Largest remainders; equal ones in the order of the parts.
 */
export function shareOut(sizes, cells) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  if (!total) return sizes.map(() => 0);
  const exact = sizes.map((size) => (size / total) * cells);
  const given = exact.map((share, i) => (sizes[i] > 0 ? Math.max(1, Math.floor(share)) : 0));
  let left = cells - given.reduce((sum, n) => sum + n, 0);
  const order = sizes.map((_, i) => i).filter((i) => sizes[i] > 0);
  order.sort((a, b) => exact[b] - given[b] - (exact[a] - given[a]) || a - b);
  for (let i = 0; left > 0; i = (i + 1) % order.length, left -= 1) given[order[i]] += 1;
  while (left < 0) {
    const largest = order.reduce((best, i) => (given[i] > given[best] ? i : best), order[0]);
    if (given[largest] <= 1) break; // more parts than cells: some have to share
    given[largest] -= 1;
    left += 1;
  }
  return given;
}

/**
 * A hue for each adapter that keeps it from one answer to the next: `kept` maps identities to
 * numbers below HUES, and is changed. Those with the most pages get one first.
 */
export function assignHues(adapters, kept) {
  const here = new Set(adapters.map((a) => a.identity));
  for (const identity of [...kept.keys()]) if (!here.has(identity)) kept.delete(identity);
  const free = new Set(Array.from({ length: HUES }, (_, i) => i));
  for (const hue of kept.values()) free.delete(hue);
  const wanting = adapters.filter((a) => a.identity !== null && !kept.has(a.identity));
  wanting.sort((a, b) => pagesOf(b) - pagesOf(a) || (a.identity < b.identity ? -1 : 1));
  for (const adapter of wanting) {
    if (!free.size) break;
    const hue = Math.min(...free);
    free.delete(hue);
    kept.set(adapter.identity, hue);
  }
  return kept;
}

export function pagesOf(adapter) {
  return adapter.pages + adapter.kv_pages;
}

/**
 * The parts of the map in order: each adapter's weights and KV, what the list leaves out, running
 * KV, loads in flight, reserve, free. Sizes in pages; they add up to the pool.
 */
export function parts(snapshot) {
  const pages = snapshot.pages;
  const found = [];
  let weights = pages.adapter;
  let kv = pages.kv_cached;
  for (const adapter of snapshot.adapters_shown) {
    // Pages on their way belong to "in flight" until they have landed.
    const landed = adapter.state === "loading" ? 0 : Math.min(adapter.pages, weights);
    const cached = Math.min(adapter.kv_pages, kv);
    weights -= landed;
    kv -= cached;
    const who = { identity: adapter.identity, name: nameOf(adapter) };
    if (landed) found.push({ ...who, kind: "weights", size: landed });
    if (cached) found.push({ ...who, kind: "kv", size: cached });
  }
  if (weights) found.push({ identity: "", name: "other adapters", kind: "weights", size: weights });
  if (kv) found.push({ identity: "", name: "other adapters", kind: "kv", size: kv });
  const reserve = Math.min(snapshot.reserve_pages, pages.free);
  const rest = [
    ["running requests", "running", pages.kv_running],
    ["copies in flight", "flight", pages.in_flight],
    ["reserve for running requests", "reserve", reserve],
    ["free", "free", pages.free - reserve],
  ];
  for (const [name, kind, size] of rest) {
    if (size) found.push({ identity: "", name, kind, size });
  }
  return found;
}

/** Growth of a counter; a smaller value means that the server began anew. */
export function growth(now, before) {
  return now >= before ? now - before : now;
}

/** Quantile `q` of what a histogram gained, null when it gained nothing. */
export function quantile(q, bounds, counts, before) {
  const gained = counts.map((n, i) => growth(n, before ? before[i] : 0));
  const total = gained.reduce((sum, n) => sum + n, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < gained.length; i += 1) {
    if (gained[i] && seen + gained[i] >= q * total) {
      if (i >= bounds.length) return bounds[bounds.length - 1];
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (q * total - seen)) / gained[i];
    }
    seen += gained[i];
  }
  return null;
}

const sum = (object) => Object.values(object).reduce((total, n) => total + n, 0);

/** The counters that the charts follow, of one answer. */
export function totals(answer) {
  const { scheduler, http } = answer;
  const ttft = Object.values(http.ttft);
  const counts = ttft.length ? ttft[0].counts.map((_, i) => sum(ttft.map((t) => t.counts[i]))) : [];
  return {
    requests: sum(http.requests),
    errors: http.errors.reduce((total, row) => total + row.count, 0),
    loads: scheduler.host.loads,
    evicted: scheduler.evictions.reduce((total, row) => total + row.nodes, 0),
    ttft: { bounds: ttft.length ? ttft[0].bounds : [], counts },
  };
}

/** A point of the charts: rates a second since `before`, and the median first token. */
export function point(now, before, seconds) {
  const rate = (name) => growth(now[name], before[name]) / seconds;
  const old = before.ttft.counts.length === now.ttft.counts.length ? before.ttft.counts : null;
  return {
    requests: rate("requests"),
    errors: rate("errors"),
    loads: rate("loads"),
    evicted: rate("evicted"),
    ttft: quantile(0.5, now.ttft.bounds, now.ttft.counts, old),
  };
}

/** Share of requests whose adapter was on the device when they came, null before the first. */
export function hitRate(host) {
  const all = host.hits_device + host.hits_host + host.hits_disk;
  return all ? host.hits_device / all : null;
}

/** Share of prompt tokens that did not have to be computed, null before the first. */
export function reuse(host) {
  const found = host.tokens_device + host.tokens_host;
  const all = found + host.tokens_computed;
  return all ? found / all : null;
}

const number = (value, digits) =>
  value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export function count(value) {
  return number(value, 0);
}

export function percent(value) {
  if (value === null) return "–";
  if (value > 0.999 && value < 1) return "99.9 %";
  return `${number(100 * value, value === 0 || value === 1 ? 0 : 1)} %`;
}

export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${number(1000 * seconds, 0)} ms`;
  return `${number(seconds, seconds < 10 ? 2 : 1)} s`;
}

export function rate(value) {
  return `${number(value, value < 10 ? 1 : 0)}/s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${number(left, left < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

/** How long ago in the pool's logical time: matches, inserts and loads since then. */
export function steps(clock, lastUse) {
  if (!lastUse) return "never";
  const gone = clock - lastUse;
  return gone ? `${count(gone)} step${gone === 1 ? "" : "s"} ago` : "just now";
}

const WHY = {
  request: "to make room for a request",
  adapter: "to make room for an adapter",
  promotion: "to make room for KV from the host",
  pin: "to make room for a pinned adapter",
  unload: "because its adapter was unloaded or replaced",
  flush: "because the pool was emptied",
};

/** A departure in words. */
export function departure(one) {
  const who = one.identity === null ? "base model" : one.name || one.identity.slice(0, 10);
  const what = one.what === "adapter" ? "weights" : "KV";
  const pages = `${count(one.pages)} page${one.pages === 1 ? "" : "s"}`;
  const why = one.reason === "unload" && one.what === "adapter"
    ? "because it was unloaded or replaced"
    : WHY[one.reason];
  return { who, text: `${what}, ${pages}, ${why}`, kept: one.kept };
}

/** Runs of equal departures (a flush, say) as one line each. */
export function grouped(departures, most) {
  const found = [];
  for (const one of departures) {
    const last = found[found.length - 1];
    const same = last && ["identity", "what", "reason", "kept"].every((k) => last[k] === one[k]);
    if (same) last.pages += one.pages;
    else if (found.length === most) break;
    else found.push({ ...one });
  }
  return found;
}

/** The pool in one sentence. */
export function poolText(snapshot) {
  const { pages, page_bytes: size } = snapshot;
  const share = (n) => percent(pages.total ? n / pages.total : 0);
  return (
    `${count(pages.total)} pages of ${bytes(size)}: weights ${share(pages.adapter)}, cached KV ` +
    `${share(pages.kv_cached)}, running KV ${share(pages.kv_running)}, in flight ` +
    `${share(pages.in_flight)}, free ${share(pages.free)}.`
  );
}
