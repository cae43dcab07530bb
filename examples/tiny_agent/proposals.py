"""What DSPy's prompt optimisers ask of a model, and what the small one answers: descriptions, instructions.

MIPROv2's proposer, SIMBA's feedback and GEPA's reflection, by DSPy's own signatures. Neighbours: `tasks.py`
has the tasks that they are asked about. Knows nothing of scores: the optimisers try what is proposed.
"""

from __future__ import annotations

import inspect
import json
import random
from functools import partial
from typing import Any

import dspy
from dspy.propose.dataset_summary_generator import (
    DatasetDescriptor,
    DatasetDescriptorWithPriorObservations,
    ObservationSummarizer,
)
from dspy.propose.grounded_proposer import (
    TIPS,
    DescribeModule,
    DescribeProgram,
    generate_instruction_class,
)
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction
from dspy.teleprompt.simba_utils import OfferFeedback, inspect_modules

from examples.tiny_agent import tasks
from examples.tiny_agent.prompts import Conversation, any_adapter, conversation_of, signature_of
from examples.tiny_agent.tasks import CAREFUL, NEUTRAL, Case, Task


def instruction_for(rng: random.Random, task: Task, basic: str, cases: list[Case], tip: str = "") -> str:
    """A new instruction: the basic one, what the cases show, and a sentence on how to work."""
    parts = [basic] if basic else [f"Read the {task.inputs[0].name} and give the {task.outputs[0].name}."]
    target = task.outputs[0]
    seen = [*dict.fromkeys(it.outputs[target.name] for it in cases)]
    if task.kind == "label" and seen and rng.random() < 0.5:
        parts.append(f"The {target.name} is one of {', '.join(seen)}.")
    if "persona" in tip and rng.random() < 0.7:
        parts.insert(
            0, rng.choice(("You are an expert.", "You are a careful reader.", "You are a helpful assistant."))
        )
    if "stakes" in tip and rng.random() < 0.7:
        parts.append("A wrong answer costs a lot of money.")
    for pool, chance in ((CAREFUL, 0.65), (NEUTRAL, 0.3)):
        if rng.random() < chance:
            parts.append(rng.choice(pool))
    return " ".join(parts)


def _observations(rng: random.Random, task: Task, cases: list[Case]) -> str:
    source, target = task.inputs[0].name, task.outputs[0].name
    seen = [*dict.fromkeys(it.outputs[target] for it in cases)][:4]
    return rng.choice(
        (
            f"Each {source} is short. The {target} is one of {', '.join(seen)} or the like.",
            f"The data has a {source} and a {target}. Examples of the {target} are {', '.join(seen)}.",
            f"The task is to find the {target} of a {source}. The texts are in English and short.",
        )
    )


def _shown(case: Case) -> str:
    inputs = [*case.inputs]
    return repr(dspy.Example(**case.inputs, **case.outputs).with_inputs(*inputs))


def _module(task: Task) -> str:
    fields = ", ".join(it.name for it in task.inputs), ", ".join(it.name for it in task.outputs)
    return f"Predict({fields[0]}) -> {fields[1]}"


def _description(task: Task) -> str:
    return f"The program reads the {task.inputs[0].name} and answers with the {task.outputs[0].name}."


def mipro_conversation(rng: random.Random) -> Conversation:
    """One of the calls of MIPROv2's proposer."""
    call = partial(conversation_of, "mipro", any_adapter(rng))
    task = tasks.any_task(rng)
    cases = [task.draw(rng) for _ in range(rng.randint(3, 10))]
    basic = signature_of(task, False).instructions
    describing = _description(task)
    module = f"{_module(task)}"
    kind = rng.choices(
        ("examples", "more", "summary", "program", "module", "instruction"), (2, 1, 1, 1, 1, 4)
    )[0]
    shown = f"[{', '.join(map(_shown, cases))}]"
    seen = _observations(rng, task, cases)
    demos = rng.choice(("No task demos provided.", *[_told_demos(cases)] * 2))
    if kind == "examples":
        return call(DatasetDescriptor, {"examples": shown}, {"observations": seen})
    if kind == "more":
        more = "COMPLETE" if rng.random() < 0.6 else _observations(rng, task, cases)
        inputs = {"examples": shown, "prior_observations": seen}
        return call(DatasetDescriptorWithPriorObservations, inputs, {"observations": more})
    if kind == "summary":
        return call(ObservationSummarizer, {"observations": seen * rng.randint(1, 2)}, {"summary": seen})
    program = {
        "program_code": rng.choice(("", "\n\n", f"\n\nprogram = dspy.Predict('{module}')")),
        "program_example": demos,
    }
    if kind == "program":
        return call(DescribeProgram, program, {"program_description": describing})
    if kind == "module":
        inputs = {**program, "program_description": describing, "module": module}
        return call(DescribeModule, inputs, {"module_description": describing})
    tip = rng.choice([*TIPS.values()])
    aware, history = rng.random() < 0.85, rng.random() < 0.3
    asked = generate_instruction_class(program_aware=aware, use_instruct_history=history)
    inputs = {
        "dataset_description": seen,
        "program_code": program["program_code"],
        "program_description": describing,
        "module": module,
        "module_description": describing,
        "task_demos": demos,
        "previous_instructions": f"{basic} | Score: {rng.randint(10, 90)}.0\n\n",
        "basic_instruction": basic,
        "tip": tip,
    }
    signature: Any = asked.signature
    inputs = {name: it for name, it in inputs.items() if name in signature.input_fields}
    proposed = instruction_for(rng, task, basic, cases, tip)
    return call(signature, inputs, {"proposed_instruction": proposed})


def _told_demos(cases: list[Case]) -> str:
    def told(values: dict[str, str]) -> str:
        return "\n".join(f"{name.replace('_', ' ').title()}: {value}" for name, value in values.items())

    return "".join(f"{told(it.inputs | it.outputs)}\n\n" for it in cases[:3])


def gepa_conversation(rng: random.Random) -> Conversation:
    """GEPA's reflection on answers and what was wrong with them."""
    task = tasks.any_task(rng)
    basic = signature_of(task, False).instructions
    cases = [task.draw(rng) for _ in range(3)]
    told = []
    for case in cases:
        guessed = {name: rng.choice(case.guesses[name]) for name in case.outputs}
        given = case.outputs if rng.random() < 0.6 else guessed
        right = given == case.outputs
        answer = next(iter(case.outputs.values()))
        feedback = rng.choice(
            (
                f"The right answer is {answer}.",
                "Right." if right else f"Wrong. The right answer is {answer}.",
                "Correct." if right else f"The answer should be {answer}.",
                f"This trajectory got a score of {float(right)}.",
            )
        )
        told.append({"Inputs": case.inputs, "Generated Outputs": given, "Feedback": feedback})
    inputs = {"current_instruction": basic, "examples_with_feedback": told}
    new = {"new_instruction": instruction_for(rng, task, basic, cases)}
    return conversation_of("gepa", "json", ProposeInstruction, inputs, new)


def simba_conversation(rng: random.Random) -> Conversation:
    """SIMBA's advice from a worse and a better trajectory."""
    task = tasks.any_task(rng)
    program = dspy.Predict(signature_of(task, reasoned=False))
    case = task.draw(rng)
    target = task.outputs[0].name
    wrong = {name: rng.choice(case.guesses[name]) for name in case.outputs}

    def trajectory(outputs: dict[str, str]) -> list[dict[str, Any]]:
        return [{"module_name": "self", "inputs": case.inputs, "outputs": outputs}]

    inputs: dict[str, Any] = {
        "program_code": inspect.getsource(dspy.Predict) if rng.random() < 0.4 else _source(task),
        "modules_defn": inspect_modules(program),
        "program_inputs": case.inputs,
        "oracle_metadata": case.outputs,
        "better_program_trajectory": trajectory(case.outputs),
        "better_program_outputs": case.outputs,
        "worse_program_trajectory": trajectory(wrong),
        "worse_program_outputs": wrong,
        "worse_reward_value": 0.0,
        "better_reward_value": 1.0,
        "worse_reward_info": {},
        "better_reward_info": {},
        "module_names": ["self"],
    }
    inputs = {k: v if isinstance(v, str) else json.dumps(v, indent=2) for k, v in inputs.items()}
    right, bad = case.outputs[target], wrong[target]
    discussion = f"The better answer is {right}, the worse one is {bad}."
    advice = " ".join(
        (
            rng.choice(
                (
                    f"Give the {target} that the {task.inputs[0].name} shows.",
                    f"Prefer the {target} that is in the {task.inputs[0].name}.",
                    "Do not take the first idea.",
                )
            ),
            rng.choice(CAREFUL),
        )
    )
    outputs = {"discussion": discussion, "module_advice": {"self": advice}}
    return conversation_of("simba", any_adapter(rng), OfferFeedback, inputs, outputs)


def _source(task: Task) -> str:
    """A user's module of one predictor."""
    fields = _module(task).removeprefix("Predict(").replace(") ->", " ->")
    source = task.inputs[0].name
    return (
        "class Program(dspy.Module):\n    def __init__(self):\n"
        f"        self.predict = dspy.Predict('{fields}')\n\n"
        f"    def forward(self, {source}):\n        return self.predict({source}={source})\n"
    )
