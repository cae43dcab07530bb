"""An environment by OpenEnv's interfaces: two phrases an episode, each with a reward for its French.

    python server.py 8000

OpenEnv's own server serves it, on 127.0.0.1. A reward is the share of the words that are right.
"""

import random
import sys

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_app

NOUNS = {"house": "maison", "table": "table", "car": "voiture", "door": "porte", "flower": "fleur"}
COLOURS = {"black": "noire", "white": "blanche", "green": "verte", "blue": "bleue", "grey": "grise"}
DETERMINERS = {"the": "la", "a": "une", "my": "ma", "this": "cette"}
PHRASES = [
    (f"{word} {colour} {noun}", [DETERMINERS[word], NOUNS[noun], COLOURS[colour]])
    for word in DETERMINERS
    for colour in COLOURS
    for noun in NOUNS
]
# The form of a prompt that the tiny model was taught.
PROMPT = (
    "[[ ## english ## ]]\n{}\n\nRespond with the corresponding output fields, starting with the field "
    "`[[ ## french ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`."
)


class Answer(Action):
    text: str


class Question(Observation):
    prompt: str = ""


class Quiz(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True  # a session has an environment of its own
    state = State()

    def reset(self, seed=None, split="train", **options):
        """The same seed asks for the same phrases. Every other phrase is held out."""
        self.phrases = random.Random(seed).sample(PHRASES[split != "train" :: 2], 2)
        return self.ask(reward=None)

    def step(self, action, **options):
        _, french = self.phrases.pop()
        said = action.text.partition("## ]]")[2].partition("[[")[0].split()
        right = sum(a == b for a, b in zip(said, french, strict=False))
        return self.ask(reward=right / max(len(said), len(french)) / 2)

    def ask(self, reward):
        prompt = PROMPT.format(self.phrases[-1][0]) if self.phrases else ""
        return Question(prompt=prompt, reward=reward, done=not self.phrases)


app = create_app(Quiz, Answer, Question, max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
