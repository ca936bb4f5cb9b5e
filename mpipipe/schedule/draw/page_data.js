// From the page's JSON to arrays: times, what waits for what, activations kept. No part of it touches the page.

const F = 0, B = 1, I = 2, W = 3;
const PHASES = ["warm-up", "steady", "cool-down"];

// Sums of whole numbers of ticks are exact; a tick is `raw.tick` of the costs' unit.
function decode(raw) {
  const n = raw.style.length, tick = raw.tick;
  const one = {
    name: raw.name, note: raw.note, figures: raw.figures, p: raw.p, m: raw.m, n: n, styles: raw.styles,
    offsets: raw.offsets, style: Uint16Array.from(raw.style), stage: Int32Array.from(raw.stage),
    microbatch: Int32Array.from(raw.microbatch), makespan: raw.makespan * tick,
    start: new Float64Array(n), end: new Float64Array(n), rank: new Int32Array(n), kind: new Uint8Array(n),
    partner: new Int32Array(n).fill(-1), second: new Uint8Array(n), onPath: new Uint8Array(n),
    phases: raw.phases.map((row) => row.map((time) => time * tick)), pairs: raw.pairs.length > 0,
  };
  for (let rank = 0; rank < one.p; rank++) {
    let at = 0;
    for (let i = one.offsets[rank]; i < one.offsets[rank + 1]; i++) {
      const begin = at + raw.wait[i];
      at = begin + raw.lasts[i];
      one.start[i] = begin * tick;
      one.end[i] = at * tick;
      one.rank[i] = rank;
      one.kind[i] = one.styles[one.style[i]].kind;
    }
  }
  let place = 0;
  for (const step of raw.pairs) {
    place += step;
    one.partner[place] = place + 1;
    one.partner[place + 1] = place;
    one.second[place + 1] = 1;
  }
  place = 0;
  one.path = Int32Array.from(raw.path, (step) => (place += step));
  for (const i of one.path) one.onPath[i] = 1;
  one.need = needs(one);
  one.curves = [];
  one.most = 0;
  for (let rank = 0; rank < one.p; rank++) {
    one.curves.push(kept(one, rank));
    for (const count of one.curves[rank].count) one.most = Math.max(one.most, count);
  }
  return one;
}

// The action of another rank that each action waits for, -1 for none: F of a stage needs F of the stage before it, B and I
// need B or I of the stage after it.
function needs(one) {
  let stages = 0;
  for (let i = 0; i < one.n; i++) stages = Math.max(stages, one.stage[i] + 1);
  const forward = new Int32Array(stages * one.m).fill(-1), backward = forward.slice();
  for (let i = 0; i < one.n; i++) {
    const place = one.stage[i] * one.m + one.microbatch[i];
    if (one.kind[i] === F) forward[place] = i;
    else if (one.kind[i] !== W) backward[place] = i;
  }
  const need = new Int32Array(one.n).fill(-1);
  for (let i = 0; i < one.n; i++) {
    const stage = one.stage[i], ahead = one.kind[i] === F ? stage - 1 : stage + 1;
    if (one.kind[i] === W || ahead < 0 || ahead >= stages) continue;
    const found = (one.kind[i] === F ? forward : backward)[ahead * one.m + one.microbatch[i]];
    if (found >= 0 && one.rank[found] !== one.rank[i]) need[i] = found;
  }
  return need;
}

// Activations kept by a rank: count[i] holds from time[i] to time[i + 1]. What ends is freed before what starts counts.
function kept(one, rank) {
  const events = [];
  for (let i = one.offsets[rank]; i < one.offsets[rank + 1]; i++) {
    if (one.kind[i] === F) events.push([one.start[i], 1]);
    else if (one.kind[i] !== I) events.push([one.end[i], -1]);
  }
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const time = [], count = [];
  let now = 0;
  for (const [when, change] of events) {
    now += change;
    if (time.length && time[time.length - 1] === when) count[count.length - 1] = now;
    else { time.push(when); count.push(now); }
  }
  return { time: Float64Array.from(time), count: Int32Array.from(count) };
}

// The first place in values[from .. to) that holds more than what is sought.
function after(values, sought, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > sought) to = middle; else from = middle + 1;
  }
  return from;
}

function actionText(one, i) {
  return one.stage[i] + one.styles[one.style[i]].letter + one.microbatch[i];
}

function number(value) {
  return String(Number(value.toPrecision(7)));
}

function phaseAt(one, rank, time) {
  const bounds = one.phases[rank];
  for (let k = 0; k < 3; k++) if (bounds[k + 1] > bounds[k] && time < bounds[k + 1]) return PHASES[k];
  return bounds[3] > 0 ? "done" : "no action";
}

// The action of `rank` at a time: {i} for one that runs, {next} for the one that is waited for (-1: none).
function find(one, rank, time, lower) {
  const from = one.offsets[rank], to = one.offsets[rank + 1];
  let i = after(one.start, time, from, to) - 1;
  while (i >= from && one.end[i] === one.start[i] && one.end[i] < time) i--;
  if (i >= from && time < one.end[i]) {
    if (one.partner[i] >= 0) i = lower ? Math.max(i, one.partner[i]) : Math.min(i, one.partner[i]);
    return { i: i, next: -1 };
  }
  const next = after(one.start, time, from, to);
  return { i: -1, next: next < to ? next : -1 };
}

// How long the rank stood still before an action, and why.
function waitOf(one, i) {
  const from = one.offsets[one.rank[i]];
  const lead = one.second[i] ? i - 1 : i;
  const free = lead > from ? one.end[lead - 1] : 0;
  const idle = one.start[i] - free;
  let cause = one.need[i];
  const other = one.partner[i] >= 0 ? one.need[one.partner[i]] : -1;
  if (other >= 0 && (cause < 0 || one.end[other] > one.end[cause])) cause = other;
  return { idle: idle > 1e-9 * one.makespan ? idle : 0, free: free, cause: cause };
}

function waitWords(one, i) {
  const wait = waitOf(one, i);
  if (!wait.idle) return "no wait before it";
  if (wait.cause < 0) return "waited " + number(wait.idle);
  const way = one.start[i] - one.end[wait.cause];
  const words = "waited " + number(wait.idle) + " for " + actionText(one, wait.cause) + " of rank " +
    one.rank[wait.cause] + ", which ended at " + number(one.end[wait.cause]);
  return way > 1e-9 * one.makespan ? words + "; its message took " + number(way) : words;
}
