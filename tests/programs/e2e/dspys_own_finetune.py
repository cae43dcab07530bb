"""DSPy's own BootstrapFinetune, as it comes: the tiny model learns from what a larger one answered rightly.

launch -- python dspys_own_finetune.py SEED

The larger one is a server of this process: it knows the French of most phrases, and gives one in five back in
English, which the metric has to leave out. What is trained and how much is by DSPy's defaults and the run's.
Leaves the held-out score before and after in `dspys_own.json` in the run's folder, and the name of what came
out.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import dspy

from launcher.client import PolicyLM, connect
from runtime.tiny.chat import completion
from runtime.tiny.grammar import Phrase, exact, held_out_phrases, training_phrases

PHRASES, HELD_OUT = 240, 100
UNKNOWN_EVERY = 5


def examples(phrases: list[Phrase]) -> list[dspy.Example]:
    return [dspy.Example(english=it.english, french=it.french).with_inputs("english") for it in phrases]


def right(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return exact(prediction.french, example.french)


class Larger:
    """An OpenAI-like server that answers with the French it knows, and otherwise with what it was asked."""

    def __init__(self, phrases: list[Phrase]) -> None:
        self.asked: list[str] = []
        known = {it.english: it.french for number, it in enumerate(phrases) if number % UNKNOWN_EVERY}
        owner = self

        class Door(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                said: str = body["messages"][-1]["content"]
                english = said.partition("[[ ## english ## ]]\n")[2].partition("\n\n")[0]
                owner.asked.append(english)
                self._answer(body["model"], completion("french", known.get(english, english)))

            def _answer(self, model: str, text: str) -> None:
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
                answer = {"id": "larger", "object": "chat.completion", "created": 0, "model": model}
                sent = json.dumps(answer | {"choices": [choice]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *words: Any) -> None:  # noqa: A002 - as http.server calls it
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{server.server_address[1]}/v1"


def main() -> None:
    seed = int(sys.argv[1])
    phrases = training_phrases(PHRASES, seed)
    run, larger = connect(), Larger(phrases)
    student: Any = dspy.Predict("english -> french")
    student.set_lm(PolicyLM(run, max_tokens=64, temperature=0.0))
    teacher: Any = dspy.Predict("english -> french")
    teacher.set_lm(dspy.LM("openai/larger", api_base=larger.address, api_key="larger", cache=False))
    evaluate = dspy.Evaluate(devset=examples(held_out_phrases(HELD_OUT)), metric=right, num_threads=16)
    before = evaluate(student).score
    optimizer = dspy.BootstrapFinetune(metric=right, train_kwargs={"seed": seed}, num_threads=8)
    taught: Any = optimizer.compile(student, trainset=examples(phrases), teacher=teacher)
    answered = len(taught.lm.history)
    after = evaluate(taught).score
    ends = [it["response"].finish_reason for it in taught.lm.history[answered:]]
    found = {
        "before": before, "after": after, "model": taught.lm.model, "version": run.version,
        "ended": ends.count("stop"), "judged": len(ends), "asked": len(larger.asked),
        "held_out_asked": len(set(larger.asked) & {it.english for it in held_out_phrases(HELD_OUT)}),
    }  # fmt: skip
    assert run.run_dir is not None
    (run.run_dir / "dspys_own.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
