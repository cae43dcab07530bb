// The page: the address says which run and which view; asks for the run's head every two seconds, for its
// steps and texts when they have changed, and shows them.
'use strict';

(() => {
  const { kept, load, charts, rollouts, runs, logs, tables, duration, time, link, address } = window.slipway;
  const EVERY_MS = 2000;
  const ALL_RUNS_MS = 10000;
  const MORE_MS = 300;
  const OF_RUN = { overview: 'Overview', rollouts: 'Rollouts', logs: 'Logs', settings: 'Settings', proofs: 'Proofs' };
  const place = { run: null, view: null, rest: [] };
  let known = { current: null, runs: [] };
  // The run that is shown: its head, its steps, its files of texts, its settings.
  let shown = null;
  let chosen = null;  // the alarm whose flag was clicked
  let next = null;
  let turn = 0;  // what an older look still brings is not shown
  let ended = false;  // the endpoint has said how the run ended, and is closed
  let hearing = false;

  // ------------------------------------------------------------- the address

  function read() {
    const path = location.hash.replace(/^#\/?/, '');
    const [first, view, ...rest] = path ? path.split('/').map(decoded) : [];
    if (first === 'runs' || first === 'compare') return { run: null, view: first, rest: [view, ...rest].filter(Boolean) };
    const run = known.runs.find((it) => it.id === first || it.label === first)?.id ?? known.current;
    if (!run) return { run: null, view: 'runs', rest: [] };
    return { run, view: OF_RUN[view] ? view : 'overview', rest: OF_RUN[view] ? rest : [] };
  }

  function decoded(part) {
    try {
      return decodeURIComponent(part);
    } catch {  // typed by hand
      return part;
    }
  }

  async function follow() {
    const { run, view, rest } = read();
    if (run !== place.run) chosen = null;
    if (shown?.run !== run) shown = null;
    Object.assign(place, { run, view, rest });
    for (const it of document.querySelectorAll('[data-view]')) it.hidden = it.dataset.view !== view;
    showViews();
    if (run === null) showAll();
    if (view === 'rollouts') rollouts.route(run, rest);
    await look();
  }

  function showViews() {
    const { run, view } = place;
    const host = document.getElementById('views');
    const several = known.runs.length > 1 || !known.current;
    const found = run ? Object.entries(OF_RUN).map(([key, text]) => [key, text, address(run, key)]) : [];
    if (several || !run) found.push(['runs', 'All runs', address('runs')]);
    if (view === 'compare') found.push(['compare', 'Compared', location.hash]);
    const names = found.map(([key]) => key).join();
    if (host.dataset.names !== names) {
      host.dataset.names = names;
      host.replaceChildren(...found.map(([key, text]) => Object.assign(link(text, key), { id: `view-${key}` })));
    }
    for (const [key, , href] of found) {
      const element = document.getElementById(`view-${key}`);
      element.setAttribute('href', href);
      if (key === view) element.setAttribute('aria-current', 'page');
      else element.removeAttribute('aria-current');
    }
    host.hidden = found.length < 2;
  }

  function showAll() {
    document.title = 'Slipway';
    document.getElementById('label').textContent = 'Slipway';
    document.getElementById('state').hidden = true;
    document.getElementById('about').textContent = known.texts === true && kept ? 'the runs of this report' : 'every run on this computer, ended or alive';
    document.getElementById('footer').textContent = kept
      ? `Kept on ${time(known.now)}. Everything here is in this folder; nothing is asked for from elsewhere.` : '';
  }

  // ------------------------------------------------------------- looking

  async function look() {
    const mine = ++turn;
    clearTimeout(next);
    next = null;
    let pause = EVERY_MS;
    try {
      if (place.run === null) {
        pause = ALL_RUNS_MS;
        await lookAtAll(mine);
      } else if (ended && place.run === known.current && shown) {
        await show(mine);
        return;
      } else {
        pause = await lookAtRun(place.run, mine);
      }
      if (mine !== turn) return;
      notice(null);
    } catch (error) {
      if (mine !== turn) return;
      if (shown !== null && place.run === shown.run) await show(mine).catch(() => {});
      notice(troubleOf(error));
    }
    const over = kept || (shown !== null && place.run === shown.run && isOver(shown.head.run));
    if (mine === turn && !over) next = setTimeout(look, document.hidden ? 5 * pause : pause);
  }

  async function lookAtRun(run, mine) {
    const head = await load(`${run}/run`);
    if (mine !== turn) return EVERY_MS;
    const found = shown?.run === run ? { ...shown, head } : { run, head, data: null, texts: null, settings: null };
    if (found.data === null || found.data.revision !== head.revision) {
      found.data = await load(`${run}/steps`);
      found.settings = null;  // a step may have others, and so may the program
    }
    if (found.texts === null || found.texts.more || found.texts.revision !== head.texts) found.texts = await load(`${run}/texts`);
    if (mine !== turn) return EVERY_MS;
    if (found.data !== shown?.data || found.texts !== shown?.texts) found.drawn = charts.withTexts(found.data, found.texts);
    const again = found.data !== shown?.data || found.texts !== shown?.texts || shown?.run !== run;
    shown = found;
    if (again) rollouts.update(run, found.drawn, found.texts);
    await show(mine);
    if (head.run.live && run === known.current && !kept) hearEnd(run);
    return found.texts.more ? MORE_MS : EVERY_MS;
  }

  // The endpoint answers this when the run has ended, and closes then: no look every two seconds would see it.
  async function hearEnd(run) {
    if (hearing || ended) return;
    hearing = true;
    try {
      const last = await load(`${run}/end`);
      ended = true;
      const drawn = charts.withTexts(last.steps, last.texts);
      if (place.run !== run) return;
      const mine = ++turn;
      clearTimeout(next);
      shown = { run, head: last.run, data: last.steps, texts: last.texts, drawn, settings: last.settings };
      rollouts.update(run, drawn, last.texts);
      await show(mine);
      notice(null);
      document.getElementById('footer').textContent = `The run has ended and its endpoint is closed: launch open ${last.run.run.label} shows all that is kept.`;
    } catch { /* the link to the endpoint broke: the next look says so, or waits anew */ } finally {
      hearing = false;
    }
  }

  // A run that is proven to be down does not change any more.
  const isOver = (run) => !run.live && run.down !== null;

  async function lookAtAll(mine) {
    if (!kept) {
      const found = await load('runs');
      if (mine !== turn) return;
      known = { ...known, ...found };
    }
    runs.update(known.runs, kept && known.texts === true);
    showAll();
    if (place.view === 'compare') await runs.compare(place.rest);
    else runs.index();
  }

  function troubleOf(error) {
    if (error.closed) return 'This page needs a new link: type launch open in a terminal.';
    if (kept) return `Something of this folder cannot be read: ${error.message}.`;
    if (error instanceof TypeError && error.message.includes('fetch')) {
      return 'The endpoint does not answer; what is here is from before. Is the run over? Then launch open shows what is kept.';
    }
    return `What is here is from before: ${error.message}.`;
  }

  async function show(mine) {
    const { run, head, drawn } = shown;
    showHead(head);
    if (place.view === 'overview') {
      tables.tiles(head, drawn);
      tables.alarms(drawn.alarms, run, chosen);
      charts.overview(drawn, head.run.live);
      tables.dropped(drawn, run, shown.texts.files);
      tables.machine(head);
    } else if (place.view === 'logs') {
      if (window.slipway.hasTexts) await logs.route(run, place.rest[0]);
      else document.getElementById('log').textContent = `The logs of a run are on its own page: launch open ${run}`;
    } else if (place.view === 'settings') {
      shown.settings ??= await load(`${run}/settings`);
      if (mine === turn) tables.settings(shown.settings);
    } else if (place.view === 'proofs') tables.proofs(drawn.proofs);
  }

  function notice(text) {
    const host = document.getElementById('notice');
    host.hidden = text === null;
    host.textContent = text ?? '';
  }

  function showHead(head) {
    const { run } = head;
    const live = run.live && !kept;
    const state = run.live ? head.runtime?.phase ?? run.state : run.down?.verified ? 'ended' : run.state;
    const pill = document.getElementById('state');
    pill.hidden = false;
    pill.textContent = live ? `live · ${state}` : run.live ? `as it was at ${time(head.now)}` : state;
    pill.className = `pill ${!live ? '' : state === 'ready' || state === 'work' ? 'good' : 'busy'}`;
    document.title = `${run.label} · Slipway`;
    document.getElementById('label').textContent = run.label;
    const since = run.live ? `${duration(run.seconds)} so far` : endOf(run);
    document.getElementById('about').textContent = [
      run.label === run.id ? null : run.id, run.model, run.where, since, run.command || 'the endpoint alone',
    ].filter(Boolean).join(' · ');
    if (ended && run.id === known.current) return;
    document.getElementById('footer').textContent = kept
      ? `Kept on ${time(head.now)}. Everything here is in this folder; nothing is asked for from elsewhere.`
      : 'Everything here comes from the run\'s own endpoint on this computer; nothing is asked for from elsewhere.';
  }

  // As the terminal says it.
  function endOf(run) {
    const down = run.down === null ? null : run.down.verified ? 'down: verified' : 'down: NOT verified';
    return [run.ended ? `ended after ${duration(run.seconds)}` : run.state, run.ended ? time(run.ended) : null, run.reason, down].filter(Boolean).join(', ');
  }

  async function begin() {
    for (const part of [rollouts, runs, logs]) part.begin();
    try {
      known = await load('runs');
    } catch (error) {
      notice(troubleOf(error));
      return;
    }
    window.slipway.hasTexts = known.texts ?? true;
    window.slipway.whenStepChosen((step, chart) => rollouts.choose(step, chart === 'validation' ? 'validation' : 'step'));
    window.slipway.whenFlagChosen(({ name, x }) => {
      chosen = { name, step: x };
      tables.alarms(shown.drawn.alarms, shown.run, chosen);
      document.querySelector('.alarm.chosen')?.scrollIntoView({ block: 'center' });
    });
    window.addEventListener('hashchange', follow);
    // A link to the address that is already there leads there again.
    document.addEventListener('click', (event) => {
      if (event.target.closest('a')?.getAttribute('href') === location.hash) follow();
    });
    document.addEventListener('visibilitychange', () => { if (!document.hidden && next !== null) look(); });
    if (!location.hash) history.replaceState(null, '', known.current ? address(known.current, 'overview') : '#/runs');
    await follow();
  }

  begin();
})();
