// What was said in one step: its groups, each rollout with its reward, its turns and its tool calls. One step
// is read at a time, so that a long run is no larger here than a short one.
'use strict';

(() => {
  const { make, number, count, plural, percent, isNumber, empty, turns, pieces } = window.slipway;
  const state = { steps: [], step: null, lines: [], follow: true, predictor: '', which: 'all', asked: 0, revision: '' };
  const WHICH = {
    all: ['all', () => true],
    trained: ['handed to the trainer', (it) => it.dropped === null && it.completion !== null],
    dropped: ['left out', (it) => it.dropped !== null],
    failed: ['failed', (it) => it.failure !== null],
    tools: ['with tool calls', (it) => pieces(it.completion ?? '').some((one) => one.kind === 'call')],
  };
  const parts = {};
  const [LONG_CHARACTERS, LONG_LINES] = [1200, 16];

  function begin() {
    const button = (text, label, move) => {
      const it = make('button', '', text, { type: 'button', 'aria-label': label });
      it.addEventListener('click', () => go(move));
      return it;
    };
    parts.number = make('input', 'step', null, { type: 'number', min: 0, 'aria-label': 'step' });
    parts.number.addEventListener('change', () => choose(Number(parts.number.value)));
    parts.follow = make('input', '', null, { type: 'checkbox', id: 'follow' });
    parts.follow.checked = true;
    parts.follow.addEventListener('change', () => {
      state.follow = parts.follow.checked;
      if (state.follow) show(state.steps.at(-1));
    });
    parts.predictor = make('select', '', null, { 'aria-label': 'predictor' });
    parts.predictor.hidden = true;
    parts.predictor.addEventListener('change', () => { state.predictor = parts.predictor.value; render(); });
    parts.which = make('select', '', Object.entries(WHICH).map(([key, [text]]) => new Option(text, key)), { 'aria-label': 'which' });
    parts.which.addEventListener('change', () => { state.which = parts.which.value; render(); });
    parts.last = make('span', 'muted');
    const controls = parts.controls = document.getElementById('said-controls');
    controls.hidden = true;
    controls.append(
      make('span', 'steps', [
        make('span', 'muted', 'step'), button('‹', 'the step before', -1), parts.number,
        button('›', 'the next step', 1), parts.last,
      ]),
      make('label', '', [parts.follow, document.createTextNode('newest')]),
      parts.predictor, parts.which,
    );
    parts.host = document.getElementById('said');
    parts.host.append(empty('Nothing has been said yet: the first step is still being rolled out.'));
    // Who opens something wants to read it: the next step must not take it away.
    parts.host.addEventListener('click', (event) => {
      if (event.target.closest('summary, button')) state.follow = parts.follow.checked = false;
    });
    if (window.slipway.kept) parts.follow.parentElement.hidden = true;
  }

  // rows: the run's steps; each says how many lines there are of it.
  function update(rows, revision) {
    state.steps = rows.filter((row) => row.said > 0).map((row) => row.step);
    parts.last.textContent = state.steps.length ? `of ${count(state.steps.at(-1))}` : '';
    parts.number.max = state.steps.at(-1) ?? 0;
    const changed = revision !== state.revision;
    state.revision = revision;
    parts.controls.hidden = !state.steps.length;
    if (!state.steps.length) return;
    if (state.step === null || state.follow) show(state.steps.at(-1));
    else if (changed && !state.steps.includes(state.step)) show(state.steps.at(-1));
  }

  function choose(step) {
    if (!state.steps.length || !Number.isFinite(step)) return;
    state.follow = parts.follow.checked = false;
    // The nearest one that is kept: of a long run the oldest texts are gone.
    show(state.steps.reduce((best, it) => (Math.abs(it - step) < Math.abs(best - step) ? it : best)));
  }

  function go(move) {
    const at = state.steps.indexOf(state.step) + move;
    if (at >= 0 && at < state.steps.length) choose(state.steps[at]);
  }

  async function show(step) {
    if (step === undefined || step === state.step) return;
    state.step = step;
    parts.number.value = step;
    const asked = ++state.asked;
    try {
      const said = await window.slipway.load(`step-${step}`);
      if (asked !== state.asked) return;  // somebody chose another meanwhile
      state.lines = said.lines;
    } catch (error) {
      if (asked !== state.asked) return;
      state.lines = [];
      state.step = null;
      parts.host.replaceChildren(empty(`Step ${step} cannot be read: ${error.message}.`));
      return;
    }
    offerPredictors();
    render();
  }

  function offerPredictors() {
    const names = [...new Set(state.lines.map((it) => it.predictor).filter((it) => it !== null))];
    if (!names.includes(state.predictor)) state.predictor = '';
    parts.predictor.replaceChildren(new Option('all predictors', ''), ...names.map((it) => new Option(it, it)));
    parts.predictor.value = state.predictor;
    parts.predictor.hidden = names.length < 2;
  }

  function render() {
    const fits = WHICH[state.which][1];
    const lines = state.lines.filter((it) => fits(it) && (!state.predictor || it.predictor === state.predictor));
    if (!lines.length) {
      parts.host.replaceChildren(empty(`None of the ${plural(state.lines.length, 'completion')} of step ${state.step} is of this kind.`));
      return;
    }
    const groups = Map.groupBy ? Map.groupBy(lines, (it) => it.group) : groupBy(lines);
    const shown = [...groups.entries()].map(([id, members]) => groupOf(id, members));
    const words = `${plural(lines.length, 'completion')} in ${plural(groups.size, 'group')} of step ${state.step}`;
    parts.host.replaceChildren(make('p', 'muted summary', `${words} · from ${versionsOf(lines)}`), ...shown);
  }

  function groupBy(lines) {
    const groups = new Map();
    for (const it of lines) groups.set(it.group, [...(groups.get(it.group) ?? []), it]);
    return groups;
  }

  const versionsOf = (lines) => {
    const versions = [...new Set(lines.map((it) => it.version).filter(isNumber))].sort((a, b) => a - b);
    return versions.length ? versions.map((it) => (it === 0 ? 'the base' : `policy@v${it}`)).join(', ') : 'no version';
  };

  function groupOf(id, members) {
    const rewards = members.map((it) => it.reward).filter(isNumber);
    const mean = rewards.length ? rewards.reduce((sum, it) => sum + it, 0) / rewards.length : null;
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    const head = make('div', 'group-head', [
      make('span', 'group-id', id ?? 'no group', { title: 'group' }),
      members[0].predictor ? make('span', 'tag', members[0].predictor) : null,
      mean === null ? null : make('span', 'muted', `mean reward ${number(mean)} · ${number(low, 2)} to ${number(high, 2)}`),
    ]);
    const asked = members.filter((it) => it.prompt !== null);
    const shared = asked.length > 0 && asked.every((it) => it.prompt === asked[0].prompt);
    return make('article', 'group', [
      head,
      shared ? promptOf(asked[0]) : null,
      make('div', 'members', members.map((it) => memberOf(it, !shared, [low, high]))),
    ]);
  }

  // Closed: what was asked last. Open: every turn, whose it was.
  function promptOf(line) {
    const said = turns(line.prompt);
    const last = said.findLast((it) => it.role === 'user' || it.role === 'tool') ?? said.at(-1);
    const asked = pieces(last.text);
    const summary = make('summary', '', [
      make('span', 'role', asked.some((it) => it.kind === 'result') ? 'tool' : last.role ?? 'prompt'),
      make('span', 'asked', asked.map((it) => it.text.trim()).join('\n').slice(0, 600)),
      make('span', 'muted more', `${plural(line.prompt_tokens, 'token')}${line.prompt_cut ? ', beginning left out' : ''}`),
    ]);
    const details = make('details', 'prompt', [summary]);
    details.addEventListener('toggle', () => {
      if (!details.open || details.children.length > 1) return;
      details.append(...said.map((it) => make('div', 'turn', [
        make('span', 'role', it.role ?? '…'), make('div', 'text', piecesOf(it.text)),
      ])));
    });
    return details;
  }

  function memberOf(line, withPrompt, [low, high]) {
    const share = isNumber(line.reward) && high > low ? (line.reward - low) / (high - low) : null;
    const reward = make('span', `reward ${share === null ? '' : share > 0.5 ? 'good' : 'poor'}`, number(line.reward), { title: 'reward' });
    const facts = [
      isNumber(line.tokens) ? plural(line.tokens, 'token') : null,
      line.finish_reason && line.finish_reason !== 'stop' ? line.finish_reason : null,
      line.completion_cut ? 'end left out here' : null,
      isNumber(line.version) ? `v${line.version}` : null,
      line.rollout,
      line.call > 0 ? `call ${line.call + 1}` : null,
    ].filter((it) => it !== null);
    const trouble = [line.failure && `failed: ${line.failure}`, line.dropped && `left out: ${line.dropped}`].filter(Boolean);
    const said = pieces(line.completion ?? '');
    const end = said.at(-1)?.kind === 'mark' ? said.pop().text : null;
    const text = line.completion === null
      ? [make('p', 'muted', trouble.length ? 'no completion' : 'its text is not kept')]
      : elementsOf(said);
    return make('div', 'member', [
      reward,
      make('div', 'said', [
        withPrompt && line.prompt !== null ? promptOf(line) : null,
        ...clamped(make('div', 'text', text), line.completion ?? ''),
        make('p', 'facts', [
          document.createTextNode(facts.join(' · ')), end === null ? null : make('span', 'mark', end), ...trouble.map((it) => make('span', 'trouble', it)),
        ]),
      ]),
    ]);
  }

  // A long one is open to so many lines, until somebody wants the rest.
  function clamped(element, text) {
    if (text.length < LONG_CHARACTERS && text.split('\n').length < LONG_LINES) return [element];
    const button = make('button', 'more', 'all of it', { type: 'button' });
    element.classList.add('clamped');
    button.addEventListener('click', () => {
      button.textContent = element.classList.toggle('clamped') ? 'all of it' : 'less of it';
    });
    return [element, button];
  }

  const piecesOf = (text) => elementsOf(pieces(text));

  function elementsOf(said) {
    const found = said.map(({ kind, text: words, name }) => {
      if (kind === 'mark') return make('span', 'mark', words);
      if (kind === 'text') return make('span', 'words', words.replace(/^\n+|\n+$/g, ''));
      const title = { call: `tool call · ${name ?? 'no name'}`, result: 'tool result', think: 'thought' }[kind];
      return make('div', `piece ${kind}`, [make('span', 'kind', title), make('span', 'words', words)]);
    });
    return found.length ? found : [make('span', 'muted', 'empty')];
  }

  Object.assign(window.slipway, { completions: { begin, update, choose } });
})();
