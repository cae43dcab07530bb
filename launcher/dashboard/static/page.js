// The page: asks for the run's head every two seconds, for its steps when they have changed, and shows both.
'use strict';

(() => {
  const { kept, load, draw, smooth, completions, tables, isNumber, duration, plural, time } = window.slipway;
  const EVERY_MS = 2000;
  const MORE_MS = 300;
  const MOST_PREDICTORS = 6;
  let data = null;
  let next = null;  // when it looks again; null while it looks, so that it never looks twice at a time

  async function look() {
    clearTimeout(next);
    next = null;
    let pause = EVERY_MS;
    try {
      const head = await load('run');
      if (data === null || data.more || data.revision !== head.revision) {
        data = await load('steps');
        drawAll(data);
        tables.dropped(data.steps);
        tables.proofs(data.proofs);
        completions.update(data.steps, data.revision);
        if (data.more) pause = MORE_MS;
      }
      showHead(head);
      notice(null);
    } catch (error) {
      notice(error.closed
        ? 'This page needs a new link: type launch open in a terminal.'
        : `The endpoint does not answer; what is here is from before. Is the run over? Then launch open shows what is kept. (${error.message})`);
    }
    if (!kept) next = setTimeout(look, document.hidden ? 5 * pause : pause);
  }

  function notice(text) {
    const host = document.getElementById('notice');
    host.hidden = text === null;
    host.textContent = text ?? '';
  }

  function showHead(head) {
    const { run } = head;
    const state = run.live ? head.runtime?.phase ?? run.state : run.down?.verified ? 'ended' : run.state;
    const pill = document.getElementById('state');
    pill.hidden = false;
    pill.textContent = run.live ? `live · ${state}` : state;
    pill.className = `pill ${!run.live ? '' : state === 'ready' || state === 'work' ? 'good' : 'busy'}`;
    document.title = `${run.label} · Slipway`;
    document.getElementById('label').textContent = run.label;
    const since = run.live ? `${duration(run.seconds)} so far` : `${duration(run.seconds)}, ended ${time(run.ended)}`;
    document.getElementById('about').textContent = [
      run.label === run.id ? null : run.id, run.model, run.where, since, run.command || 'the endpoint alone',
    ].filter(Boolean).join(' · ');
    document.getElementById('footer').textContent = kept
      ? `Kept on ${time(head.now)}. Everything here is in this folder; nothing is asked for from elsewhere.`
      : 'Everything here comes from the run\'s own endpoint on this computer; nothing is asked for from elsewhere.';
    tables.tiles(head, data);
    tables.machine(head);
  }

  function drawAll({ steps, validations }) {
    const host = document.getElementById('charts');
    const xs = steps.map((it) => it.step);
    const of = (name) => steps.map((it) => it[name]);
    const ends = [...xs, ...validations.map((it) => it.version)];
    const span = ends.length ? [Math.min(...ends), Math.max(...ends, Math.min(...ends) + 1)] : [0, 1];
    const chart = (spec) => draw(host, { xs, ...spec }, span);
    chart({ key: 'reward', title: 'Reward', note: rewardNote(steps), lines: rewards(steps), empty: 'No step was rewarded yet.', digits: 3 });
    drawValidations(host, validations, span);
    chart({
      key: 'trained', title: 'Samples of a step', low: 0, digits: 0, empty: 'No step was trained yet.',
      lines: [
        { name: 'sampled', values: of('samples'), colour: 6, kind: 'faint' },
        { name: 'trained', values: of('trained'), colour: 0 },
        { name: 'left out', values: steps.map((it) => Object.values(it.dropped).reduce((sum, one) => sum + one, 0)), colour: 1 },
      ],
    });
    chart({
      key: 'speed', title: 'Throughput', note: 'sampled tokens a second, whole steps', low: 0, digits: 0,
      empty: 'Known after two steps.', lines: [{ name: 'tokens/s', values: of('tokens_per_second'), colour: 2 }],
    });
    chart({
      key: 'lag', title: 'Staleness', note: 'versions that samples are behind', low: 0, high: 1, digits: 2,
      empty: 'No sample has said its version yet.',
      lines: [{ name: 'mean', values: of('lag_mean'), colour: 0 }, { name: 'most', values: of('lag_most'), colour: 5, kind: 'faint' }],
    });
    chart({
      key: 'turns', title: 'Turns', note: 'joined to the one before, or sealed', low: 0, high: 1, digits: 0,
      empty: 'No step was trained yet.',
      lines: [{ name: 'joined', values: of('joined'), colour: 2 }, { name: 'sealed', values: of('sealed'), colour: 1 }],
    });
    const ages = [...new Set(steps.flatMap((it) => Object.keys(it.stopped)))].map(Number).sort((a, b) => a - b);
    if (ages.length) {
      chart({
        key: 'stopped', title: 'Past a bound of the loss', note: 'share of a step\'s tokens, by their age', low: 0, digits: 3,
        empty: 'Nothing older was trained yet.',
        lines: ages.map((age, at) => ({ name: age ? `${plural(age, 'step')} old` : 'newest', values: steps.map((it) => it.stopped[age] ?? null), colour: at })),
      });
    }
  }

  const rewardNote = (steps) => (predictorsOf(steps).length > 1 ? 'mean of each step, by predictor' : 'mean of each step');

  const predictorsOf = (steps) => [...new Set(steps.flatMap((it) => Object.keys(it.predictors)))];

  function rewards(steps) {
    const values = steps.map((it) => it.reward);
    const names = predictorsOf(steps);
    const several = names.length > 1 ? names.slice(0, MOST_PREDICTORS) : [];
    return [
      { name: 'each step', values, colour: 0, kind: 'faint' },
      { name: several.length ? 'all, smoothed' : 'smoothed', values: smooth(values), colour: 0 },
      ...several.map((name, at) => ({ name, values: smooth(steps.map((it) => it.predictors[name] ?? null)), colour: at + 1 })),
    ];
  }

  function drawValidations(host, validations, span) {
    const xs = [...new Set(validations.map((it) => it.version))].sort((a, b) => a - b);
    const several = new Set(validations.map((it) => it.compile)).size > 1;
    const kinds = new Map();
    for (const it of validations) {
      const name = several && it.compile ? `${it.name} ${it.compile}` : it.name;
      kinds.set(name, new Map([...(kinds.get(name) ?? []), [it.version, it]]));
    }
    const best = validations.findLast((it) => it.best);
    const lines = [...kinds.entries()].map(([name, at], colour) => ({
      name, colour, kind: 'marks',
      values: xs.map((x) => at.get(x)?.score ?? null),
      errors: xs.map((x) => at.get(x)?.standard_error ?? null),
    }));
    const note = best ? `held out, ± one standard error · best at step ${best.version}` : 'held out, ± one standard error';
    draw(host, { key: 'validation', title: 'Validation', note, xs, lines, empty: 'No validation was told yet.', digits: 3 }, span);
  }

  completions.begin();
  window.slipway.whenStepChosen(completions.choose);
  document.addEventListener('visibilitychange', () => { if (!document.hidden && next !== null) look(); });
  look();
})();
