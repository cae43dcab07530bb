// Which curves a run has: what it learns, why, the update, speed and money. Each says the names that its
// figures have in the run's files. A chart without a figure is left out.
'use strict';

(() => {
  const { draw, smooth, SMOOTHED, make, isNumber, plural } = window.slipway;
  const MOST_LINES = 7;
  const SECTIONS = [
    ['learns', 'What it learns'], ['why', 'Why'], ['update', 'The update'], ['cost', 'Speed and money'],
    ['later', 'Not there yet'],
  ];
  // The charts besides the reward's on which an alarm has its flag.
  const FLAGGED = {
    flat_groups: 'groups', length: 'length', repetition: 'repetition', entropy: 'entropy', truncation: 'ends',
    outside: 'outcomes', kl_behaviour: 'kl', kl_reference: 'kl', ratio_max: 'ratio', masked: 'stopped', stale: 'stopped', held_out: 'validation',
  };
  const hosts = {};

  function hostOf(section, title) {
    if (!hosts[section]) {
      hosts[section] = make('section', 'charts');
      document.getElementById('charts').append(make('h2', 'section', title), hosts[section]);
    }
    return hosts[section];
  }

  // `live`: whether more can come.
  function overview(data, live) {
    const xs = data.steps;
    const ends = [...xs, ...data.validations.map((it) => it.version)];
    const span = ends.length ? [Math.min(...ends), Math.max(...ends, Math.min(...ends) + 1)] : [0, 1];
    const flags = (key) => data.alarms
      .filter((it) => key === 'reward' || FLAGGED[it.name] === key).map((it) => ({ x: it.step, name: it.name }));
    for (const [section, title] of SECTIONS) {
      const host = hostOf(section, title);
      for (const spec of OF[section](data, live)) draw(host, { xs, flags: flags(spec.key), digits: 3, ...spec }, span);
      const shown = [...host.children].some((it) => !it.hidden);
      host.hidden = host.previousElementSibling.hidden = !shown;
    }
  }

  const line = (data, name, label, colour, kind) => ({ name: label, values: data.columns[name] ?? [], colour, kind });

  // Without kl_beta the divergence to the model before training is not measured, and the files say 0.
  const isMeasured = (data, name) => (data.columns[name] ?? []).some((it) => isNumber(it) && (name !== 'kl_reference' || it !== 0));

  // A line that is 0 from the first step to the last tells nothing.
  const unlessZero = (one) => (one.values.some((it) => isNumber(it) && it !== 0) ? one : { ...one, values: [] });

  const OF = {
    learns: (data) => [
      {
        key: 'reward', title: 'Reward', files: 'reward', lines: rewards(data), empty: 'No step was rewarded yet.',
        note: noteOfRewards(predictorsOf(data).length),
      },
      { key: 'validation', title: 'Validation', files: 'val/score', ...validations(data) },
      { key: 'loss', title: 'Loss', files: 'loss', lines: data.columns.reward ? [] : [line(data, 'loss', 'loss', 0)] },
    ],
    why: (data) => [
      { key: 'length', title: 'Length of an answer', files: 'length', note: 'tokens', low: 0, digits: 0, lines: [line(data, 'length', 'tokens', 2)] },
      {
        key: 'follows', title: 'What the reward follows', files: 'reward_length, reward_repetition', note: 'correlation among the tries of an example', low: -1, high: 1, digits: 2,
        lines: [line(data, 'reward_length', 'length', 2), line(data, 'reward_repetition', 'repetition', 1)],
      },
      {
        key: 'ends', title: 'Cut off and parsed', files: 'cut_off_rate, parse_rate', note: 'shares of the rollouts', low: 0, high: 1, digits: 2,
        lines: [line(data, 'cut_off_rate', 'cut off', 1), line(data, 'parse_rate', 'parsed', 2)],
      },
      { key: 'repetition', title: 'Repetition', files: 'repetition', note: 'share of four-word sequences said before', low: 0, digits: 2, lines: [unlessZero(line(data, 'repetition', 'repeated', 3))] },
      { key: 'outcomes', title: 'Rollouts that did not end well', files: 'outcomes', low: 0, digits: 0, lines: outcomes(data) },
      { key: 'dropped', title: 'Left out, by reason', files: 'counts.dropped', low: 0, digits: 0, lines: dropped(data) },
      {
        key: 'groups', title: 'Groups without variance', files: 'counts.groups_without_variance', note: 'share: all rewards equal', low: 0, high: 1, digits: 2,
        lines: [{ name: 'share', colour: 5, values: shares(data, 'counts.groups_without_variance', 'counts.groups') }],
      },
      {
        key: 'samples', title: 'Samples of a step', files: 'counts.samples, counts.trained', low: 0, digits: 0,
        lines: [line(data, 'counts.samples', 'sampled', 6, 'faint'), line(data, 'counts.trained', 'trained', 0)],
      },
    ],
    update: (data) => [
      { key: 'entropy', title: 'Entropy', files: 'entropy', note: 'nats a token', low: 0, lines: [line(data, 'entropy', 'entropy', 4)] },
      divergences(data),
      { key: 'gradient', title: 'Gradient norm', files: 'grad_norm', low: 0, lines: [line(data, 'grad_norm', 'norm', 3)] },
      { key: 'ratio', title: 'Largest ratio', files: 'ratio_max', note: "the trainer's probability of a token to the engine's", low: 0, digits: 2, lines: [line(data, 'ratio_max', 'ratio', 1)] },
      { key: 'rate', title: 'Learning rate', files: 'learning_rate', low: 0, digits: 6, noise: 0, lines: [line(data, 'learning_rate', 'rate', 6)] },
      {
        key: 'staleness', title: 'Staleness', files: 'staleness_mean, staleness_max', note: 'steps that samples are behind', low: 0, high: 1, digits: 2,
        lines: [line(data, 'staleness_mean', 'mean', 0), line(data, 'staleness_max', 'most', 5, 'faint')],
      },
      { key: 'stopped', title: 'Past a bound of the loss', files: 'stopped/LAG', note: 'share of the tokens, by their age', low: 0, lines: stopped(data) },
    ],
    cost: (data) => [
      { key: 'speed', title: 'Tokens a second', files: 'tokens_per_second', note: 'of trained answers, whole steps', low: 0, digits: 0, lines: [line(data, 'tokens_per_second', 'tokens/s', 2)] },
      {
        key: 'seconds', title: 'Seconds of a step', files: 'seconds, rollout_seconds, train_seconds', note: 'the rest: publication, waiting', low: 0, digits: 1,
        lines: [line(data, 'seconds', 'all', 6), line(data, 'rollout_seconds', 'rollouts', 0), line(data, 'train_seconds', 'trainer', 1)],
      },
      { key: 'money', title: 'Money', files: 'cost', note: 'US dollars', low: 0, digits: 2, lines: [line(data, 'cost', 'spent', 5)] },
      {
        key: 'turns', title: 'Turns', files: 'counts.turns_joined, counts.sealed', note: 'joined to the one before, or begun anew', low: 0, digits: 0,
        lines: [unlessZero(line(data, 'counts.turns_joined', 'joined', 2)), unlessZero(line(data, 'counts.sealed', 'begun anew', 1))],
      },
    ],
    later: (data, live) => [
      { key: 'no validation', title: 'Validation', files: 'val/score', lines: [], empty: live && !data.validations.length ? 'No validation was told yet.' : '' },
    ],
  };

  const KL = [['kl_behaviour', 'to the policy that sampled', 0], ['kl_reference', 'to the model before training', 1]];

  function divergences(data) {
    const measured = KL.filter(([name]) => isMeasured(data, name));
    return {
      key: 'kl', title: 'KL', files: measured.map(([name]) => name).join(', '), note: 'nats a token', digits: 4,
      lines: measured.map(([name, label, colour]) => line(data, name, label, colour)),
    };
  }

  const predictorsOf = (data) => Object.keys(data.columns).filter((it) => it.startsWith('reward/')).map((it) => it.slice(7));

  function noteOfRewards(predictors) {
    if (predictors < 2) return 'mean of each step';
    return predictors < MOST_LINES ? 'mean of each step, by predictor' : `mean of each step, ${MOST_LINES - 1} of ${predictors} predictors`;
  }

  // What the files of texts tell of each step is among its figures.
  function withTexts(data, texts) {
    const of = new Map(texts.files.filter((it) => it.kind === 'step').map((it) => [it.step, it]));
    const told = (name) => data.steps.map((step) => of.get(step)?.[name] ?? null);
    const columns = { ...data.columns };
    if (texts.files.some((it) => it.kind === 'step' && it.staleness_max > 0)) {
      columns.staleness_mean = told('staleness_mean');
      columns.staleness_max = told('staleness_max');
    }
    const counted = columns.cut_off_rate ?? data.steps.map(() => null);
    columns.cut_off_rate = told('cut_off').map((it, at) => counted[at] ?? it);
    return { ...data, columns };
  }

  function rewards(data) {
    const values = data.columns.reward ?? [];
    const names = predictorsOf(data);
    const several = names.length > 1 ? names.slice(0, MOST_LINES - 1) : [];
    return [
      { name: 'each step', values, colour: 0, kind: 'faint' },
      { name: several.length ? `all, ${SMOOTHED}` : SMOOTHED, values: smooth(values), colour: 0 },
      ...several.map((name, at) => ({ name, values: smooth(data.columns[`reward/${name}`]), colour: at + 1 })),
    ];
  }

  // Scores by their versions: of several compiles each has its line.
  function validations({ validations: all }) {
    const xs = [...new Set(all.map((it) => it.version))].sort((a, b) => a - b);
    const several = new Set(all.map((it) => it.compile)).size > 1;
    const kinds = new Map();
    for (const it of all) {
      const name = several && it.compile ? `${it.name} ${it.compile}` : it.name;
      kinds.set(name, new Map([...(kinds.get(name) ?? []), [it.version, it]]));
    }
    const best = all.findLast((it) => it.best);
    const lines = [...kinds.entries()].map(([name, at], colour) => ({
      name, colour, kind: 'marks',
      values: xs.map((x) => at.get(x)?.score ?? null),
      errors: xs.map((x) => at.get(x)?.standard_error ?? null),
    }));
    const note = best ? `held out, ± one standard error · best at step ${best.version}` : 'held out, ± one standard error';
    return { xs, lines, note };
  }

  const outcomes = (data) => Object.keys(data.columns)
    .filter((it) => it.startsWith('outcomes.') && it !== 'outcomes.scored')
    .map((it, at) => unlessZero(line(data, it, it.slice(9), at + 1)));

  // The most frequent ones.
  function dropped(data) {
    const total = (values) => values.reduce((sum, it) => sum + (it ?? 0), 0);
    return Object.entries(data.dropped).sort((a, b) => total(b[1]) - total(a[1])).slice(0, MOST_LINES)
      .map(([name, values], colour) => ({ name, values: values.map((it) => it ?? 0), colour }));
  }

  function shares(data, part, whole) {
    const all = data.columns[whole] ?? [];
    return (data.columns[part] ?? []).map((it, at) => (isNumber(it) && all[at] ? it / all[at] : null));
  }

  const stopped = (data) => Object.keys(data.columns).filter((it) => it.startsWith('stopped/'))
    .map((it) => Number(it.slice(8))).sort((a, b) => a - b)
    .map((age, colour) => line(data, `stopped/${age}`, age ? `${plural(age, 'step')} old` : 'newest', colour));

  Object.assign(window.slipway, { charts: { overview, validations, withTexts, isMeasured } });
})();
