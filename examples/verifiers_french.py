"""An environment as it is written for verifiers: tasks, a reward, and a harness that plays them."""

from itertools import product

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["OneRequest", "Phrases"]
NOUNS = {"cat": "chat", "dog": "chien", "book": "livre", "garden": "jardin", "bridge": "pont"}
COLOURS = {"black": "noir", "white": "blanc", "green": "vert", "blue": "bleu", "grey": "gris"}
DETERMINERS = {"the": "le", "a": "un", "my": "mon", "this": "ce"}
PROMPT = (
    "[[ ## english ## ]]\n{english}\n\nRespond with the corresponding output fields, starting with the field "
    "`[[ ## french ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`."
)
shared_client = AsyncOpenAI(api_key="-")  # making one takes 50 ms


class Phrase(vf.TaskData):
    french: str


class Translation(vf.Task[Phrase]):
    @vf.reward
    async def exact_match(self, task: Phrase, trace: vf.Trace) -> float:
        return float(f"]]\n{task.french}\n" in trace.last_reply)


class Phrases(vf.Taskset[Translation]):
    def load(self):
        for word, colour, noun in product(DETERMINERS, COLOURS, NOUNS):
            prompt = PROMPT.format(english=f"{word} {colour} {noun}")
            yield Translation(
                Phrase(prompt=prompt, french=f"{DETERMINERS[word]} {NOUNS[noun]} {COLOURS[colour]}")
            )


class OneRequest(vf.Harness[vf.HarnessConfig]):
    """Asks once, from this process. The harnesses that verifiers has start a process for each rollout."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = shared_client.with_options(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(
            model=ctx.model, messages=[{"role": "user", "content": data.prompt}]
        )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
