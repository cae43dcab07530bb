// What is better read than drawn: where the run stands, its alarms, what was left out and why, its settings,
// the proofs, the machine.
'use strict';

(() => {
  const { make, isNumber, number, count, small, duration, money, percent, time, plural, table, empty, link, changed, NONE } = window.slipway;
  const PROOFS_AT_ONCE = 12;
  let allProofs = false;

  const tile = (name, value, below) => make('div', 'tile', [
    make('span', 'name', name), make('span', 'value', value), make('span', 'below', below),
  ]);

  function tiles(head, data) {
    const { steps, validations, columns } = data;
    const at = (name) => columns[name] ?? [];
    const rewarded = steps.map((step, place) => [step, at('reward')[place]]).filter(([, it]) => isNumber(it));
    const all = validations.filter((it) => it.name === 'score');
    const scored = all.filter((it) => it.compile === all.at(-1).compile);  // of the newest compile
    const best = scored.findLast((it) => it.best) ?? scored.reduce((one, it) => (one && one.score >= it.score ? one : it), null);
    const last = scored.at(-1);
    const found = [];
    const newest = rewarded.at(-1);
    found.push(tile('Reward', newest ? number(newest[1]) : NONE, newest ? since(newest[0], ...rewarded[0]) : 'no step was rewarded yet'));
    found.push(tile('Validation', last ? withError(last) : NONE, last
      ? `${since(last.version, scored[0].version, scored[0].score)}${best === last ? '' : ` · best ${withError(best)} at step ${best.version}`}`
      : 'none was told'));
    const untrained = data.empty_steps ? ` + ${count(data.empty_steps)} empty` : '';
    found.push(tile('Steps', `${count(head.standing.committed_step ?? steps.at(-1) ?? 0)}${untrained}`, stepsBelow(head)));
    const recent = at('tokens_per_second').slice(-10).filter(isNumber);
    const speed = recent.length ? recent.reduce((sum, it) => sum + it, 0) / recent.length : null;
    const took = at('seconds').at(-1);
    found.push(tile('Throughput', speed === null ? NONE : `${count(speed)} tok/s`,
      isNumber(took) ? `trained, last ${plural(recent.length, 'step')} · ${duration(took)} the newest` : 'known after two steps'));
    found.push(tile('Money', money(head.money.spent), moneyBelow(head)));
    found.push(head.run.live
      ? tile('Lease left', duration(head.lease.left_seconds), isNumber(head.lease.deadline_left_seconds)
        ? `deadline in ${duration(head.lease.deadline_left_seconds)}` : 'renewed all the time · no deadline')
      : tile('Ended after', head.run.ended ? duration(head.run.seconds) : NONE,
        head.run.down?.verified ? 'down: verified' : head.run.down ? 'down: NOT verified' : head.run.state));
    const host = document.getElementById('tiles');
    if (changed(host, found.map((it) => it.textContent))) host.replaceChildren(...found);
  }

  // What was seen, and what to do; `chosen`: the one whose flag was clicked.
  function alarms(all, run, chosen) {
    const panel = document.getElementById('alarms');
    if (!changed(panel, [all, run, chosen])) return;
    panel.hidden = !all.length;
    const isChosen = (it) => chosen !== null && it.name === chosen.name && it.step === chosen.step;
    document.getElementById('alarms-list').replaceChildren(...all.map((it) => make('div', `alarm ${isChosen(it) ? 'chosen' : ''}`, [
      make('span', 'name', `⚑ ${it.name}`),
      make('span', 'words', [
        document.createTextNode(`${it.text} · `), link(`its rollouts: step ${it.step}`, run, 'rollouts', it.step ? `step-${it.step}` : 'empty-0-1'),
        it.advice ? make('span', 'advice', it.advice) : null,
      ]),
    ])));
  }

  function settings(rows) {
    const host = document.getElementById('settings');
    if (!changed(host, rows)) return;
    if (!rows.length) return host.replaceChildren(empty('The run has recorded none.'));
    const shown = table([['setting', 0], ['value', 0], ['source', 0]], rows.map((it) => [it.name, JSON.stringify(it.value), it.source]), 'settings');
    shown.querySelectorAll('tbody tr').forEach((row, at) => { row.classList.toggle('differs', rows[at].source !== 'default'); });
    host.replaceChildren(shown);
  }

  const since = (step, first, began) => (step === first ? `at step ${step}` : `at step ${step} · began at ${number(began)}`);

  const withError = (it) => (isNumber(it.standard_error) ? `${number(it.score)} ±${number(it.standard_error)}` : number(it.score));

  function stepsBelow({ standing, runtime }) {
    const home = isNumber(standing.durable_step) ? `${count(standing.durable_step)} at home` : 'none at home yet';
    return isNumber(runtime?.version) ? `${home} · policy@v${runtime.version} is served` : home;
  }

  function moneyBelow({ money: it }) {
    if (!it.per_hour) return it.unpriced ? 'your own GPUs: no price' : 'free: nothing is rented';
    const most = isNumber(it.budget) ? `budget ${money(it.budget)}` : isNumber(it.at_most) ? `at most ${money(it.at_most)}` : null;
    return [`${money(it.per_hour)}/h`, most].filter(Boolean).join(' · ');
  }

  function dropped(data, run, files) {
    const host = document.getElementById('dropped');
    if (!changed(host, [data.dropped, data.empty, data.steps.at(-1), run, files.length])) return;
    const sums = Object.entries(data.dropped).map(([reason, values]) => {
      const seen = values.map((it, at) => [it ?? 0, data.steps[at]]).filter(([it]) => it > 0);
      return { reason, count: seen.reduce((sum, [it]) => sum + it, 0), steps: seen.length, last: seen.at(-1)?.[1] };
    });
    const trained = (data.columns['counts.trained'] ?? []).reduce((sum, it) => sum + (it ?? 0), 0);
    const left = sums.reduce((sum, it) => sum + it.count, 0);
    placeDropped(left > 0 || data.empty.length > 0);
    const texts = files.findLast((it) => it.kind === 'empty');
    const none = data.empty.length ? [make('p', 'missing', [
      document.createTextNode(`${emptySteps(data.empty)} `), texts ? link('its rollouts', run, 'rollouts', texts.name) : null,
    ])] : [];
    if (!trained && !left) return host.replaceChildren(...none, empty('No step has counted its samples yet.'));
    const rows = sums.sort((a, b) => b.count - a.count).map((it) => [
      it.reason, count(it.count), bar(it.count / (trained + left)), plural(it.steps, 'step'), count(it.last),
    ]);
    const summary = make('p', 'muted summary', `${count(trained)} of ${plural(trained + left, 'sample')} trained (${percent(trained / (trained + left))})`);
    host.replaceChildren(summary, ...none, rows.length
      ? table([['reason', 0], ['samples', 1], ['share', 0], ['in', 1], ['last in step', 1]], rows)
      : empty('Nothing was left out.'));
  }

  // Trouble stands above the curves, under the alarms.
  function placeDropped(isTrouble) {
    const panel = document.getElementById('left-out');
    if (isTrouble) document.getElementById('charts').before(panel);
    else document.getElementById('machine').closest('.pair').prepend(panel);
  }

  const emptySteps = (all) => `${plural(all.length, 'step')} had nothing to train, the last after step ${count(all.at(-1).after)}: ${all.at(-1).why}`;

  function bar(share) {
    const fill = make('span', 'fill');
    fill.style.width = `${Math.max(1, 100 * share)}%`;
    return make('span', 'share', [make('span', 'track', [fill]), make('span', '', percent(share))]);
  }

  function proofs(all) {
    const host = document.getElementById('proofs');
    if (!changed(host, [all, allProofs])) return;
    if (!all.length) return host.replaceChildren(empty('No version has been proven yet: the first proof comes before the first rollout.'));
    const newest = [...all].reverse();
    const shown = allProofs ? newest : newest.slice(0, PROOFS_AT_ONCE);
    const rows = shown.map((it) => [
      it.name ?? (it.version === 0 ? 'the base' : `version ${it.version ?? NONE}`),
      make('span', `outcome ${['published', 'admitted', 'recalled'].includes(it.outcome) ? 'good' : 'poor'}`, it.outcome ?? NONE),
      isNumber(it.modules) ? `${count(it.modules)} on ${plural(it.engines ?? 1, 'engine')}` : NONE,
      count(it.probe_tokens), small(it.max_error), small(it.mean_error), small(it.effect), duration(it.seconds),
      it.sha256 ? make('code', '', it.sha256.slice(0, 12), { title: it.sha256 }) : NONE,
      it.reason ?? it.error ?? it.detail ?? '',
    ]);
    const head = [
      ['version', 0], ['outcome', 0], ['tensors compared', 0], ['probe tokens', 1], ['largest |Δ logprob|', 1],
      ['mean |Δ logprob|', 1], ['effect of the adapter', 1], ['took', 1], ['sha256 of the adapter', 0], ['why', 0],
    ];
    const hasWhy = rows.some((row) => row.at(-1));
    const words = 'Each version is loaded into every engine, compared tensor by tensor with its file, and asked for the '
      + 'logprobs of a probe: served and trained differ by Δ.';
    host.replaceChildren(
      make('p', 'muted summary', words),
      table(hasWhy ? head : head.slice(0, -1), hasWhy ? rows : rows.map((row) => row.slice(0, -1)), 'proofs'),
      ...(newest.length > PROOFS_AT_ONCE ? [toggle(all)] : []),
    );
  }

  function toggle(all) {
    const it = make('button', 'more', allProofs ? 'the newest alone' : `all ${count(all.length)}`, { type: 'button' });
    it.addEventListener('click', () => { allProofs = !allProofs; proofs(all); });
    return it;
  }

  function machine(head) {
    const { run, money: it, lease, runtime, door } = head;
    const rows = [
      ['where', run.where || NONE],
      ['began', time(run.begun)],
      ['price', it.per_hour ? `${money(it.per_hour)}/h` : it.unpriced ? 'none is known' : 'nothing is rented'],
      ['spent', run.lives > 1 ? `${money(it.spent)} in ${run.lives} lives` : money(it.spent)],
      ['at most', isNumber(it.at_most) && it.per_hour ? money(it.at_most) : NONE],
      ['budget', isNumber(it.budget) ? `${money(it.budget)}, ${it.budget > it.spent ? money(it.budget - it.spent) : 'nothing'} left` : 'none'],
      ['deadline', isNumber(lease.deadline_seconds)
        ? `${duration(lease.deadline_seconds)}${run.live ? `, ${duration(lease.deadline_left_seconds)} left` : ''}` : 'none'],
      ['lease', `${duration(lease.seconds)}${run.live && isNumber(lease.left_seconds) ? `, ${duration(lease.left_seconds)} left` : ''}`],
    ];
    if (door) {
      const way = isNumber(door.latency_ms) ? ` · ${door.latency_ms.toFixed(1)} ms to the runtime` : '';
      rows.push(['endpoint', `${count(door.requests)} requests, ${count(door.replays)} asked again${way}`]);
    }
    for (const child of runtime?.children ?? []) {
      const again = child.restarts ? `, ${plural(child.restarts, 'restart')}` : '';
      rows.push([child.name, `${child.state}${again}${child.detail ? ` · ${child.detail}` : ''}`]);
    }
    if (!run.live) rows.push(['down', run.down ? `${run.down.verified ? 'verified' : 'NOT VERIFIED'}: ${run.down.detail}` : NONE]);
    if (run.reason) rows.push(['reason', run.why ? `${run.reason}: ${run.why}` : run.reason]);
    const host = document.getElementById('machine');
    if (!changed(host, rows)) return;
    host.replaceChildren(make('dl', '', rows.flatMap(([name, value]) => [make('dt', '', name), make('dd', '', value)])));
  }

  Object.assign(window.slipway, { tables: { tiles, alarms, settings, dropped, proofs, machine } });
})();
