// Drawing: only what is visible, and what is narrower than a pixel as the mean colour of its pixel.

const LEFT = 66, RIGHT = 14, HEAD = 24, AXIS = 26;
const IDLE = [241, 241, 241];
const canvas = document.getElementById("picture"), context = canvas.getContext("2d");
const tip = document.getElementById("tip");
const view = { from: 0, to: 1, scroll: 0, lane: 20, path: true, memory: true, width: 0, height: 0, dpr: 1 };
const page = JSON.parse(document.getElementById("data").textContent);
const all = page.schedules.map(decode);
const whole = Math.max(1e-12, ...all.map((one) => one.makespan));
const strips = document.createElement("canvas");
let pointed = null;

for (const one of all) for (const style of one.styles) style.rgb = [1, 3, 5].map((at) => parseInt(style.fill.slice(at, at + 2), 16));

function perUnit() { return (view.width - LEFT - RIGHT) / (view.to - view.from); }
function xOf(time) { return LEFT + (time - view.from) * perUnit(); }
function timeAt(x) { return view.from + (x - LEFT) / perUnit(); }
function lanes() { return all.reduce((sum, one) => sum + one.p, 0); }
function contentHeight() { return all.length * HEAD + lanes() * view.lane + 8; }
function room() { return view.height - AXIS; }

// Heights within a lane: strip of phases, bar, memory curve.
function parts() {
  const lane = view.lane, strip = lane >= 9 ? Math.max(1.5, 0.06 * lane) : 0;
  const curve = view.memory && lane >= 9 ? 0.32 * lane : 0, gap = lane < 3 ? 0 : Math.max(1, 0.12 * lane);
  return { strip: strip, curve: curve, bar: lane - strip - curve - gap };
}

// The upper edge of a schedule's heading.
function topOf(k) {
  let y = -view.scroll;
  for (let j = 0; j < k; j++) y += HEAD + all[j].p * view.lane;
  return y;
}

function draw() {
  context.setTransform(view.dpr, 0, 0, view.dpr, 0, 0);
  context.fillStyle = "#fff";
  context.fillRect(0, 0, view.width, view.height);
  drawGrid(false);
  all.forEach((one, k) => drawSchedule(one, topOf(k)));
  if (pointed) drawPointed();
  context.fillStyle = "#fff";
  context.fillRect(0, room(), view.width, AXIS);
  drawGrid(true);
}

function drawGrid(labels) {
  const span = view.to - view.from, most = Math.max(2, Math.floor(view.width / 90));
  const power = Math.pow(10, Math.floor(Math.log10(span / most)));
  const step = power * [1, 2, 5, 10, 20].find((factor) => power * factor * most >= span);
  context.font = "11px sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let j = Math.ceil(Math.max(0, view.from) / step); j * step <= Math.min(view.to, whole * 1.0001); j++) {
    const x = xOf(j * step);
    context.fillStyle = labels ? "#555" : "#e4e4e4";
    if (labels) context.fillText(number(j * step), x, room() + 15);
    context.fillRect(Math.round(x), labels ? room() : 0, 1, labels ? 5 : room());
  }
  context.fillStyle = "#999";
  if (labels) context.fillRect(LEFT, room(), view.width - LEFT - RIGHT, 1);
}

function drawSchedule(one, y) {
  const size = parts(), top = y + HEAD, height = one.p * view.lane;
  if (top + height < 0 || y > room()) return;
  const first = Math.max(0, Math.floor(-top / view.lane)), last = Math.min(one.p - 1, Math.floor((room() - top) / view.lane));
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, view.width - LEFT - RIGHT, room());
  context.clip();
  for (let rank = first; rank <= last; rank++) {
    const at = top + rank * view.lane + size.strip;
    context.fillStyle = "rgb(" + IDLE.join() + ")";
    context.fillRect(xOf(0), at, one.makespan * perUnit(), size.bar);
    if (size.strip) {
      one.phases[rank].slice(0, 3).forEach((begin, k) => {
        context.fillStyle = page.phases[k];
        context.fillRect(xOf(begin), at - size.strip, (one.phases[rank][k + 1] - begin) * perUnit(), size.strip);
      });
    }
    if (size.curve) drawCurve(one, rank, at + size.bar, size.curve);
  }
  drawBars(one, first, last, top, size);
  if (view.path) drawPath(one, top, size);
  context.restore();
  drawLabels(one, y, top, first, last, size);
}

function drawLabels(one, y, top, first, last, size) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillStyle = "#222";
  const font = Math.max(7, Math.min(12, view.lane * 0.6)), every = Math.ceil((font + 1) / view.lane);
  context.font = font + "px sans-serif";
  for (let rank = first; rank <= last; rank++) {
    if (rank % every === 0) context.fillText("rank " + rank, LEFT - 7, top + rank * view.lane + size.strip + size.bar / 2);
  }
  context.textAlign = "left";
  context.fillStyle = "#fff";
  if (y > -HEAD) context.fillRect(0, y, view.width, HEAD - 3);
  context.fillStyle = "#111";
  context.font = "bold 13px sans-serif";
  const name = one.name.length > 48 ? one.name.slice(0, 47) + "…" : one.name;
  context.fillText(name, LEFT, y + HEAD / 2);
  const after = LEFT + context.measureText(name).width + 12;
  context.font = "12px sans-serif";
  context.fillText(one.figures, after, y + HEAD / 2);
}

// Few actions: a rectangle each, by colour. Many: colours summed over each pixel, a row of pixels for each half of a bar.
function drawBars(one, first, last, top, size) {
  const scale = perUnit(), dense = [], boxes = one.styles.map(() => []), words = [];
  for (let rank = first; rank <= last; rank++) {
    const [from, to] = visible(one, rank);
    if (to - from > 0.35 * view.width) { dense.push([rank, from, to]); continue; }
    const y = top + rank * view.lane + size.strip;
    for (let i = from; i < to; i++) {
      const half = one.partner[i] >= 0 ? size.bar / 2 : size.bar;
      const x = xOf(one.start[i]), width = (one.end[i] - one.start[i]) * scale;
      const at = one.second[i] ? y + half : y;
      boxes[one.style[i]].push(x, at, width, half);
      const left = Math.max(x, LEFT), seen = Math.min(x + width, view.width - RIGHT) - left;
      if (seen > 9 && half >= 9) words.push([i, left, at, seen, half]);
    }
  }
  boxes.forEach((list, style) => {
    context.fillStyle = one.styles[style].fill;
    for (let j = 0; j < list.length; j += 4) {
      const gap = list[j + 2] > 5 ? 0.8 : 0;
      context.fillRect(list[j], list[j + 1], Math.max(0.6, list[j + 2] - gap), list[j + 3] - (list[j + 3] < size.bar ? 0.5 : 0));
    }
    if (!one.styles[style].mirrored) return;
    context.fillStyle = "#fff";
    for (let j = 0; j < list.length; j += 4) {
      if (list[j + 3] < 5) continue;
      const thick = Math.max(0.6, 0.08 * list[j + 3]);
      context.fillRect(list[j], list[j + 1] + list[j + 3] - 2 * thick, Math.max(0.6, list[j + 2]), thick);
    }
  });
  drawWords(one, words);
  if (dense.length) drawDense(one, dense, top, size);
}

function visible(one, rank) {
  const from = one.offsets[rank], to = one.offsets[rank + 1];
  let low = Math.max(from, after(one.start, view.from, from, to) - 1);
  if (low > from && one.second[low]) low--;
  return [low, after(one.start, view.to, low, to)];
}

function drawWords(one, words) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const [i, x, y, width, height] of words) {
    const size = Math.min(12, height * 0.8), all = actionText(one, i), short = String(one.microbatch[i]);
    const text = width > all.length * size * 0.66 + 6 ? all : short;
    if (width < text.length * size * 0.62 + 3) continue;
    context.font = size + "px sans-serif";
    context.fillStyle = one.styles[one.style[i]].ink;
    context.fillText(text, x + width / 2, y + height / 2 + 0.5);
  }
}

function drawDense(one, dense, top, size) {
  const left = LEFT, count = Math.max(1, Math.round((view.width - LEFT - RIGHT) * view.dpr)), scale = perUnit() * view.dpr;
  const halves = one.pairs ? 2 : 1;
  strips.width = count;
  strips.height = dense.length * halves;
  const image = strips.getContext("2d").createImageData(count, strips.height), pixels = image.data;
  const sums = [0, 1].map(() => new Float32Array(4 * count));
  const end = Math.min(count, Math.max(0, (one.makespan - view.from) * scale)), begin = Math.max(0, -view.from * scale);
  dense.forEach(([rank, from, to], row) => {
    for (let h = 0; h < halves; h++) sums[h].fill(0);
    for (let i = from; i < to; i++) {
      const x0 = Math.max(0, (one.start[i] - view.from) * scale), x1 = Math.min(count, (one.end[i] - view.from) * scale);
      const rgb = one.styles[one.style[i]].rgb, pair = one.partner[i] >= 0;
      for (let h = 0; h < halves; h++) if (!pair || h === one.second[i]) spread(sums[h], x0, x1, rgb);
    }
    for (let h = 0; h < halves; h++) {
      let at = 4 * count * (row * halves + h);
      for (let x = 0; x < count; x++, at += 4) {
        const cover = Math.min(1, sums[h][4 * x + 3]), inside = x + 1 > begin && x < end;
        if (!inside && cover === 0) continue;
        for (let c = 0; c < 3; c++) pixels[at + c] = sums[h][4 * x + c] + (1 - cover) * IDLE[c];
        pixels[at + 3] = 255;
      }
    }
  });
  strips.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  dense.forEach(([rank], row) => {
    const y = top + rank * view.lane + size.strip;
    for (let h = 0; h < halves; h++) {
      context.drawImage(strips, 0, row * halves + h, count, 1, left, y + h * size.bar / 2, count / view.dpr, size.bar / halves);
    }
  });
}

// Add a colour to the pixels from x0 to x1, to each by how much of it is covered.
function spread(sums, x0, x1, rgb) {
  for (let x = Math.floor(x0); x < x1; x++) {
    const part = Math.min(x1, x + 1) - Math.max(x0, x);
    sums[4 * x] += part * rgb[0];
    sums[4 * x + 1] += part * rgb[1];
    sums[4 * x + 2] += part * rgb[2];
    sums[4 * x + 3] += part;
  }
}

// Steps of the curve within one pixel count as their highest.
function drawCurve(one, rank, y, height) {
  const curve = one.curves[rank], n = curve.time.length;
  if (!n || !one.most) return;
  const scale = (height - 1) / one.most, floor = y + height;
  let i = Math.max(0, after(curve.time, view.from, 0, n) - 1), last = floor, column = -Infinity, peak = 0;
  context.beginPath();
  context.moveTo(Math.max(LEFT - 2, xOf(curve.time[i])), floor);
  for (; i < n; i++) {
    const x = Math.max(LEFT - 2, xOf(curve.time[i]));
    if (x > view.width) break;
    const next = i + 1 < n ? xOf(curve.time[i + 1]) : x + 2;
    peak = Math.floor(x) === column ? Math.max(peak, curve.count[i]) : curve.count[i];
    column = Math.floor(x);
    if (Math.floor(next) === column && i + 1 < n) continue;
    context.lineTo(x, last);
    last = floor - peak * scale;
    context.lineTo(x, last);
  }
  context.lineTo(i < n ? view.width : xOf(curve.time[n - 1]), last);
  context.lineTo(i < n ? view.width : xOf(curve.time[n - 1]), floor);
  context.fillStyle = page.memory[0];
  context.fill();
  context.strokeStyle = page.memory[1];
  context.lineWidth = height > 9 ? 1 : 0.5;
  context.stroke();
}

function boxOf(one, i, top, size) {
  const half = one.partner[i] >= 0 ? size.bar / 2 : size.bar;
  const y = top + one.rank[i] * view.lane + size.strip + (one.second[i] ? half : 0);
  return { x: xOf(one.start[i]), y: y, width: (one.end[i] - one.start[i]) * perUnit(), height: half };
}

// A frame around neighbours, a line for each message to another rank; black on white to show on light and dark.
function drawPath(one, top, size) {
  const shapes = new Path2D();
  let last = null;
  const close = () => { if (last && last.x + last.width >= LEFT && last.x <= view.width) shapes.rect(last.x, last.y, last.width, last.height); };
  for (const i of one.path) {
    const box = boxOf(one, i, top, size);
    if (box.width <= 0) continue;
    if (last && last.y === box.y && last.height === box.height && Math.abs(last.x + last.width - box.x) < 1e-3) {
      last.width = box.x + box.width - last.x;
      continue;
    }
    close();
    if (last && Math.max(last.x + last.width, box.x) >= LEFT && last.x + last.width <= view.width) {
      shapes.moveTo(last.x + last.width, last.y + last.height / 2);
      shapes.lineTo(box.x, box.y + box.height / 2);
    }
    last = box;
  }
  close();
  const wide = size.bar > 16 ? 2 : 1.1;
  for (const [colour, width] of [["#fff", wide * 2], ["#000", wide]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke(shapes);
  }
}

function drawPointed() {
  const one = all[pointed.k], top = topOf(pointed.k) + HEAD, size = parts();
  context.fillStyle = "rgba(0,0,0,0.35)";
  context.fillRect(pointed.x, 0, 1, room());
  const i = pointed.i >= 0 ? pointed.i : pointed.next;
  if (i < 0) return;
  const box = boxOf(one, i, top, size), wait = waitOf(one, i);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, view.width - LEFT - RIGHT, room());
  context.clip();
  context.lineWidth = 2;
  context.strokeStyle = "#e8b400";
  context.strokeRect(box.x, box.y, box.width, box.height);
  if (wait.idle && wait.cause >= 0) {
    const cause = boxOf(one, wait.cause, top, size);
    context.strokeRect(cause.x, cause.y, cause.width, cause.height);
    context.beginPath();
    context.moveTo(cause.x + cause.width, cause.y + cause.height / 2);
    context.lineTo(box.x, box.y + box.height / 2);
    context.stroke();
  }
  context.restore();
}
