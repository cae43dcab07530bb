// Where the page's data comes from: the run's endpoint while it lives, the files beside the page afterwards.
// A page on a disk may load nothing but scripts; each piece of its data is one, which calls slipwayData.
'use strict';

(() => {
  const kept = document.documentElement.dataset.kept === 'yes';
  const waiting = new WeakMap();  // who waits for a script's value: one for each load

  window.slipwayData = (name, value) => waiting.get(document.currentScript)?.(name, value);

  function fromScript(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement('script');
      waiting.set(script, (said, value) => { if (said === name) resolve(value); });
      script.src = `data/${name}.js`;
      const end = (why) => {  // a value that has come before stays
        script.remove();
        reject(new Error(why));
      };
      script.onload = () => end(`the file ${name} is damaged`);
      script.onerror = () => end(`there is no file ${name}`);
      document.head.append(script);
    });
  }

  async function fromEndpoint(name, query) {
    const asked = query ? `?${new URLSearchParams(query)}` : '';
    const answer = await fetch(`data/${name}.json${asked}`, { cache: 'no-store' });
    if (answer.status === 401) throw Object.assign(new Error('the link is needed again'), { closed: true });
    if (!answer.ok) throw new Error(`the endpoint answered ${answer.status}`);
    return answer.json();
  }

  window.slipway = { kept, load: (name, query) => (kept ? fromScript(name) : fromEndpoint(name, query)) };
})();
