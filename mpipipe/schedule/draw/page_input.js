// Pan, zoom, hover. Time is zoomed about the pointer, lanes about the top of the view.

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}

function bounded() {
  const span = Math.min(whole * 1.02, Math.max(whole * 1e-7, view.to - view.from));
  view.from = Math.min(Math.max(view.from, -0.01 * whole), whole * 1.01 - span);
  view.to = view.from + span;
  view.scroll = Math.max(0, Math.min(view.scroll, contentHeight() - room()));
}

function zoom(factor, x) {
  const time = timeAt(x === undefined ? LEFT + (view.width - LEFT - RIGHT) / 2 : x);
  const span = Math.min(whole * 1.02, Math.max(whole * 1e-7, (view.to - view.from) * factor));
  const share = (time - view.from) / (view.to - view.from);
  view.from = time - share * span;
  view.to = view.from + span;
  bounded();
  redraw();
}

function pan(dx, dy) {
  const time = dx / perUnit();
  view.from -= time;
  view.to -= time;
  view.scroll -= dy;
  const span = view.to - view.from;
  bounded();
  view.to = view.from + Math.min(span, view.to - view.from);
  redraw();
}

function stretch(factor, y) {
  const old = view.lane, at = (view.scroll + (y || 0)) / old;
  view.lane = Math.min(160, Math.max(1.5, old * factor));
  view.scroll = at * view.lane - (y || 0);
  bounded();
  redraw();
}

function fit() {
  view.from = -0.01 * whole;
  view.to = 1.01 * whole;
  view.lane = Math.min(100, Math.max(1.5, (room() - all.length * HEAD - 8) / lanes()));
  view.scroll = 0;
  redraw();
}

function resize() {
  const box = canvas.getBoundingClientRect();
  view.dpr = window.devicePixelRatio || 1;
  view.width = box.width;
  view.height = box.height;
  canvas.width = Math.round(box.width * view.dpr);
  canvas.height = Math.round(box.height * view.dpr);
}

function at(event) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

// What is under the pointer: a schedule, a rank, and an action or a wait.
function point(x, y) {
  const size = parts();
  for (let k = 0; k < all.length; k++) {
    const from = topOf(k) + HEAD, rank = Math.floor((y - from) / view.lane), time = timeAt(x);
    if (rank < 0 || rank >= all[k].p || x < LEFT || y > room() || time < 0 || time > all[k].makespan) continue;
    const inLane = y - from - rank * view.lane - size.strip;
    return Object.assign({ k: k, rank: rank, x: x, time: time }, find(all[k], rank, time, inLane > size.bar / 2));
  }
  return null;
}

function tipLines(hit) {
  const one = all[hit.k], lines = [];
  if (hit.i >= 0) {
    const i = hit.i, style = one.styles[one.style[i]];
    lines.push(actionText(one, i) + ": " + style.title + ", stage " + one.stage[i] + ", microbatch " + one.microbatch[i]);
    lines.push("rank " + hit.rank + ", " + style.place + ", " + phaseAt(one, hit.rank, one.start[i]));
    lines.push(number(one.start[i]) + " to " + number(one.end[i]) + " (" + number(one.end[i] - one.start[i]) + ")");
    if (one.partner[i] >= 0) lines.push("at once with " + actionText(one, one.partner[i]));
    lines.push(waitWords(one, i));
    if (one.onPath[i]) lines.push("on the critical path");
  } else if (hit.next >= 0) {
    const wait = waitOf(one, hit.next);
    lines.push("waiting: rank " + hit.rank + ", " + phaseAt(one, hit.rank, hit.time));
    lines.push(number(wait.free) + " to " + number(one.start[hit.next]) + " (" + number(wait.idle) + ")");
    lines.push("before " + actionText(one, hit.next) + ": " + waitWords(one, hit.next));
  } else {
    lines.push("rank " + hit.rank + " has done all its actions");
  }
  const curve = one.curves[hit.rank], place = after(curve.time, hit.time, 0, curve.time.length) - 1;
  lines.push("activations kept at " + number(hit.time) + ": " + (place < 0 ? 0 : curve.count[place]));
  return lines;
}

function hover(x, y) {
  pointed = point(x, y);
  tip.hidden = !pointed;
  if (pointed) {
    tip.textContent = tipLines(pointed).join("\n");
    const box = canvas.getBoundingClientRect();
    const left = x + 16 + tip.offsetWidth < view.width ? x + 16 : Math.max(0, x - 16 - tip.offsetWidth);
    const top = y + 16 + tip.offsetHeight < view.height ? y + 16 : Math.max(0, y - 16 - tip.offsetHeight);
    tip.style.left = box.left + window.scrollX + left + "px";
    tip.style.top = box.top + window.scrollY + top + "px";
  }
  redraw();
}

const pointers = new Map();
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, at(event));
});
canvas.addEventListener("pointermove", (event) => {
  const now = at(event), before = pointers.get(event.pointerId);
  if (!before) { if (!pointers.size) hover(now.x, now.y); return; }
  if (pointers.size === 1) pan(now.x - before.x, now.y - before.y);
  if (pointers.size === 2) {
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    const was = Math.hypot(before.x - other.x, before.y - other.y), is = Math.hypot(now.x - other.x, now.y - other.y);
    if (was > 5 && is > 5) zoom(was / is, (now.x + other.x) / 2);
    pan((now.x - before.x) / 2, (now.y - before.y) / 2);
  }
  pointers.set(event.pointerId, now);
  tip.hidden = true;
});
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
  pointers.delete(event.pointerId);
  if (event.pointerType !== "mouse" && name === "pointerup") { const now = at(event); hover(now.x, now.y); }
});
canvas.addEventListener("pointerleave", () => { pointed = null; tip.hidden = true; redraw(); });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1, dx = event.deltaX * lines, dy = event.deltaY * lines, now = at(event);
  if (event.altKey) stretch(Math.exp(-dy / 400), now.y);
  else if (event.shiftKey) pan(-(dx || dy), 0);
  else if (now.x < LEFT) pan(0, -dy);
  else if (Math.abs(dx) > Math.abs(dy)) pan(-dx, 0);
  else zoom(Math.exp(dy / (event.ctrlKey ? 100 : 400)), now.x);
  if (!event.ctrlKey || pointers.size === 0) hover(now.x, now.y);
}, { passive: false });
canvas.addEventListener("dblclick", (event) => zoom(0.5, at(event).x));

function toggle(name) {
  const box = document.getElementById("show-" + name);
  view[name] = box.checked = !view[name];
  redraw();
}

const ACTIONS = {
  "zoom-in": () => zoom(0.6), "zoom-out": () => zoom(1 / 0.6), "fit": fit,
  "taller": () => stretch(1.25), "lower": () => stretch(0.8),
};
const KEYS = {
  "+": ACTIONS["zoom-in"], "=": ACTIONS["zoom-in"], "-": ACTIONS["zoom-out"], "0": fit, "Home": fit,
  "]": ACTIONS.taller, "[": ACTIONS.lower, "c": () => toggle("path"), "m": () => toggle("memory"),
  "ArrowLeft": () => pan(view.width / 8, 0), "ArrowRight": () => pan(-view.width / 8, 0),
  "ArrowUp": () => pan(0, 60), "ArrowDown": () => pan(0, -60),
  "PageUp": () => pan(0, room() * 0.9), "PageDown": () => pan(0, -room() * 0.9),
};
for (const name of Object.keys(ACTIONS)) document.getElementById(name).addEventListener("click", ACTIONS[name]);
for (const name of ["path", "memory"]) {
  document.getElementById("show-" + name).addEventListener("change", (event) => { view[name] = event.target.checked; redraw(); });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
new ResizeObserver(() => { resize(); bounded(); draw(); }).observe(canvas);
resize();
fit();
