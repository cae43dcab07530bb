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

  // With so many digits, or as few as tell a smaller one from 0.
  const fine = (value, digits) => (isNumber(value) && value !== 0 && Math.abs(value) < 10 ** -digits ? small(value) : number(value, digits));

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

  function button(text, press, classes = '', attributes = {}) {
    const element = make('button', classes, text, { type: 'button', ...attributes });
    element.addEventListener('click', press);
    return element;
  }

  // A choice among [value, text] pairs.
  function choice(label, options, change) {
    const element = make('select', '', options.map(([value, text]) => new Option(text, value)), { 'aria-label': label });
    element.addEventListener('change', () => change(element.value));
    return element;
  }

  // The options of a choice, replaced only where they differ: it may be open.
  function fill(element, options, value) {
    const key = JSON.stringify(options);
    if (element.dataset.options !== key) {
      element.replaceChildren(...options.map(([it, text]) => new Option(text, it)));
      element.dataset.options = key;
    }
    element.value = value;
  }

  // Whether what an element shows of `input` is to be made anew: focus, selection and scroll survive else.
  const shownAs = new WeakMap();
  function changed(element, input) {
    const key = JSON.stringify(input);
    if (shownAs.get(element) === key) return false;
    shownAs.set(element, key);
    return true;
  }

  // A field to type into; `change` hears of it once nobody has typed for a moment.
  function field(label, change, attributes = {}) {
    const element = make('input', '', null, { type: 'search', placeholder: label, 'aria-label': label, size: Math.max(20, label.length + 4), ...attributes });
    let waiting = null;
    element.addEventListener('input', () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => change(element.value.trim()), 250);
    });
    return element;
  }

  function checkbox(text, on, change) {
    const box = make('input', '', null, { type: 'checkbox' });
    box.checked = on;
    box.addEventListener('change', () => change(box.checked));
    return { box, label: make('label', '', [box, document.createTextNode(text)]) };
  }

  // The address of a view: #/slip-12345678/rollouts/step-7/r-1
  const address = (...parts) => `#/${parts.map(encodeURIComponent).join('/')}`;

  const link = (text, ...parts) => make('a', '', text, { href: address(...parts) });

  Object.assign(window.slipway, {
    make, isNumber, number, count, small, duration, money, percent, time, plural, table, empty, NONE,
    fine, button, choice, fill, changed, field, checkbox, address, link,
  });
})();
