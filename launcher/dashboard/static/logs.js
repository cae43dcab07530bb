// The run's logs, as they grow: a log's end first, then what is new.
'use strict';

(() => {
  const { make, choice, fill, field, checkbox, address, kept, load } = window.slipway;
  const MOST_CHARACTERS = 2 ** 20;
  const FIRST = ['program', 'launch', 'trainer', 'gateway'];
  const state = { run: null, name: null, text: '', end: null, follow: true, filter: '', asked: 0 };
  const parts = {};

  function begin() {
    parts.choice = choice('log', [], (name) => { location.hash = address(state.run, 'logs', name); });
    const follow = checkbox('follow', true, (on) => { state.follow = on; render(); });
    follow.label.hidden = kept;
    const filter = field('lines with …', (text) => { state.filter = text.toLowerCase(); render(); });
    document.getElementById('logs-controls').append(parts.choice, follow.label, filter);
    parts.host = document.getElementById('log');
  }

  // Shows a log of the run, the one that explains most without a name.
  async function route(run, name) {
    const logs = await load(`${run}/logs`);
    const names = logs.map((it) => it.name);
    const shown = names.includes(name) ? name : FIRST.find((it) => names.includes(it)) ?? names[0];
    fill(parts.choice, names.map((it) => [it, it]), shown);
    if (shown === undefined) {
      parts.host.textContent = 'There is no log yet.';
      return;
    }
    if (run !== state.run || shown !== state.name) Object.assign(state, { run, name: shown, text: '', end: null });
    await more();
  }

  // What has come since; all of its end at first, and again when too much has come.
  async function more() {
    if (state.name === null || (kept && state.end !== null)) return;
    const asked = ++state.asked;
    let piece = null;
    do {
      piece = await load(`${state.run}/log-${state.name}`, state.end === null ? undefined : { start: state.end });
      if (asked !== state.asked) return;
      if (state.end !== null && piece.size - piece.end > MOST_CHARACTERS) {
        state.end = null;
        continue;
      }
      const before = piece.anew ? '' : state.text;
      const cut = piece.anew && piece.start > 0 ? `… ${piece.start.toLocaleString('en')} bytes before: launch logs ${state.run} --which ${state.name}\n` : '';
      state.text = (before + cut + piece.text).slice(-MOST_CHARACTERS);
      state.end = piece.end;
      if (piece.text || piece.anew) render();
    } while (!kept && piece.text && piece.end < piece.size);
  }

  function render() {
    const { host } = parts;
    const below = host.scrollTop + host.clientHeight > host.scrollHeight - 30;
    const lines = state.filter ? state.text.split('\n').filter((it) => it.toLowerCase().includes(state.filter)) : null;
    const shown = lines ? lines.join('\n') || 'No line has that.' : state.text || 'It is empty.';
    host.replaceChildren(make('span', '', shown));
    if (state.follow && !kept && below) host.scrollTop = host.scrollHeight;
  }

  Object.assign(window.slipway, { logs: { begin, route, more } });
})();
