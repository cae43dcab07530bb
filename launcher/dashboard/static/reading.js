// A model's own text, taken apart for reading: whose turn, which tool call, which thought. What has another
// form than these stays one piece of text. Knows nothing of the page.
'use strict';

(() => {
  // How families of models write whose turn it is: ChatML, Llama 3, Gemma, Phi.
  const TURNS = [
    /<\|im_start\|>([\w-]+)\n?([\s\S]*?)(?:<\|im_end\|>\n?|(?=<\|im_start\|>)|$)/g,
    /<\|start_header_id\|>([\w-]+)<\|end_header_id\|>\s*([\s\S]*?)(?:<\|eot_id\|>|<\|eom_id\|>|$)/g,
    /<start_of_turn>([\w-]+)\n?([\s\S]*?)(?:<end_of_turn>\n?|$)/g,
    /<\|(system|user|assistant|tool)\|>\n?([\s\S]*?)(?:<\|end\|>\n?|$)/g,
  ];
  const PIECES = new RegExp([
    '<think>(?<think>[\\s\\S]*?)(?:</think>|$)',
    '<tool_call>(?<call>[\\s\\S]*?)(?:</tool_call>|$)',
    '<tool_response>(?<result>[\\s\\S]*?)(?:</tool_response>|$)',
    '(?:\\[TOOL_CALLS\\]|<\\|python_tag\\|>)(?<rest>[\\s\\S]*?)(?=<\\||</s>|$)',
    '(?<mark><\\|[\\w-]+\\|>|<end_of_turn>|<eos>|<bos>|</s>)',
  ].join('|'), 'g');

  // [{role, text}], one at least; a beginning that was cut off has no role, nor has what nobody said a word in.
  function turns(text) {
    for (const form of TURNS) {
      const found = [...text.matchAll(form)];
      if (!found.length) continue;
      const before = text.slice(0, found[0].index).trim();
      const said = [
        ...(before ? [{ role: null, text: before }] : []),
        ...found.map((it) => ({ role: it[1], text: it[2].trim() })).filter((it) => it.text),
      ];
      if (said.length) return said;
    }
    return [{ role: null, text }];
  }

  // [{kind: 'text' | 'think' | 'call' | 'result' | 'mark', text, name}]
  function pieces(text) {
    const closed = text.indexOf('</think>');
    const opened = text.indexOf('<think>');
    if (closed >= 0 && (opened < 0 || opened > closed)) {  // the template itself began the thought
      return [...thought(text.slice(0, closed)), ...pieces(text.slice(closed + '</think>'.length))];
    }
    const found = [];
    let at = 0;
    for (const match of text.matchAll(PIECES)) {
      if (match.index > at) found.push({ kind: 'text', text: text.slice(at, match.index) });
      at = match.index + match[0].length;
      const { think, call, result, rest, mark } = match.groups;
      if (think !== undefined) found.push(...thought(think));
      else if (call !== undefined) found.push(...calls(call));
      else if (rest !== undefined) found.push(...calls(rest));
      else if (result !== undefined) found.push({ kind: 'result', text: result.trim() });
      else found.push({ kind: 'mark', text: mark });
    }
    if (at < text.length) found.push({ kind: 'text', text: text.slice(at) });
    return found.filter((it) => it.kind !== 'text' || it.text.trim());
  }

  const thought = (text) => (text.trim() ? [{ kind: 'think', text: text.trim() }] : []);

  function calls(text) {
    try {
      const said = JSON.parse(text);
      return (Array.isArray(said) ? said : [said]).map((it) => ({
        kind: 'call',
        name: typeof it?.name === 'string' ? it.name : null,
        text: written(it?.arguments ?? it?.parameters ?? it),
      }));
    } catch {  // not JSON: a form of another family, or cut off
      const named = text.match(/<function=([\w.-]+)>|"name"\s*:\s*"([^"]{1,80})"/);
      return [{ kind: 'call', name: named ? named[1] ?? named[2] : null, text: text.trim() }];
    }
  }

  // In one line where that is short.
  function written(value) {
    const lines = JSON.stringify(value, null, 1);
    const one = lines.replace(/\n\s*/g, ' ');
    return one.length <= 80 ? one : lines;
  }

  Object.assign(window.slipway, { turns, pieces });
})();
