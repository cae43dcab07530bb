"""Each loss as its paper writes it, in numpy: one answer after the other, no packs, ranks or tensors.

Shares no code with runtime/training. `new`, `old`, `engine` and `reference` are the logprobs of an answer's
sampled tokens: of the policy, of the one that sampled as the trainer and as the engine compute it, and of the
base (here: every token as likely as any other). Beyond the papers: the bounds of `rule`, common to all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Answer:
    new: np.ndarray
    old: np.ndarray
    engine: np.ndarray
    reference: np.ndarray
    group: int
    reward: float
    truncated: bool


def answers(logits, batch, old=None):
    """Of a policy whose logits at position p are row p, at each sample's own temperature. `old`: [N]."""
    found = []
    for i in range(batch.sequences):
        places = np.flatnonzero(batch.sampled[batch.offsets[i] : batch.offsets[i + 1]])
        rows = logits[places - 1] / batch.temperature[i]
        tokens = batch.tokens[batch.offsets[i] + places]
        new = rows[np.arange(len(rows)), tokens] - np.log(np.exp(rows).sum(1))
        engine = batch.logprobs[batch.offsets[i] + places].astype(float)
        own = engine if old is None else old[batch.offsets[i] + places].astype(float)
        uniform = np.full(len(new), -np.log(logits.shape[1]))
        reward = float(batch.reward[batch.member[i]])
        group, truncated = int(batch.group[batch.member[i]]), bool(batch.truncated[i])
        found.append(Answer(new, own, engine, uniform, group, reward, truncated))
    return found


def advantages(found, rule):
    """[(answer, its advantage)] of what is trained; DAPO's overlong handling and dropped groups."""
    if rule.overlong == "mask":
        found = [one for one in found if not one.truncated]
    trained = []
    for one in found:
        scores = [score(peer, rule) for peer in found if peer.group == one.group]
        if max(scores) == min(scores) and (rule.kl_beta == 0 or rule.loss == "dapo"):
            continue
        advantage = score(one, rule) - np.mean(scores)
        if rule.scale_rewards and max(scores) > min(scores):
            advantage = advantage / (np.std(scores) + 1e-4)
        trained.append((one, advantage))
    return trained


def score(one, rule):
    if rule.overlong != "soft":
        return one.reward
    over = len(one.new) - (rule.overlong_tokens - rule.overlong_buffer)
    return one.reward - min(max(over / rule.overlong_buffer, 0), 1)


def objective(ratio, advantage, rule):
    """min(r A, clip(r) A), and where A is negative no less than dual_clip A (Ye et al., equation 5)."""
    bounded = np.clip(ratio, 1 - rule.clip_low, 1 + rule.clip_high)
    gain = np.minimum(ratio * advantage, bounded * advantage)
    return np.maximum(gain, rule.dual_clip * advantage) if advantage < 0 else gain


def correction(one, rule):
    """What the engine's mismatch weighs, per token; of gspo, for the answer."""
    apart = one.old - one.engine
    if rule.loss == "gspo":
        apart = np.full(len(apart), apart.mean())
    return np.minimum(np.exp(apart), rule.mismatch_cap)


def clipped(trained, _, rule):
    """grpo, dr_grpo, dapo: per token, [the terms of each answer]."""
    for one, advantage in trained:
        yield -objective(np.exp(one.new - one.old), advantage, rule)


def gspo(trained, _, rule):
    """One ratio for the answer, the geometric mean of its tokens'."""
    for one, advantage in trained:
        ratio = np.exp((one.new - one.old).sum() / len(one.new))
        yield np.full(len(one.new), -objective(ratio, advantage, rule))


def cispo(trained, frozen, rule):
    """REINFORCE under a bounded weight, which is a number: that of the `frozen` policy."""
    for (one, advantage), (held, _) in zip(trained, frozen, strict=True):
        weight = np.clip(np.exp(held.new - held.old), 1 - rule.clip_low, 1 + rule.clip_high)
        yield -weight * advantage * one.new


def divergence(one, held, rule):
    """r w k3; past dual_clip the weight is a number, and the slope a KL's: weight x (new - reference)."""
    mismatch = np.minimum(np.exp(one.old - one.engine), rule.mismatch_cap)
    now, then = (np.exp(each.new - each.old) * mismatch for each in (one, held))
    away, held_away = (each.reference - each.new for each in (one, held))
    k3, held_k3 = (np.exp(apart) - apart - 1 for apart in (away, held_away))
    line = held_k3 + (held.new - held.reference) * (one.new - held.new)
    return np.where(then > rule.dual_clip, rule.dual_clip * line, now * k3)


def loss(logits, frozen_logits, batch, rule, old=None):
    """The step's loss; `frozen_logits` stand still where `logits` are moved to find a slope."""
    form = {"gspo": gspo, "cispo": cispo}.get(rule.loss, clipped)
    trained, frozen = (advantages(answers(table, batch, old), rule) for table in (logits, frozen_logits))
    terms = [
        term * correction(one, rule) + rule.kl_beta * divergence(one, held, rule)
        for term, (one, _), (held, _) in zip(form(trained, frozen, rule), trained, frozen, strict=True)
    ]
    if rule.normaliser == "token":
        return np.concatenate(terms).mean()
    if rule.normaliser == "sequence":
        return np.mean([term.mean() for term in terms])
    return sum(term.sum() for term in terms) / (len(terms) * rule.constant_tokens)
