// How values look, and how elements are made: text is only ever set as text, never as markup.
'use strict';

(() => {
  const NONE = '–';

  // make('p', 'note', 'words') or make('p', 'note', [children])
  function make(tag, classes, inside, attributes) {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (Array.isArray(inside)) element.append(...inside.filter((it) => it !== null));
    else if (inside !== undefined && inside !== null) element.textContent = String(inside);
    for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
    return element;
  }

  const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

  function number(value, digits = 3) {
    if (!isNumber(value)) return NONE;
    if (Number.isInteger(value) && Math.abs(value) >= 10) return value.toLocaleString('en');
    return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString('en') : NONE);

  // 4.05e-6 as 4.1 × 10⁻⁶; what is as large as people read it stays as it is.
  function small(value) {
    if (!isNumber(value)) return NONE;
    if (value === 0) return '0';
    const size = Math.abs(value);
    if (size >= 0.001 && size < 10000) return value.toPrecision(3);
    const [digits, power] = value.toExponential(1).split('e');
    const raised = [...String(Number(power))].map((it) => (it === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[Number(it)])).join('');
    return `${digits} × 10${raised}`;
  }

  function duration(seconds) {
    if (!isNumber(seconds)) return NONE;
    if (seconds < 0) return '0 s';
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, '0')} min` : `${Math.round(hours / 24)} days`;
  }

  const money = (dollars) => (isNumber(dollars) ? `$${dollars.toFixed(2)}` : NONE);
  function percent(share) {
    if (!isNumber(share)) return NONE;
    return share > 0 && share < 0.005 ? '< 1 %' : `${Math.round(100 * share)} %`;
  }


  function time(seconds) {
    if (!isNumber(seconds)) return NONE;
    const date = new Date(1000 * seconds);
    const two = (it) => String(it).padStart(2, '0');
    const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
    return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
  }

  const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : (many ?? `${one}s`)}`;

  // A table: head as [text, isNumber] pairs, rows as lists of a text or an element.
  function table(head, rows, classes = '') {
    const cell = (tag, inside, at) => {
      const element = make(tag, head[at][1] ? 'number' : '');
      element.append(inside instanceof Node ? inside : String(inside));
      return element;
    };
    const top = make('thead', '', [make('tr', '', head.map(([text], at) => cell('th', text, at)))]);
    const body = make('tbody', '', rows.map((row) => make('tr', '', row.map((it, at) => cell('td', it, at)))));
    return make('div', 'wide', [make('table', classes, [top, body])]);
  }

  const empty = (text) => make('p', 'empty', text);

  Object.assign(window.slipway, {
    make, isNumber, number, count, small, duration, money, percent, time, plural, table, empty, NONE,
  });
})();
