// All runs: an index to choose from, and any figure of several runs in one chart, with their settings.
'use strict';

(() => {
  const {
    make, isNumber, number, count, duration, money, time, plural, table, empty, button, choice, fill, changed, field, checkbox, address, link, kept, load, draw, smooth, SMOOTHED, forget, charts, NONE,
  } = window.slipway;
  const SCORE = 'val/score';
  const FIRST = ['reward', SCORE, 'length', 'entropy', 'kl_behaviour', 'parse_rate'];
  const FIGURES = 'figures';  // in an address: the runs before it, the chosen figures behind it
  const MOST_RUNS = 7;
  const state = { runs: [], turn: 0, inReport: false, chosen: new Set(), filter: '', sort: ['begun', -1], compared: [], data: new Map(), figures: [], differing: true };
  const parts = {};
  const COLUMNS = [
    ['', 0, () => null], ['run', 0, (it) => it.label], ['model', 0, (it) => it.model], ['where', 0, (it) => it.where], ['state', 0, (it) => stateOf(it)],
    ['begun', 0, (it) => it.begun], ['took', 1, (it) => it.seconds], ['cost', 1, (it) => it.cost], ['steps', 1, (it) => it.steps],
    ['reward', 0, (it) => it.reward?.[1]], ['held out', 0, (it) => it.validation?.after?.[0]], ['alarms', 0, (it) => it.alarms.length],
  ];

  function begin() {
    parts.compare = button('compare', () => { location.hash = address('compare', ...state.chosen); });
    parts.hint = make('span', 'muted');
    document.getElementById('runs-controls').append(field('name, model, command …', (text) => { state.filter = text.toLowerCase(); index(); }), parts.hint, parts.compare);
    offerCompare();
    parts.figure = choice('a figure more', [], (name) => { if (name) showFigures([...state.figures, name]); });
    const differing = checkbox('differences alone', true, (on) => { state.differing = on; settings(); });
    document.getElementById('compare-controls').append(parts.figure);
    document.getElementById('differences').before(differing.label);
  }

  function update(runs, inReport) {
    Object.assign(state, { runs, inReport });
  }

  const stateOf = (it) => (it.live ? `live · ${it.state}` : it.reason ? it.reason : it.state === 'verified' ? 'ended' : it.state);

  // ------------------------------------------------------------- index

  function index() {
    const host = document.getElementById('runs');
    const of = (it) => [it.label, it.id, it.model, it.where, it.command, stateOf(it)].join(' ').toLowerCase();
    const [name, way] = state.sort;
    const value = COLUMNS.find(([column]) => column === name)[2];
    const found = state.runs.filter((it) => of(it).includes(state.filter)).sort((a, b) => {
      const [one, other] = [value(a) ?? -Infinity, value(b) ?? -Infinity];
      return way * (one < other ? -1 : one > other ? 1 : 0);
    });
    if (!changed(host, [found, state.sort, [...state.chosen]])) return;
    if (!found.length) return host.replaceChildren(empty(state.runs.length ? 'No run is like that.' : 'There is no run yet.'));
    const shown = table(COLUMNS.map(([column, right]) => [column, right]), found.map(rowOf), 'runs');
    shown.querySelectorAll('th').forEach((head, at) => {
      const [column] = COLUMNS[at];
      if (!column) return;
      const mark = column === name ? (way < 0 ? ' ↓' : ' ↑') : '';
      if (mark) head.setAttribute('aria-sort', way < 0 ? 'descending' : 'ascending');
      head.replaceChildren(button(`${column}${mark}`, () => {
        state.sort = [column, column === name ? -way : -1];
        index();
      }, 'head'));
    });
    host.replaceChildren(make('p', 'muted summary', `${plural(found.length, 'run')} ${state.inReport ? 'in this report' : 'on this computer'}`), shown);
  }

  function offerCompare() {
    const many = state.chosen.size;
    const hint = many < 2 ? 'tick two runs' : many > MOST_RUNS ? `at most ${MOST_RUNS}` : '';
    parts.compare.disabled = hint !== '';
    parts.compare.title = parts.hint.textContent = hint;
  }

  function rowOf(it) {
    const { box } = checkbox('', state.chosen.has(it.id), (on) => {
      if (on) state.chosen.add(it.id);
      else state.chosen.delete(it.id);
      offerCompare();
    });
    box.setAttribute('aria-label', `compare ${it.label}`);
    const name = link(it.label, it.id, 'overview');
    name.title = `${it.id} · ${it.command}`;
    return [
      box, name, it.model, it.where, stateOf(it), time(it.begun), duration(it.seconds), money(it.cost), stepsOf(it),
      it.reward ? `${number(it.reward[0])} → ${number(it.reward[1])}` : NONE, scores(it.validation), alarmsOf(it),
    ];
  }

  const stepsOf = (it) => `${count(it.steps)}${it.empty ? ` + ${count(it.empty)} empty` : ''}`;

  const alarmsOf = (it) => (it.alarms.length ? make('span', 'trouble', it.alarms.join(', ')) : it.live ? 'none yet' : 'none');

  const withError = ([score, error]) => (isNumber(error) ? `${number(score)} ±${number(error)}` : number(score));

  const scores = (it) => (it ? `${number(it.before[0])} → ${withError(it.after)}` : NONE);

  // ------------------------------------------------------------- beside each other

  // The runs' names, and the chosen figures where the address says some.
  async function compare(rest) {
    const turn = ++state.turn;
    const end = rest.indexOf(FIGURES);
    const ids = end < 0 ? rest : rest.slice(0, end);
    const known = ids.filter((id) => state.runs.some((it) => it.id === id)).slice(0, MOST_RUNS);
    for (const id of known) {
      const { revision } = kept ? {} : await load(`${id}/run`);
      if (!state.data.has(id) || (!kept && state.data.get(id).revision !== revision)) state.data.set(id, await load(`${id}/steps`));
      if (turn !== state.turn) return;
    }
    const before = [state.compared.map((it) => it.id), state.figures];
    state.compared = known.map((id) => state.runs.find((it) => it.id === id));
    state.figures = end < 0 ? firstFigures() : rest.slice(end + 1);
    if (JSON.stringify(before) !== JSON.stringify([known, state.figures])) forget('compare ');
    offerFigures();
    const host = document.getElementById('compare-scores');
    overlay();
    settings();
    if (!changed(host, state.compared)) return;
    const rows = state.compared.map((it, at) => [
      make('span', `series series-${at}`, '●'), link(it.label, it.id, 'overview'), it.model, stepsOf(it), duration(it.seconds), money(it.cost),
      it.reward ? `${number(it.reward[0])} → ${number(it.reward[1])}` : NONE, scores(it.validation), it.validation ? withError(it.validation.best) : NONE,
      alarmsOf(it),
    ]);
    const head = [['', 0], ['run', 0], ['model', 0], ['steps', 1], ['took', 1], ['cost', 1], ['reward', 0], ['held out', 0], ['best', 0], ['alarms', 0]];
    host.replaceChildren(known.length ? table(head, rows) : empty('Choose some runs first.'));
  }

  const dataOf = (run) => state.data.get(run.id);

  // Whether a run has the figure.
  const isThere = (name) => state.compared.some((run) => (
    name === SCORE ? dataOf(run).validations.some((it) => it.name === 'score') : charts.isMeasured(dataOf(run), name)
  ));

  // A score that may still come is the last one.
  function firstFigures() {
    const waits = !isThere(SCORE) && state.compared.some((run) => run.live);
    return [...FIRST.filter(isThere), ...(waits ? [SCORE] : [])];
  }

  function offerFigures() {
    const names = new Set([SCORE, ...state.compared.flatMap((run) => Object.keys(dataOf(run).columns))]);
    const more = [...names].filter((it) => isThere(it) && !state.figures.includes(it)).sort();
    fill(parts.figure, [['', 'a figure more …'], ...more.map((it) => [it, it])], '');
  }

  // By the address, so that it can be shared.
  function showFigures(names) {
    location.hash = address('compare', ...state.compared.map((it) => it.id), FIGURES, ...names);
  }

  function overlay() {
    const host = document.getElementById('compare-charts');
    for (const name of state.figures) {
      const each = state.compared.map((run) => seriesOf(dataOf(run), name));
      const xs = [...new Set(each.flatMap((it) => it.xs))].sort((a, b) => a - b);
      const lines = each.map(({ xs: own, values, errors }, colour) => {
        const at = new Map(own.map((x, place) => [x, place]));
        const on = (list) => xs.map((x) => (at.has(x) ? list[at.get(x)] ?? null : null));
        return { name: state.compared[colour].label, colour, kind: name === SCORE ? 'marks' : 'line', values: on(values), ...(errors ? { errors: on(errors) } : {}) };
      });
      const span = xs.length ? [xs[0], Math.max(xs.at(-1), xs[0] + 1)] : [0, 1];
      draw(host, {
        key: `compare ${name}`, title: name === SCORE ? 'Validation' : name, files: name, note: name === 'reward' ? SMOOTHED : '', xs, lines, digits: 4, still: true,
        ...(name === 'learning_rate' ? { noise: 0 } : {}), empty: 'None of them has it.', remove: () => showFigures(state.figures.filter((it) => it !== name)),
      }, span);
    }
  }

  function seriesOf(data, name) {
    if (name !== SCORE) {
      const values = data.columns[name] ?? data.steps.map(() => null);
      return { xs: data.steps, values: name === 'reward' ? smooth(values) : values };
    }
    const newest = data.validations.filter((it) => it.name === 'score').at(-1)?.compile;
    const { xs, lines } = charts.validations({ validations: data.validations.filter((it) => it.name === 'score' && it.compile === newest) });
    return { xs, values: lines[0]?.values ?? [], errors: lines[0]?.errors };
  }

  // Every setting; where the runs differ, it is marked.
  function settings() {
    const names = [...new Set(state.compared.flatMap((it) => Object.keys(it.settings)))];
    const written = (it, name) => (it.settings[name] === undefined ? NONE : JSON.stringify(it.settings[name]));
    const own = [['command', (it) => it.command], ['model', (it) => it.model], ['where', (it) => it.where], ...names.filter((it) => it !== 'model').map((name) => [name, (it) => written(it, name)])];
    const rows = own.map(([name, of]) => [name, state.compared.map(of)]).map(([name, values]) => ({ name, values, differs: new Set(values).size > 1 }));
    const shown = state.differing ? rows.filter((it) => it.differs) : rows;
    const host = document.getElementById('differences');
    if (!changed(host, [shown, state.compared.map((it) => it.label)])) return;
    if (!shown.length) return host.replaceChildren(empty('Their settings are the same.'));
    const body = table([['setting', 0], ...state.compared.map((it) => [it.label, 0])], shown.map((it) => [it.name, ...it.values]), 'settings');
    body.querySelectorAll('tbody tr').forEach((row, at) => { row.classList.toggle('differs', shown[at].differs); });
    host.replaceChildren(body);
  }

  Object.assign(window.slipway, { runs: { begin, update, index, compare } });
})();
