// Curves over the run's steps, drawn by uPlot: one cursor for all of them, and a click chooses a step to read.
'use strict';

(() => {
  const { make, fine, number, isNumber, button } = window.slipway;
  const HEIGHT = 190;
  const SYNC = uPlot.sync('steps');
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
  const NEAR_PIXELS = 9;  // of a flag, for a click to mean it
  const NOISE = 1e-6;  // what is smaller comes of rounding and reads as 0, unless a chart says otherwise
  const SPAN_OF_NOISE = 0.01;  // from 0, of the axis where there is nothing else
  const OLD_WEIGHT = 0.8;
  const SMOOTHED = `smoothed (EMA ${OLD_WEIGHT})`;
  const charts = new Map();
  let onStep = () => {};
  let onFlag = () => {};

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const seriesColour = (at) => colour(`series-${at % 7}`);

  // A chart's figure: spec = {key, title, files, note, xs, lines, flags, low, high, noise, empty, remove}; a
  // line is {name, values, colour, kind: 'line' | 'faint' | 'marks', errors}, a flag {x, name}. `files`: the
  // names that the figures have in the run's files. `remove` is called by a button. Without a figure and
  // without `empty` there is no chart.
  function draw(host, spec, span) {
    const chart = charts.get(spec.key) ?? begin(host, spec);
    chart.spec = spec;
    chart.span = span;
    chart.flags = spec.flags ?? [];
    chart.note.textContent = spec.note ?? '';
    chart.files.textContent = spec.files ?? '';
    const lines = spec.lines.filter((line) => line.values.some(isNumber));
    chart.figure.hidden = !lines.length && !spec.empty;
    chart.nothing.hidden = lines.length > 0;
    chart.nothing.textContent = spec.empty ?? '';
    const form = JSON.stringify(lines.map(({ name, colour: it, kind }) => [name, it, kind]));
    if (form !== chart.form || !chart.plot) {
      chart.form = form;
      chart.plot?.destroy();
      chart.plot = lines.length ? plotOf(chart, lines) : null;
    } else {
      chart.lines = lines;
      chart.plot.setData([spec.xs, ...lines.map((line) => line.values)]);
    }
  }

  function begin(host, spec) {
    const [note, files] = [make('span', 'note'), make('code', 'files')];
    const remove = spec.remove ? button('×', spec.remove, 'quiet remove', { 'aria-label': `remove ${spec.title}`, title: 'remove' }) : null;
    const title = make('figcaption', '', [make('h2', '', spec.title), note, files, remove]);
    const canvas = make('div', 'canvas');
    const nothing = make('p', 'empty', '');
    const figure = make('figure', 'panel chart', [title, canvas, nothing], { 'data-chart': spec.key });
    host.append(figure);
    const chart = { figure, note, files, canvas, nothing, plot: null, form: null, flags: [] };
    charts.set(spec.key, chart);
    new ResizeObserver(() => chart.plot?.setSize({ width: canvas.clientWidth, height: HEIGHT })).observe(canvas);
    return chart;
  }

  function plotOf(chart, lines) {
    chart.lines = lines;
    const axis = { stroke: colour('muted'), font: '12px system-ui, sans-serif', ticks: { show: false } };
    const grid = { stroke: colour('line'), width: 1 };
    const { xs, low, high, digits = 2, noise = NOISE } = chart.spec;
    const whole = digits === 0;
    const plot = new uPlot({
      width: chart.canvas.clientWidth || 300,
      height: HEIGHT,
      padding: [10, 12, 0, 0],
      scales: {
        x: { time: false, range: () => chart.span },
        y: { range: (_, least, most) => around(...withErrors(chart.lines, least, most), low, high, noise) },
      },
      axes: [
        { ...axis, grid: { show: false }, incrs: WHOLE, space: 48, size: 28, gap: 6 },
        { ...axis, grid, size: 54, gap: 8, space: 36, ...(whole ? { incrs: WHOLE } : {}), values: (_, at) => at.map((it) => tick(it, at)) },
      ],
      cursor: { sync: { key: SYNC.key, scales: ['x', null] }, drag: { x: false, y: false }, points: { size: 7 } },
      legend: { show: true, live: true, markers: { width: 2 } },
      series: [
        { label: 'step', value: (_, it) => (it === null ? '–' : String(it)) },
        ...lines.map((line) => seriesOf(line, digits, noise)),
      ],
      hooks: {
        draw: [(it) => drawErrors(it, chart.lines), (it) => drawFlags(it, chart.flags)],
        setLegend: [showNewest], setData: [showNewest],
      },
    }, [xs, ...lines.map((line) => line.values)], chart.canvas);
    plot.over.addEventListener('click', () => {
      const away = (it) => Math.abs(plot.valToPos(it.x, 'x') - plot.cursor.left);
      const [near] = [...chart.flags].sort((a, b) => away(a) - away(b));
      if (near && away(near) < NEAR_PIXELS) return onFlag(near);
      const step = plot.data[0][plot.cursor.idx];
      if (isNumber(step) && !chart.spec.still) onStep(step, chart.spec.key);
    });
    showNewest(plot);
    return plot;
  }

  // Where no cursor is, the legend says the values of the last step.
  function showNewest(plot) {
    const last = plot.data[0].length - 1;
    const pointed = isNumber(plot.cursor.left) && plot.cursor.left >= 0;
    const same = plot.data.every((_, at) => plot.legend.idxs?.[at] === last);
    if (!pointed && last >= 0 && !same) plot.setLegend({ idxs: plot.data.map(() => last) });
  }

  function seriesOf(line, digits, noise) {
    const stroke = seriesColour(line.colour ?? 0);
    const faint = line.kind === 'faint';
    return {
      label: line.name,
      stroke: faint ? `${stroke}59` : stroke,
      width: faint ? 1.25 : 2,
      spanGaps: line.kind === 'marks',
      points: line.kind === 'marks' ? { show: true, size: 6, fill: stroke } : { show: false, size: 5, fill: stroke, filter: alone },
      value: (_, it) => (it === null || it === undefined ? '–' : Math.abs(it) < noise ? '0' : fine(it, digits)),
    };
  }

  // A value between two that are not known has no line: it is a point.
  function alone(plot, at) {
    const values = plot.data[at];
    const found = values.flatMap((it, place) => (isNumber(it) && !isNumber(values[place - 1]) && !isNumber(values[place + 1]) ? [place] : []));
    return found.length ? found : null;
  }

  // One standard error to each side of a mark.
  function drawErrors(plot, lines) {
    lines.forEach((line, at) => {
      if (!line.errors) return;
      const pen = plot.ctx;
      pen.save();
      pen.strokeStyle = seriesColour(line.colour ?? 0);
      pen.lineWidth = devicePixelRatio;
      pen.beginPath();
      line.values.forEach((value, index) => {
        const error = line.errors[index];
        if (!isNumber(value) || !isNumber(error)) return;
        const x = plot.valToPos(plot.data[0][index], 'x', true);
        pen.moveTo(x, plot.valToPos(value - error, 'y', true));
        pen.lineTo(x, plot.valToPos(value + error, 'y', true));
      });
      pen.stroke();
      pen.restore();
    });
  }

  // A flag at the top of a dashed line, for each alarm.
  function drawFlags(plot, flags) {
    const pen = plot.ctx;
    const { left, top, height, width } = plot.bbox;
    pen.save();
    pen.strokeStyle = pen.fillStyle = colour('poor');
    pen.lineWidth = devicePixelRatio;
    for (const { x } of flags) {
      const at = plot.valToPos(x, 'x', true);
      if (at < left - 1 || at > left + width + 1) continue;
      const size = 9 * devicePixelRatio;
      pen.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      pen.beginPath();
      pen.moveTo(at, top);
      pen.lineTo(at, top + height);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(at, top);
      pen.lineTo(at + size, top + size / 2);
      pen.lineTo(at, top + size);
      pen.fill();
    }
    pen.restore();
  }

  // What an axis must hold: the values, and their errors where they have some.
  function withErrors(lines, least, most) {
    const ends = lines.flatMap(({ values, errors }) => (errors ?? []).flatMap((error, at) => (
      isNumber(error) && isNumber(values[at]) ? [values[at] - error, values[at] + error] : []
    )));
    return ends.length ? [Math.min(least, ...ends), Math.max(most, ...ends)] : [least, most];
  }

  function around(least, most, low, high, noise) {
    let [from, to] = [least ?? 0, most ?? 1];
    if (Math.max(Math.abs(from), Math.abs(to)) < noise) return [isNumber(low) ? 0 : -SPAN_OF_NOISE, SPAN_OF_NOISE];
    const around = Math.abs(from) * 0.1 || 0.05;
    if (from === to) [from, to] = [from - around, to + around];
    const air = 0.08 * (to - from);
    from = isNumber(low) && least >= low ? Math.min(low, from) : from - air;
    to = isNumber(high) && most <= high ? Math.max(high, to) : to + air;
    return [from, to];
  }

  function tick(value, all) {
    const largest = Math.max(...all.map(Math.abs));
    if (largest < 0.01) return value === 0 ? '0' : value.toExponential(1).replace('.0e', 'e');
    if (largest >= 10000) return `${number(value / 1000, 0)}k`;
    let digits = 0;  // as few as tell all of them
    while (digits < 6 && all.some((it) => Math.abs(it - Number(it.toFixed(digits))) > 1e-9 * largest)) digits += 1;
    return value.toFixed(digits);
  }

  // Another theme has other colours, and a canvas does not change by itself.
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    for (const chart of charts.values()) {
      chart.form = null;
      if (chart.spec) draw(null, chart.spec, chart.span);
    }
  });

  // The exponential moving average with its bias corrected; a missing value is missing in it and changes
  // nothing.
  function smooth(values) {
    let [mean, known] = [0, 0];
    return values.map((value) => {
      if (!isNumber(value)) return null;
      mean = OLD_WEIGHT * mean + (1 - OLD_WEIGHT) * value;
      known += 1;
      return mean / (1 - OLD_WEIGHT ** known);
    });
  }

  Object.assign(window.slipway, {
    draw,
    smooth,
    SMOOTHED,
    whenStepChosen: (call) => { onStep = call; },
    whenFlagChosen: (call) => { onFlag = call; },
    // Forget the charts whose keys begin so: their elements are gone.
    forget: (beginning) => {
      for (const [key, chart] of charts) {
        if (!key.startsWith(beginning)) continue;
        chart.plot?.destroy();
        chart.figure.remove();
        charts.delete(key);
      }
    },
  });
})();
