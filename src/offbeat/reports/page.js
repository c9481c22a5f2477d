'use strict';
// Shows the values of a chart under the pointer, or with the arrow keys. On a live page it also asks for news.
// Text reaches the page by textContent only.

const WIDTH = 400, TOP = 14, BOTTOM = 176, MILLISECONDS = 2000;
const charts = new WeakMap();

function short(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function place([low, high, start, end], value) {
  return start + (value - low) / (high - low) * (end - start);
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

function element(name, classes, parent, text = '') {
  const one = document.createElement(name);
  one.className = classes;
  one.textContent = text;
  parent.append(one);
  return one;
}

function draw(svg, name, attributes) {
  const one = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  svg.append(one);
}

function load(chart) {
  if (!charts.has(chart)) {
    const plot = JSON.parse(chart.dataset.plot);
    const steps = [...new Set(plot.series.flatMap(one => one.x ?? []))].sort((a, b) => a - b);
    charts.set(chart, {plot, steps, at: -1});
  }
  return charts.get(chart);
}

function hide(chart) {
  chart.querySelectorAll('.cursor').forEach(one => one.remove());
  chart.querySelector('.readout').hidden = true;
}

// Shows the values at one of the chart's steps: a line, a point on each curve, and the numbers.
function select(chart, index) {
  const state = load(chart), {plot, steps} = state, svg = chart.querySelector('svg');
  const readout = chart.querySelector('.readout');
  hide(chart);
  state.at = Math.min(Math.max(index, 0), steps.length - 1);
  const step = steps[state.at], x = place(plot.x, step), reach = (plot.x[1] - plot.x[0]) / 50;
  draw(svg, 'path', {class: 'cursor', d: `M${x} ${TOP}V${BOTTOM}`});
  readout.textContent = '';
  const each = Math.max(...plot.series.map(one => one.each));
  element('b', '', readout, `${plot.name} ${short(step)}` + (each > 1 ? `, mean of ${each}` : ''));
  for (const one of plot.series) {
    if (!one.x) continue;
    const i = nearest(one.x, step);
    if (Math.abs(one.x[i] - step) > reach) continue;
    const line = element('span', '', readout);
    element('span', one.key, line);
    line.append(`${one.name} ${short(one.y[i])}`);
    if (one.low) line.append(` [${short(one.low[i])}, ${short(one.high[i])}]`);
    const y = Math.min(Math.max(place(plot.y, one.y[i]), TOP), BOTTOM);
    if (!/ s\d/.test(one.key)) draw(svg, 'circle', {class: `cursor ${one.key.match(/c\d/)}`, cx: x, cy: y, r: 3.5});
  }
  readout.classList.toggle('right', x < WIDTH / 2);
  readout.hidden = false;
}

const chartOf = event => event.target instanceof Element && event.target.closest('.chart');

for (const kind of ['pointermove', 'pointerdown']) {
  document.addEventListener(kind, event => {
    const chart = chartOf(event);
    document.querySelectorAll('.chart').forEach(one => { if (one !== chart && one !== document.activeElement) hide(one); });
    if (!chart) return;
    const box = chart.querySelector('svg').getBoundingClientRect(), {plot, steps} = load(chart);
    const at = (event.clientX - box.left) / box.width * WIDTH, [low, high, start, end] = plot.x;
    select(chart, nearest(steps, low + (at - start) / (end - start) * (high - low)));
  });
}
document.addEventListener('pointerleave', () => document.querySelectorAll('.chart').forEach(hide));
document.addEventListener('focusin', event => {
  const chart = chartOf(event);
  if (chart && chart.matches(':focus-visible')) select(chart, load(chart).steps.length - 1);
});
document.addEventListener('focusout', event => { const chart = chartOf(event); if (chart) hide(chart); });
document.addEventListener('keydown', event => {
  const chart = chartOf(event);
  if (!chart || event.altKey || event.ctrlKey || event.metaKey) return;
  const {at, steps} = load(chart), far = event.shiftKey ? 10 : 1;
  const to = {ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: steps.length - 1}[event.key];
  if (event.key === 'Escape') hide(chart);
  if (to === undefined) return;
  event.preventDefault();
  select(chart, to);
});

// Without this script a chart has nothing to focus on.
function prepare() {
  document.querySelectorAll('.chart').forEach(one => { one.tabIndex = 0; });
}

// Replaces the page's content, and keeps what the reader has opened and selected.
function replace(main, html) {
  const all = () => [...main.querySelectorAll('.chart')], details = () => [...main.querySelectorAll('details')];
  const opened = details().map(one => one.open), focused = all().indexOf(document.activeElement);
  const shown = all().map(one => one.querySelector('.readout').hidden ? -1 : load(one).at);
  main.innerHTML = html;
  prepare();
  details().forEach((one, i) => { one.open = Boolean(opened[i]); });
  const found = all();
  if (found[focused]) found[focused].focus({preventScroll: true});
  found.forEach((one, i) => { if (shown[i] >= 0) select(one, shown[i]); });
}

async function follow(main) {
  const status = document.getElementById('live');
  let seen = main.dataset.seen;
  try {
    for (;;) {
      const answer = await fetch(main.dataset.live, {headers: {'If-None-Match': seen}, cache: 'no-store'});
      if (answer.status === 200) {
        replace(main, await answer.text());
        seen = answer.headers.get('ETag');
        status.textContent = `Live: updated at ${new Date().toLocaleTimeString()}.`;
      } else if (answer.status !== 304) {
        status.textContent = `The report could not be made: ${await answer.text()}`;
      }
      await new Promise(done => setTimeout(done, MILLISECONDS));
    }
  } catch {
    status.textContent = 'No longer updated: offbeat report has ended.';
  }
}

prepare();
const main = document.querySelector('main[data-live]');
if (main) follow(main);
