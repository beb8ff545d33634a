// Small charts on canvases, in the colours of the page.

const dpr = () => Math.min(2, devicePixelRatio || 1);

export function colour(name) {
  // Read from a temporary element, because custom properties hold light-dark() unresolved.
  colour.probe ??= document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
  colour.probe.style.color = `var(--${name})`;
  return getComputedStyle(colour.probe).color;
}

export function start(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, scale = dpr();
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return { ctx, width, height };
}

// A round number of at least `most`, for the top of an axis.
export function ceiling(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((each) => each * power).find((each) => each >= most * 0.999);
}

export const short = (value) => value >= 1e6 ? `${+(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${+(value / 1e3).toFixed(0)}k`
  : value >= 1e3 ? `${+(value / 1e3).toFixed(1)}k` : value >= 10 ? value.toFixed(0) : `${+value.toFixed(1)}`;

export const duration = (seconds) => seconds < 0.0095 ? `${+(1e3 * seconds).toFixed(1)} ms`
  : seconds < 0.95 ? `${(1e3 * seconds).toFixed(0)} ms` : `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;

// One line with its area, newest at the right.
export function spark(canvas, values, name, top = 0) {
  const { ctx, width, height } = start(canvas);
  const most = Math.max(top, ...values, 1e-9);
  const x = (index) => (index / (values.length - 1)) * width;
  const y = (value) => height - 1.5 - (value / most) * (height - 4);
  ctx.beginPath();
  values.forEach((value, index) => ctx.lineTo(x(index), y(value)));
  ctx.strokeStyle = colour(name);
  ctx.lineWidth = 1.6;
  ctx.lineJoin = "round";
  ctx.stroke();
  ctx.lineTo(width, height);
  ctx.lineTo(0, height);
  ctx.globalAlpha = 0.14;
  ctx.fillStyle = colour(name);
  ctx.fill();
  ctx.globalAlpha = 1;
}

// Stacked bars over the last minute; `bins` oldest first, each a list of one value per name.
export function stack(canvas, bins, names, unit) {
  const { ctx, width, height } = start(canvas);
  const left = 38, bottom = height - 18, top = 6;
  const most = ceiling(Math.max(...bins.map((bin) => bin.reduce((sum, each) => sum + each, 0))));
  axis(ctx, left, width, top, bottom, most, (value) => short(value));
  const wide = (width - left) / bins.length;
  bins.forEach((bin, index) => {
    let y = bottom;
    bin.forEach((value, which) => {
      const high = (value / most) * (bottom - top);
      ctx.fillStyle = colour(names[which]);
      ctx.fillRect(left + index * wide, y - high, Math.max(1, wide - 1), high);
      y -= high;
    });
  });
  ctx.fillStyle = colour("soft");
  ctx.textAlign = "left";
  ctx.fillText("60 s ago", left, height - 4);
  ctx.textAlign = "right";
  ctx.fillText("now", width, height - 4);
  ctx.fillText(unit, width, top + 9);
}

function axis(ctx, left, width, top, bottom, most, text) {
  ctx.fillStyle = colour("soft");
  ctx.strokeStyle = colour("line");
  ctx.lineWidth = 1;
  ctx.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(bottom - share * (bottom - top)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(width, y);
    ctx.stroke();
    ctx.fillText(text(share * most), left - 6, y + 4);
  }
}

// Shares per range of time on a logarithmic axis: `now` as bars, `ever` as a line of steps.
export function histogram(canvas, bounds, now, ever) {
  const { ctx, width, height } = start(canvas);
  const total = (counts) => counts.reduce((sum, each) => sum + each, 0);
  const used = [...now.keys()].filter((index) => now[index] || ever[index]);
  if (!used.length) return none(ctx, width, height);
  const from = Math.max(0, used[0] - 1), to = Math.min(now.length - 1, used.at(-1) + 1);
  const shares = (counts) => counts.slice(from, to + 1).map((each) => each / (total(counts) || 1));
  const recent = shares(now), all = shares(ever);
  const bottom = height - 18, top = 8, wide = width / recent.length;
  const most = Math.max(...recent, ...all);
  const y = (share) => bottom - (share / most) * (bottom - top);
  ctx.fillStyle = colour("pad");
  all.forEach((share, index) => ctx.fillRect(index * wide + 1, y(share), wide - 2, bottom - y(share)));
  ctx.fillStyle = colour("decode");
  recent.forEach((share, index) => ctx.fillRect(index * wide + wide * 0.22, y(share), wide * 0.56, bottom - y(share)));
  ctx.fillStyle = colour("soft");
  ctx.textAlign = "center";
  const every = Math.ceil((recent.length * 44) / width);
  recent.forEach((_, index) => {
    const bound = bounds[from + index];
    if (index % every === 0 && bound !== undefined && index < recent.length - 1) ctx.fillText(duration(bound), Math.min(width - 18, (index + 1) * wide), height - 4);
  });
  ctx.fillStyle = colour("line");
  ctx.fillRect(0, bottom, width, 1);
}

function none(ctx, width, height) {
  ctx.fillStyle = colour("soft");
  ctx.textAlign = "center";
  ctx.fillText("nothing yet", width / 2, height / 2);
}

// A square for each page; `states` are 0 free, 1 cached, 2 held, 3 shared.
export function cells(canvas, states) {
  const { ctx, width, height } = start(canvas);
  let size = Math.floor(Math.sqrt((width * height) / states.length));
  while (size > 2 && Math.floor(width / size) * Math.floor(height / size) < states.length) size--;
  const columns = Math.floor(width / size), gap = size > 5 ? 1 : size > 3 ? 0.5 : 0;
  const colours = [colour("line"), colour("cached"), colour("decode"), colour("shared")];
  for (const state of [0, 1, 2, 3]) {
    ctx.fillStyle = colours[state];
    states.forEach((each, index) => {
      if (each !== state) return;
      const x = (index % columns) * size, y = Math.floor(index / columns) * size;
      if (state) ctx.fillRect(x, y, size - gap, size - gap);
      else ctx.fillRect(x + size * 0.25, y + size * 0.25, size * 0.5 - gap, size * 0.5 - gap);
    });
  }
}

// The value below which the given share of the (not cumulative) counts lies; null without counts.
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  let seen = 0;
  for (let index = 0; index < counts.length; index++) {
    const before = seen;
    seen += counts[index];
    if (seen >= share * total) {
      const low = index ? bounds[index - 1] : 0, high = bounds[index] ?? low;
      return low + (high - low) * ((share * total - before) / counts[index]);
    }
  }
  return bounds.at(-1);
}
