// What is better read than drawn: where the run stands, what was left out and why, the proofs, the machine.
'use strict';

(() => {
  const { make, isNumber, number, count, small, duration, money, percent, time, plural, table, empty, NONE } = window.slipway;
  const PROOFS_AT_ONCE = 12;
  let allProofs = false;

  const tile = (name, value, below) => make('div', 'tile', [
    make('span', 'name', name), make('span', 'value', value), make('span', 'below', below),
  ]);

  function tiles(head, data) {
    const { steps, validations } = data;
    const last = steps.at(-1);
    const rewarded = steps.filter((it) => isNumber(it.reward));
    const scored = validations.filter((it) => it.name === 'score');
    const best = scored.findLast((it) => it.best) ?? scored.reduce((one, it) => (one && one.score >= it.score ? one : it), null);
    const found = [];
    const newest = rewarded.at(-1);
    found.push(tile('Reward', newest ? number(newest.reward) : NONE,
      newest ? since(newest.step, rewarded[0].step, rewarded[0].reward) : 'no step was rewarded yet'));
    found.push(tile('Validation', best ? withError(best) : NONE,
      best ? `best, ${since(best.version, scored[0].version, scored[0].score)}` : 'none was told'));
    found.push(tile('Steps', count(head.standing.committed_step ?? last?.step ?? 0), stepsBelow(head)));
    const recent = steps.slice(-10).map((it) => it.tokens_per_second).filter(isNumber);
    const speed = recent.length ? recent.reduce((sum, it) => sum + it, 0) / recent.length : null;
    found.push(tile('Throughput', speed === null ? NONE : `${count(speed)} tok/s`,
      isNumber(last?.seconds) ? `sampled, last ${plural(recent.length, 'step')} · ${duration(last.seconds)} the newest` : 'known after two steps'));
    found.push(tile('Money', money(head.money.spent), moneyBelow(head)));
    found.push(head.run.live
      ? tile('Lease left', duration(head.lease.left_seconds), isNumber(head.lease.deadline_left_seconds)
        ? `deadline in ${duration(head.lease.deadline_left_seconds)}` : 'renewed all the time · no deadline')
      : tile('Ended after', head.run.ended ? duration(head.run.seconds) : NONE,
        head.run.down?.verified ? 'down: verified' : head.run.state));
    document.getElementById('tiles').replaceChildren(...found);
  }

  const since = (step, first, began) => (step === first ? `at step ${step}` : `at step ${step} · began at ${number(began)}`);

  const withError = (it) => (isNumber(it.standard_error) ? `${number(it.score)} ±${number(it.standard_error)}` : number(it.score));

  function stepsBelow({ standing, runtime }) {
    const home = isNumber(standing.durable_step) ? `${count(standing.durable_step)} at home` : 'none at home yet';
    return isNumber(runtime?.version) ? `${home} · policy@v${runtime.version} is served` : home;
  }

  function moneyBelow({ money: it }) {
    if (!it.per_hour) return 'free: nothing is rented';
    const most = isNumber(it.budget) ? `budget ${money(it.budget)}` : isNumber(it.at_most) ? `at most ${money(it.at_most)}` : null;
    return [`${money(it.per_hour)}/h`, most].filter(Boolean).join(' · ');
  }

  function dropped(steps) {
    const host = document.getElementById('dropped');
    const sums = new Map();
    let samples = 0;
    let trained = 0;
    for (const step of steps) {
      samples += step.samples ?? 0;
      trained += step.trained ?? 0;
      for (const [reason, it] of Object.entries(step.dropped)) {
        const sum = sums.get(reason) ?? { count: 0, steps: 0, last: 0 };
        sums.set(reason, { count: sum.count + it, steps: sum.steps + 1, last: step.step });
      }
    }
    if (!samples && !sums.size) return host.replaceChildren(empty('No step has counted its samples yet.'));
    const all = trained + [...sums.values()].reduce((sum, it) => sum + it.count, 0);
    const rows = [...sums.entries()].sort((a, b) => b[1].count - a[1].count).map(([reason, it]) => [
      reason, count(it.count), bar(it.count / all), plural(it.steps, 'step'), count(it.last),
    ]);
    const summary = make('p', 'muted summary', `${count(trained)} of ${plural(all, 'sample')} trained (${percent(all ? trained / all : null)})`);
    host.replaceChildren(summary, rows.length
      ? table([['reason', 0], ['samples', 1], ['share', 0], ['in', 1], ['last in step', 1]], rows)
      : empty('Nothing was left out.'));
  }

  function bar(share) {
    const fill = make('span', 'fill');
    fill.style.width = `${Math.max(1, 100 * share)}%`;
    return make('span', 'share', [make('span', 'track', [fill]), make('span', '', percent(share))]);
  }

  function proofs(all) {
    const host = document.getElementById('proofs');
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
      ['price', it.per_hour ? `${money(it.per_hour)}/h` : 'nothing is rented'],
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
    document.getElementById('machine').replaceChildren(
      make('dl', '', rows.flatMap(([name, value]) => [make('dt', '', name), make('dd', '', value)])),
    );
  }

  Object.assign(window.slipway, { tables: { tiles, dropped, proofs, machine } });
})();
