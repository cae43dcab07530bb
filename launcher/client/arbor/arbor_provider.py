"""Arbor's DSPy provider: it marks a `dspy.LM` as this run's, and makes such an LM work unchanged.

    lm = dspy.LM("openai/arbor:MODEL", provider=ArborProvider(), api_base=info["base_url"], api_key="arbor")

In a training the loop puts the run's own LM in its place (`client/dspy/programs.py`). When dspy.Evaluate, for
one, calls it directly, it is DSPy's own LM, and its `api_key` ("arbor", or none) is not the run's. So a DSPy
callback gives it the run's key before its first request. The callback is among DSPy's (`settings.callbacks`;
a program that sets those itself does it before `ArborProvider()`) and touches only LMs that have this
provider and this run's address: no other host ever gets the run's key, and a key of the user's own does not
leave the program. Knows nothing of jobs or rewards.
"""

from __future__ import annotations

from typing import Any

import dspy

# DSPy's own `configure` would make this thread the only one that may configure it from then on.
from dspy.dsp.utils.settings import main_thread_config
from dspy.utils.callback import BaseCallback

from launcher.client.arbor import server
from launcher.client.arbor.stderr_log import log_once
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.lm_endpoint import targets_run
from launcher.client.dspy.provider import SlipwayProvider
from launcher.client.failures import EndpointLost, NotConnected, Refused
from launcher.client.request_bodies import PURPOSE_HEADER
from launcher.client.session import Session

# Names of models that were looked up, one request each.
_CHECKED: set[str] = set()


def arbor_lm_text(model: str | None = None) -> str:
    """How a program of Arbor's writes an LM of the run: the policy, or this model."""
    name = f"openai/arbor:{model or 'policy'}"
    return f'dspy.LM("{name}", provider=ArborProvider(), api_base=…, api_key="arbor")'


class ArborProvider(SlipwayProvider):
    """Takes the place of Arbor's: with it DSPy's own weight optimizers train the run's policy.

    `launch` and `kill` do nothing: the run is up, and `launch` ends it.
    """

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        _install_callback()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArborProvider, ()  # as its base: the run that it is unpickled in

    @staticmethod
    def is_provider_model(model: str) -> bool:
        """Whether a name has Arbor's prefix."""
        return model.removeprefix("openai/").startswith("arbor:")

    @staticmethod
    def launch(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """The run's model is served already."""

    @staticmethod
    def kill(lm: dspy.LM, launch_kwargs: dict[str, Any] | None = None) -> None:
        """The run goes on: other programs, and this one's next lines, may ask it."""
        log_once("kill() ends nothing: the run ends with this program, or by `launch down`")


class _DirectCalls(BaseCallback):
    """Before a request of an LM with Arbor's provider: sets the run's key, no cache, and the mark of an
    evaluation.

    No cache, because the weights behind the name change. The mark (`x-slipway-purpose: eval`), because
    requests outside a training must never be trained on.
    """

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if not _has_arbor_provider(instance):
            return
        try:
            session = server.session()
        except NotConnected:
            return  # the request itself reports the error
        if targets_run(instance, session.connection):
            _configure_lm(instance, session.api_key)
            _check_name_once(session, instance.model)


def _check_name_once(session: Session, model: str) -> None:
    """Name the right model once, instead of a 404 for each example of an evaluation."""
    if "@" in model or model in _CHECKED:  # the run's own name of a version
        return
    _CHECKED.add(model)
    try:
        server.check_model(session, model)
    except Refused as error:
        if error.status == 404:
            log_once(f'{error.message}: {error.why}. In dspy.LM, use "openai/arbor:{session.model}"')
    except EndpointLost:
        _CHECKED.discard(model)  # the request itself reports the error


def _configure_lm(lm: dspy.LM, api_key: str) -> None:
    headers = {**(lm.kwargs.get("extra_headers") or {}), PURPOSE_HEADER: "eval"}
    if _is_sampled_for_training(lm):
        del headers[PURPOSE_HEADER]
    wanted = {"api_key": api_key, "extra_headers": headers}
    if lm.cache or any(lm.kwargs.get(name) != value for name, value in wanted.items()):
        lm.cache = False
        lm.kwargs |= wanted


def _is_sampled_for_training(lm: Any) -> bool:
    """Whether a job of DSPy's own GRPO samples with it: only then its untagged answers are trained."""
    job = getattr(lm, "grpo_job", None)
    return job is not None and not job.is_over


def _has_arbor_provider(lm: Any) -> bool:
    is_plain = isinstance(lm, dspy.LM) and not isinstance(lm, PolicyLM)
    return is_plain and isinstance(lm.provider, ArborProvider)


_DIRECT_CALLS = _DirectCalls()


def _install_callback() -> None:
    present = main_thread_config["callbacks"] or []
    if _DIRECT_CALLS not in present:
        main_thread_config["callbacks"] = [*present, _DIRECT_CALLS]
