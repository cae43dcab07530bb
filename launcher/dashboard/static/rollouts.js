// The rollouts of a step: its groups, each rollout with its one reward, as the conversation that it was. The
// address says what is shown. One file is read at a time, so that a long run is no larger here than a short
// one; a search looks in all of them.
'use strict';

(() => {
  const {
    make, number, count, plural, isNumber, empty, turns, pieces, button, choice, fill, field, checkbox, address, link, kept, load, table,
  } = window.slipway;
  const [LONG_CHARACTERS, LONG_LINES] = [1200, 16];
  const [MOST_HITS, MOST_LIKE] = [200, 2000];
  const ROLLOUTS_AT_ONCE = 64;
  const UNFILTERED = { which: 'all', predictor: '', least: null, most: null };
  const state = {
    run: null, data: null, files: [], more: false, route: [], file: null, lines: [], turn: 0, searched: null,
    kind: 'step', sort: 'reward', ...UNFILTERED, wanted: null, open: new Set(),
  };
  const WHICH = {
    all: ['all', () => true],
    trained: ['trained', (it) => kindOf(state.file) === 'step' && it.lines.some((one) => one.dropped === null && one.completion !== null)],
    dropped: ['left out', (it) => it.lines.some((one) => one.dropped !== null)],
    failed: ['failed', (it) => it.lines.some((one) => one.failure !== null)],
    cut: ['cut off', (it) => it.lines.some((one) => one.finish_reason === 'length')],
    tools: ['with tool calls', (it) => callsOf(it) > 0],
  };
  const SORTS = {
    reward: ['best group first', (a, b) => order(a.mean, b.mean, true)],
    poor: ['worst group first', (a, b) => order(a.mean, b.mean)],
    spread: ['widest spread first', (a, b) => order(a.high - a.low, b.high - b.low, true)],
    sent: ['as they were sent', () => 0],
  };
  const KINDS = { step: 'steps', validation: 'validations', empty: 'empty steps' };
  const kindOf = (file) => (file ?? '').split('-')[0];
  // What has no number comes last, whichever way.
  function order(a, b, falling = false) {
    if (isNumber(a) && isNumber(b)) return falling ? b - a : a - b;
    return isNumber(a) ? -1 : isNumber(b) ? 1 : 0;
  }
  const parts = {};

  // ------------------------------------------------------------- controls

  function begin() {
    const follow = checkbox('newest', true, (on) => {
      if (on) visit();
      else pin();
    });
    parts.follow = follow.box;
    parts.kind = choice('kind of texts', [], (kind) => visit(state.files.findLast((it) => it.kind === kind)?.name));
    parts.number = make('input', 'step', null, { type: 'number', min: 0, 'aria-label': 'step' });
    parts.number.addEventListener('change', () => choose(Number(parts.number.value), state.kind));
    parts.last = make('span', 'muted');
    parts.sort = choice('order of the groups', Object.entries(SORTS).map(([key, [text]]) => [key, text]), (it) => { state.sort = it; render(); });
    parts.which = choice('which', Object.entries(WHICH).map(([key, [text]]) => [key, text]), (it) => { state.which = it; render(); });
    parts.predictor = choice('predictor', [], (it) => { state.predictor = it; render(); });
    parts.predictor.hidden = true;
    const bound = (label, key) => field(label, (text) => {
      state[key] = text === '' || Number.isNaN(Number(text)) ? null : Number(text);
      render();
    }, { type: 'number', step: 'any', class: 'bound' });
    [parts.least, parts.most] = [bound('reward from', 'least'), bound('to', 'most')];
    parts.search = field('search all texts', (text) => {
      if (text) location.hash = address(state.run, 'rollouts', 'search', text);
      else visit(state.file ?? undefined);
    }, { id: 'search' });
    parts.controls = document.getElementById('rollouts-controls');
    parts.controls.hidden = true;
    parts.controls.append(
      parts.kind,
      make('span', 'steps', [
        button('‹', () => move(-1), '', { 'aria-label': 'the one before' }), parts.number,
        button('›', () => move(1), '', { 'aria-label': 'the next one' }), parts.last,
      ]),
      follow.label, parts.sort, parts.which, parts.predictor, parts.least, parts.most, parts.search,
    );
    parts.host = document.getElementById('rollouts');
    parts.host.addEventListener('click', (event) => {  // who opens something wants to read it
      if (event.target.closest('summary, button')) pin();
    });
    if (kept) follow.label.hidden = true;
  }

  function of(run) {
    if (run === state.run) return;
    Object.assign(state, { run, data: null, files: [], file: null, lines: [], searched: null, open: new Set() });
    unfilter();
    parts.search.value = '';
    parts.host.replaceChildren();
  }

  function unfilter() {
    Object.assign(state, UNFILTERED);
    for (const it of [parts.predictor, parts.least, parts.most]) it.value = '';
    parts.which.value = UNFILTERED.which;
  }

  // What is known of the run has changed: its steps, or its files of texts.
  function update(run, data, texts) {
    of(run);
    Object.assign(state, { data, files: texts.files, more: texts.more });
    parts.controls.hidden = !state.files.length;
    const kinds = Object.keys(KINDS).filter((kind) => state.files.some((it) => it.kind === kind));
    fill(parts.kind, kinds.map((it) => [it, KINDS[it]]), state.kind);
    parts.kind.hidden = kinds.length < 2;
    apply();
  }

  // A view's address: nothing is the newest step; a file of texts, and perhaps one rollout of it; a search.
  function route(run, rest) {
    of(run);
    state.route = rest;
    state.searched = null;
    const [first, ...more] = rest;
    state.wanted = first && !['search', 'like'].includes(first) && more.length === 2 ? more : null;
    apply();
  }

  function apply() {
    if (state.data === null || parts.host.closest('[data-view]').hidden) return;
    const [first, ...rest] = state.route;
    parts.follow.checked = first === undefined;
    if (!state.files.length) return parts.host.replaceChildren(empty(state.more ? 'looking through the texts …' : nothing()));
    if (first === 'search') return search({ text: rest[0] ?? '' });
    if (first === 'like') return search({ like: rest });
    const file = first ?? (state.files.findLast((it) => it.kind === 'step') ?? state.files.at(-1)).name;
    if (!state.files.some((it) => it.name === file)) return absent(file);
    show(file);
  }

  const nothing = () => (kept && !window.slipway.hasTexts
    ? `The texts of a run are on its own page: launch open ${state.run}`
    : 'There are no texts: no step was rolled out yet, or the run keeps none (logged_rollouts=0).');

  function absent(file) {
    state.file = null;
    if (state.more) return parts.host.replaceChildren(empty(`looking for ${titleOf(file)} …`));
    const near = nearest(Number(file.split('-')[1]), kindOf(file)) ?? state.files.at(-1);
    parts.host.replaceChildren(make('p', 'missing', [
      document.createTextNode(`The texts of ${titleOf(file)} are not kept. The nearest: `), link(titleOf(near.name), state.run, 'rollouts', near.name),
    ]));
  }

  function nearest(step, kind) {
    const files = state.files.filter((it) => it.kind === kind);
    if (!files.length || !Number.isFinite(step)) return null;
    return files.reduce((best, it) => (Math.abs(it.step - step) < Math.abs(best.step - step) ? it : best));
  }

  // The nearest one of a kind whose texts are kept: of a long run the oldest are gone.
  function choose(step, kind = 'step') {
    const found = nearest(step, kind) ?? nearest(step, 'step');
    if (state.more && kind === 'step' && found?.step !== step) visit(`step-${step}`);  // it may still be found
    else if (found) visit(found.name);
  }

  function move(by) {
    const files = state.files.filter((it) => it.kind === kindOf(state.file));
    const next = files[files.findIndex((it) => it.name === state.file) + by];
    if (next) visit(next.name);
  }

  // By the address, so that the way back leads back.
  function visit(...rest) {
    const place = address(state.run, 'rollouts', ...rest.filter((it) => it !== undefined));
    if (location.hash === place) route(state.run, rest.filter((it) => it !== undefined));
    else location.hash = place;
  }

  // The address says what is shown, so that the next step does not take it away.
  function pin() {
    if (state.route.length || state.file === null) return;
    state.route = [state.file];
    parts.follow.checked = false;
    history.replaceState(null, '', address(state.run, 'rollouts', state.file));
  }

  async function show(file) {
    const turn = ++state.turn;
    const here = state.files.find((it) => it.name === file);
    state.kind = parts.kind.value = here.kind;
    parts.number.value = here.step;
    const last = state.files.findLast((it) => it.kind === here.kind);
    parts.number.max = last.step;
    parts.last.textContent = `of ${count(last.step)}`;
    if (file !== state.file) {
      try {
        const said = await load(`${state.run}/${file}`);
        if (turn !== state.turn) return;  // somebody chose another meanwhile
        Object.assign(state, { file, lines: said.lines, shown: null });
      } catch (error) {
        if (turn !== state.turn) return;
        state.file = null;
        parts.host.replaceChildren(empty(`${titleOf(file)} cannot be read: ${error.message}.`));
        return;
      }
      offerPredictors();
    }
    if (state.wanted !== null) uncover(state.wanted);
    if (state.shown !== file || state.wanted !== null) render();
  }

  function offerPredictors() {
    const names = [...new Set(state.lines.map((it) => it.predictor).filter((it) => it !== null))];
    if (!names.includes(state.predictor)) state.predictor = '';
    fill(parts.predictor, [['', 'all predictors'], ...names.map((it) => [it, it])], state.predictor);
    parts.predictor.hidden = names.length < 2;
  }

  // A rollout that an address names is shown, whatever was filtered before.
  function uncover([group, member]) {
    const rollout = groupsOf(state.lines).find((it) => it.id === group)?.rollouts.find((it) => it.key === member);
    if (!rollout) return;
    if (!fits(rollout)) unfilter();
    state.open.add(openKey(group, member));
  }

  // ------------------------------------------------------------- groups

  function titleOf(file) {
    const [kind, step, ...rest] = file.split('-');
    if (kind === 'validation') return `the validation${rest[0] === 'score' ? '' : ` ${rest.join('-')}`} of ${step === '0' ? 'the base' : `version ${step}`}`;
    return kind === 'empty' ? `empty step ${rest.join('-')} after step ${step}` : `step ${step}`;
  }

  // As launcher/dashboard/page_rollouts.py names a rollout of a file.
  const keyOf = (line) => (isNumber(line.member) ? String(line.member) : `${line.rollout} ${line.reward}`);

  const openKey = (group, member) => JSON.stringify([state.file, group, member]);

  // A rollout is its lines, in the order of its turns.
  function groupsOf(lines) {
    const groups = new Map();
    for (const line of lines) {
      const id = line.group ?? '';
      const group = groups.get(id) ?? { id, rollouts: new Map() };
      groups.set(id, group);
      const key = keyOf(line);
      const rollout = group.rollouts.get(key) ?? { key, group: id, id: line.rollout, reward: line.reward, predictor: line.predictor, metrics: line.metrics, lines: [] };
      group.rollouts.set(key, rollout);
      rollout.lines.push(line);
    }
    return [...groups.values()].map((group) => {
      const rollouts = [...group.rollouts.values()].sort((a, b) => order(a.reward, b.reward, true));
      const rewards = rollouts.map((it) => it.reward).filter(isNumber);
      const mean = rewards.length ? rewards.reduce((sum, it) => sum + it, 0) / rewards.length : null;
      return { ...group, rollouts, sent: rollouts.length, scored: rewards.length, mean, low: Math.min(...rewards), high: Math.max(...rewards) };
    });
  }

  function fits(rollout) {
    return WHICH[state.which][1](rollout)
      && (!state.predictor || rollout.predictor === state.predictor)
      && (state.least === null || (isNumber(rollout.reward) && rollout.reward >= state.least))
      && (state.most === null || (isNumber(rollout.reward) && rollout.reward <= state.most));
  }

  function render() {
    if (state.file === null || ['search', 'like'].includes(state.route[0])) return;
    state.shown = state.file;
    const all = groupsOf(state.lines);
    const groups = all.map((it) => ({ ...it, rollouts: it.rollouts.filter(fits) })).filter((it) => it.rollouts.length).sort(SORTS[state.sort][1]);
    const shown = groups.reduce((sum, it) => sum + it.rollouts.length, 0);
    const total = all.reduce((sum, it) => sum + it.rollouts.length, 0);
    const words = `${shown === total ? plural(total, 'rollout') : `${count(shown)} of ${plural(total, 'rollout')}`} in ${plural(groups.length, 'group')} of ${titleOf(state.file)} · from ${versionsOf(state.lines)}`;
    parts.host.replaceChildren(
      make('p', 'muted summary', words), ...missing(total), ...(shown ? groups.map(groupOf) : total ? filteredOut() : [empty('There is none.')]),
    );
    const wanted = state.wanted && parts.host.querySelector(`[data-rollout="${CSS.escape(state.wanted.join(' '))}"]`);
    wanted?.scrollIntoView({ block: 'start' });
    state.wanted = null;
  }

  const filteredOut = () => [empty('None passes the filters.'), button('clear the filters', () => {
    unfilter();
    render();
  })];

  // What is not kept is said, and how to keep more.
  function missing(total) {
    const { data } = state;
    const it = state.files.find((one) => one.name === state.file);
    const at = it?.kind === 'step' ? data.steps.indexOf(it.step) : -1;
    const sent = at < 0 ? null : data.columns['counts.members']?.[at];
    const found = [];
    if (isNumber(sent) && sent > total) {
      found.push(`${count(total)} of its ${plural(sent, 'rollout')} are kept: launch --set logged_rollouts=${sent} keeps all`);
    }
    const first = data.steps[0];
    const oldest = state.files.find((one) => one.kind === 'step')?.step;
    if (oldest > first && !state.more) found.push(`the texts of steps ${first} to ${oldest - 1} are gone: a run keeps 64 MiB`);
    return found.length ? [make('p', 'missing', found.join(' · '))] : [];
  }

  const versionsOf = (lines) => {
    const versions = [...new Set(lines.map((it) => it.version).filter(isNumber))].sort((a, b) => a - b);
    return versions.length ? versions.map((it) => (it === 0 ? 'the base' : `policy@v${it}`)).join(', ') : 'no version';
  };

  function groupOf(group) {
    const { rollouts, low, high } = group;
    const firsts = rollouts.map((it) => it.lines[0].prompt);
    const shared = rollouts.length > 1 && firsts[0] !== null && firsts.every((it) => it === firsts[0]);
    const title = (firsts[0] && oneLine(askedOf(rollouts[0].lines[0]))) || group.id || 'no group';
    const head = make('div', 'group-head', [
      rollouts[0].predictor ? make('span', 'tag', rollouts[0].predictor) : null,
      group.scored ? make('span', 'muted', rewardsOf(group)) : null,
      firsts[0] ? link('over the steps', state.run, 'rollouts', 'like', state.file, group.id, rollouts[0].key) : null,
      group.id && group.id !== title ? make('span', 'group-id', group.id, { title: 'group' }) : null,
    ]);
    const first = rollouts.slice(0, ROLLOUTS_AT_ONCE).map((it) => rolloutOf(it, !shared, [low, high]));
    return make('article', 'group', [
      make('h3', 'group-title', title, { title }), head, shared ? promptOf(rollouts[0].lines[0], true) : null, ...first,
      rollouts.length > first.length ? make('p', 'muted', `${count(rollouts.length - first.length)} more: filter by reward`) : null,
    ]);
  }

  function rewardsOf({ mean, low, high, scored, sent }) {
    const of = scored < sent ? ` of ${scored} of ${sent} scored` : '';
    return `mean reward ${number(mean)}${of} · ${number(low, 2)} to ${number(high, 2)}`;
  }

  // ------------------------------------------------------------- one rollout

  const callsOf = (rollout) => rollout.lines.reduce((sum, it) => sum + pieces(it.completion ?? '').filter((one) => one.kind === 'call').length, 0);

  function pill(reward, [low, high]) {
    const share = isNumber(reward) && high > low ? (reward - low) / (high - low) : null;
    return make('span', `reward ${share === null ? '' : share > 0.5 ? 'good' : 'poor'}`, number(reward), { title: 'reward' });
  }

  function rolloutOf(rollout, withPrompt, range) {
    const { lines } = rollout;
    const tokens = lines.reduce((sum, it) => sum + (it.tokens ?? 0), 0);
    const calls = callsOf(rollout);
    const reasons = [...new Set(lines.map((it) => it.failure && `failed: ${it.failure}`).filter(Boolean))];
    const left = new Map();
    for (const it of lines) if (it.dropped !== null && it.failure === null) left.set(it.dropped, (left.get(it.dropped) ?? 0) + 1);
    for (const [why, many] of left) reasons.push(`left out: ${lines.length > 1 && many < lines.length ? `${plural(many, 'turn')}, ` : ''}${why}`);
    const cut = lines.filter((it) => it.finish_reason === 'length').length;
    const facts = [
      lines.length > 1 ? plural(lines.length, 'turn') : null,
      plural(tokens, 'token'),
      calls ? plural(calls, 'tool call') : null,
      cut ? `cut off${lines.length > 1 ? ` ${cut}×` : ''}` : null,
      ...metricsOf(rollout).slice(0, 3),
    ].filter(Boolean).join(' · ');
    const last = lines.at(-1).completion;
    const said = pieces(last ?? '').filter((it) => it.kind !== 'mark').map((it) => (it.kind === 'call' ? `${it.name ?? 'call'}(${it.text})` : it.text));
    const excerpt = said.join(' ').replace(/\s+/g, ' ').trim() || bare(last ?? '');
    const summary = make('summary', '', [
      pill(rollout.reward, range),
      make('span', 'excerpt', excerpt.slice(0, 400) || (reasons.length ? 'no completion' : 'empty')),
      make('span', 'facts', facts),
      ...reasons.map((it) => make('span', 'trouble', it)),
    ]);
    const details = make('details', 'rollout', [summary], { 'data-rollout': `${rollout.group} ${rollout.key}` });
    const key = openKey(rollout.group, rollout.key);
    const fillIt = () => { if (details.children.length === 1) details.append(conversation(rollout, withPrompt)); };
    if (state.open.has(key)) {
      fillIt();
      details.open = true;
    }
    details.addEventListener('toggle', () => {
      if (details.open) state.open.add(key);
      else state.open.delete(key);
      if (details.open) fillIt();
    });
    return details;
  }

  const metricsOf = (rollout) => Object.entries(rollout.metrics ?? {}).map(([name, value]) => `${name} ${number(value)}`);

  // A completion without a word: blanks or marks alone, as they are.
  function bare(text) {
    if (!text) return '';
    return `${text.trim() ? 'marks' : 'white space'} alone: ${JSON.stringify(text.slice(0, 120))}`;
  }

  // Each text once: a turn that goes on has what came after the one before.
  function conversation(rollout, withPrompt) {
    const said = [];
    rollout.lines.forEach((line, at) => {
      const goesOn = isNumber(line.continues);
      if (at > 0 && !goesOn) said.push(make('p', 'muted again', line.call > 0 ? `call ${line.call + 1}` : 'a conversation of its own'));
      if (line.prompt !== null && (at > 0 || withPrompt)) {
        said.push(at > 0 && goesOn ? partsOf(line.prompt) : promptOf(line));
      }
      said.push(answerOf(line));
    });
    const facts = [rollout.id, ...metricsOf(rollout)].filter(Boolean).join(' · ');
    return make('div', 'conversation', [
      ...said, make('p', 'facts', [document.createTextNode(`${facts} · `), link('link to it', state.run, 'rollouts', state.file, rollout.group, rollout.key)]),
    ]);
  }

  const partsOf = (text) => make('div', 'between', turns(text).map((it) => turnOf(it.role, it.text)));

  function turnOf(role, text) {
    const [element, ...more] = clamped(make('div', 'text', piecesOf(text)), text);
    return make('div', 'turn', [make('span', 'role', role ?? '…'), element, ...more]);
  }

  // What a prompt asks last, in its pieces.
  function askedOf(line) {
    const said = turns(line.prompt);
    const last = said.findLast((it) => it.role === 'user' || it.role === 'tool') ?? said.at(-1);
    return { role: last.role, pieces: pieces(last.text) };
  }

  const wordsOf = (asked) => asked.pieces.map((it) => it.text.trim()).join('\n');

  // DSPy's marks of fields as their names; what it says of the answer's form is left out.
  function oneLine(asked) {
    const words = wordsOf(asked).split('\nRespond with the corresponding output fields')[0];
    return words.replace(/\[\[ ## (\w+) ## \]\]/g, '$1:').replace(/\s+/g, ' ').trim().slice(0, 400);
  }

  // Closed: what was asked last, unless a title above says it. Open: every turn, whose it was.
  function promptOf(line, isTitled = false) {
    const asked = askedOf(line);
    const isTool = asked.role === 'tool' || asked.pieces.some((it) => it.kind === 'result');
    const summary = make('summary', '', [
      make('span', 'role', isTool ? 'tool' : 'prompt'),
      isTitled ? null : make('span', 'asked', wordsOf(asked).slice(0, 600)),
      make('span', 'muted more', `${plural(line.prompt_tokens, 'token')}${line.prompt_cut ? ', beginning left out' : ''}`),
    ]);
    const details = make('details', 'prompt', [summary]);
    details.addEventListener('toggle', () => {
      if (details.open && details.children.length === 1) details.append(...turns(line.prompt).map((it) => turnOf(it.role, it.text)));
    });
    return details;
  }

  function answerOf(line) {
    const said = pieces(line.completion ?? '');
    const end = said.at(-1)?.kind === 'mark' ? said.pop().text : null;
    const facts = [
      isNumber(line.tokens) ? plural(line.tokens, 'token') : null,
      line.finish_reason && line.finish_reason !== 'stop' ? line.finish_reason : null,
      line.completion_cut ? 'end left out here' : null,
      isNumber(line.version) ? `v${line.version}` : null,
      isNumber(line.temperature) && line.temperature !== 1 ? `temperature ${number(line.temperature, 2)}` : null,
      line.completion === null || kindOf(state.file) !== 'step' ? null : line.dropped === null ? 'trained' : null,
    ].filter((it) => it !== null);
    const trouble = [line.failure && `failed: ${line.failure}`, line.dropped && `left out: ${line.dropped}`].filter(Boolean);
    const ends = [end === null ? null : make('span', 'mark', end), ...trouble.map((it) => make('span', 'trouble', it))].filter((it) => it !== null);
    const text = line.completion === null
      ? [make('p', 'muted', trouble.length ? 'no completion' : 'its text is not kept')]
      : said.length || !line.completion ? elementsOf(said) : [make('span', 'words', bare(line.completion))];
    return make('div', 'turn policy', [
      make('span', 'role', 'policy'),
      ...clamped(make('div', 'text', text), line.completion ?? ''),
      make('p', 'facts', [...facts, ...ends].flatMap((it, at) => (at ? [' · ', it] : [it]))),
    ]);
  }

  // A long one is open to so many lines, until somebody wants the rest.
  function clamped(element, text) {
    if (text.length < LONG_CHARACTERS && text.split('\n').length < LONG_LINES) return [element];
    element.classList.add('clamped');
    const more = button('all of it', () => {
      more.textContent = element.classList.toggle('clamped') ? 'all of it' : 'less of it';
    }, 'more');
    return [element, more];
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

  // ------------------------------------------------------------- over all steps

  const mostOf = (query) => (query.like === undefined ? MOST_HITS : MOST_LIKE);

  async function search(query) {
    const key = JSON.stringify(query);
    if (state.searched === key) return;
    Object.assign(state, { searched: key, shown: null });
    const turn = ++state.turn;
    if (query.text !== undefined && parts.search !== document.activeElement) parts.search.value = query.text;
    const words = query.like === undefined ? `“${query.text}”` : 'the same prompt';
    parts.host.replaceChildren(make('p', 'muted summary', `looking for ${words} …`));
    try {
      const hits = await hitsOf(query, turn);
      if (turn !== state.turn) return;
      const most = mostOf(query);
      const many = `${hits.length >= most ? `the newest ${count(most)}` : plural(hits.length, query.like === undefined ? 'text' : 'rollout')} with ${words} `;
      const found = !hits.length ? [empty('Nothing of what is kept.')] : query.like === undefined ? [hitsTable(hits)] : [followed(hits)];
      parts.host.replaceChildren(make('p', 'muted summary', [document.createTextNode(many), link('back to the steps', state.run, 'rollouts')]), ...found);
    } catch (error) {
      if (turn === state.turn) parts.host.replaceChildren(empty(`The search failed: ${error.message}.`));
    }
  }

  function hitsOf(query, turn) {
    if (kept) return searchFiles(query, turn);
    if (query.like === undefined) return load(`${state.run}/search`, { text: query.text });
    const [file, group, member] = query.like;
    return load(`${state.run}/like`, { file, group, member });
  }

  // On a disk there is no server that could look: one file after the other is read here.
  async function searchFiles({ text, like }, turn) {
    const [hits, most] = [[], mostOf({ like })];
    const needle = text?.toLowerCase();
    const prompt = like && (await load(`${state.run}/${like[0]}`)).lines.find((it) => (it.group ?? '') === like[1] && keyOf(it) === like[2])?.prompt;
    for (const { name } of [...state.files].reverse()) {
      const { lines } = await load(`${state.run}/${name}`);
      if (turn !== state.turn || hits.length >= most) break;
      if (like) {
        for (const { rollouts } of prompt ? groupsOf(lines) : []) {
          for (const it of rollouts) {
            if (it.lines[0].prompt !== prompt) continue;
            const last = it.lines.at(-1);
            hits.push({ file: name, ...last, key: [it.group, it.key], after: (last.completion ?? '').slice(0, 320) });
          }
        }
        continue;
      }
      for (const line of lines) {
        if (hits.length >= most) break;
        const where = ['completion', 'prompt', 'rollout', 'group', 'failure'].find((it) => (line[it] ?? '').toLowerCase().includes(needle));
        if (where === undefined) continue;
        const at = line[where].toLowerCase().indexOf(needle);
        const end = at + text.length;
        hits.push({
          file: name, ...line, key: [line.group ?? '', keyOf(line)], where,
          before: line[where].slice(Math.max(0, at - 80), at), found: line[where].slice(at, end), after: line[where].slice(end, end + 80),
        });
      }
    }
    return hits;
  }

  const placeOf = (hit) => link(titleOf(hit.file), state.run, 'rollouts', hit.file, ...hit.key);

  function hitsTable(hits) {
    const rows = hits.map((it) => [
      placeOf(it), number(it.reward), it.predictor ?? '', it.where,
      make('span', 'snippet', [document.createTextNode(it.before), make('mark', '', it.found), document.createTextNode(it.after)]),
    ]);
    return table([['step', 0], ['reward', 1], ['predictor', 0], ['in', 0], ['text', 0]], rows, 'hits');
  }

  // One example over the steps: its rewards in each, and its best answer's end.
  function followed(hits) {
    const files = new Map();
    for (const hit of hits) files.set(hit.file, [...(files.get(hit.file) ?? []), hit]);
    const rows = [...files.entries()].map(([, its]) => {
      const rollouts = [...its].sort((a, b) => order(a.reward, b.reward, true));
      const rewards = rollouts.map((it) => it.reward).filter(isNumber);
      const range = [Math.min(...rewards), Math.max(...rewards)];
      const mean = rewards.length ? rewards.reduce((sum, it) => sum + it, 0) / rewards.length : null;
      return [placeOf(rollouts[0]), number(mean), make('span', 'pills', rollouts.map((it) => pill(it.reward, range))), make('span', 'snippet', rollouts[0].after)];
    });
    return table([['step', 0], ['mean', 1], ['rewards', 0], ['the best one', 0]], rows, 'hits');
  }

  Object.assign(window.slipway, { rollouts: { begin, update, route, choose } });
})();
