"""The run's policy as a DSPy LM.

Neighbours: `engine.py` sends its requests, `grpo.py` trains the predictors that hold one, `tagging.py` tags,
`default_lm_fallback.py` makes one the default for programs that DSPy's optimizers have left without an LM,
`provider.py` trains it for DSPy's own weight optimizers. Works with every adapter, `n`, `temperature`,
`max_tokens`, `stop` and `tools`, in threads and async. Knows nothing of rewards or steps.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import dspy
from dspy.clients.base_lm import LM_CLASS_STATE_KEY, BaseLM

from launcher.client.dspy import default_lm_fallback, dspy_compat, version_pinning
from launcher.client.dspy.engine import BASE_MODEL, PolicyEngine
from launcher.client.dspy.grpo_job_context import ActiveGrpoJob, requests_of_job
from launcher.client.dspy.tagging import current_rollout
from launcher.client.dspy.version_names import parse_version, served_version_name
from launcher.client.session import Session, connect

# Fields of a saved state that the constructor of a new run's LM decides itself.
_NOT_RESTORED = (LM_CLASS_STATE_KEY, "model", "model_type", "num_retries", "cache", "launch_kwargs")
# A saved policy is a plain LM, which DSPy loads where nothing of ours is installed: of a vLLM's
# (HOSTED_VLLM_API_BASE, or localhost:8000), never of OpenAI's with the user's key.
_PLAIN_CLASS = f"{dspy.LM.__module__}.{dspy.LM.__qualname__}"
_PLAIN_PROVIDER = "hosted_vllm"
_PLAIN_RETRIES = 3
# The name of the version in its `launch_kwargs`, which go into no request.
_SAVED_MODEL = "slipway_model"
# The class in files of earlier versions: by its public place, and by the one before.
_POLICY_LM_CLASSES = ("launcher.client.PolicyLM", "launcher.client.lm.PolicyLM")


class PolicyLM(dspy.LM):
    """The policy being trained, on the run this program was started in.

    `model` is the run's base name, which means the newest version. A compiled program uses the version it was
    compiled to, by name (`policy@v12+3f2a9c1b4d5e`): those weights or an error. A copy that came with a copy
    of its program keeps the version that it uses when a training begins. The model before any training is
    `PolicyLM(run, model="base")`. With `cache=True` the name is that of the present version, as the name is
    the cache's key; a rollout, and a request for the newest version, is never answered from a cache.
    `extra_body` goes into each request unchanged: `chat_template_kwargs`, `min_p`, … Other keyword arguments
    are dspy.LM's. A request outside a rollout is an evaluation, never trained. DSPy's own BootstrapFinetune
    and GRPO train it as well (`provider.py`). Raises NotConnected outside a run.
    """

    # Saved programs name the class by its public place, which stays.
    __module__ = "launcher.client"

    def __init__(
        self,
        session: Session | None = None,
        *,
        model: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        cache: bool = False,
        extra_body: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.session = session or connect()
        self.compiled = self.is_fallback = False
        self.grpo_job: ActiveGrpoJob | None = None  # while DSPy's own GRPO trains this LM
        self.requested_cache = cache  # DSPy's GRPO turns it off, and back on only if nothing goes wrong
        is_newest = model is None
        if model is None:
            model = served_version_name(self.session, self.session.version) if cache else self.session.model
        engine = PolicyEngine(self.session.connection, dict(extra_body or {}))
        if kwargs.get("top_k") in _NO_TOP_K:
            del kwargs["top_k"]
        super().__init__(
            model,
            temperature=temperature,
            max_tokens=max_tokens,
            cache=cache,
            num_retries=0,  # the engine's retries carry one request id, so they make one sample
            engine=engine,
            async_engine=engine.to_async(),
            **kwargs,
        )
        if is_newest:
            default_lm_fallback.install(self)

    @classmethod
    def from_lm(cls, lm: dspy.LM, session: Session) -> PolicyLM:
        """A PolicyLM with the temperature, lengths and other request settings of a plain LM."""
        settings = {key: value for key, value in lm.kwargs.items() if key not in _CONNECTION_KWARGS}
        extra = dict(settings.pop("extra_body", None) or {})
        extra |= {key: settings.pop(key) for key in _VLLM_PARAMETERS if key in settings}
        return cls(session, extra_body=extra, callbacks=lm.callbacks, **settings)

    @property
    def policy(self) -> PolicyEngine:
        """The engine under this LM; copies of the LM share it."""
        engine = self.engine
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"this PolicyLM was given a different engine: {type(engine).__name__}")
        return engine

    def unpinned_copy(self) -> PolicyLM:
        """A copy over the same engine that no compile has named."""
        copied = self.copy()
        copied.compiled = copied.is_fallback = False
        copied.grpo_job = None
        return copied

    def use_version(self, model: str) -> None:
        """Use this version from here on: the one that a program was compiled to."""
        self.model, self.compiled = model, True

    def copy(self, **kwargs: Any) -> Any:
        """See dspy.LM. A copy of an LM that names a version keeps it, whatever is trained."""
        copied = super().copy(**kwargs)
        if "model" in kwargs:
            copied.compiled = parse_version(copied.model) is not None
        if "cache" in kwargs:
            copied.requested_cache = copied.cache
        return copied

    def infer_provider(self) -> Any:
        """The provider for DSPy's own weight optimizers: its run, if this DSPy has their classes."""
        if not dspy_compat.has_training_jobs():
            return super().infer_provider()
        from launcher.client.dspy.provider import SlipwayProvider

        return SlipwayProvider(self.session)

    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        self._log_fallback_use()
        with requests_of_job(self.grpo_job):
            return super().__call__(prompt, messages=messages, **self._with_cache_key(kwargs))

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        self._log_fallback_use()
        with requests_of_job(self.grpo_job):
            return await super().acall(prompt, messages=messages, **self._with_cache_key(kwargs))

    def _with_cache_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The same arguments with the fields that tell answers in DSPy's cache apart, beside the model's
        name.

        The cache outlives the run, and every run has a `policy@v3`. No answer from it inside a rollout: it
        would be another rollout's sample.
        """
        if current_rollout() is not None:
            return {**kwargs, "cache": False}
        if not kwargs.get("cache", self.cache):
            return kwargs
        # Today's answers are not tomorrow's.
        if self.model != BASE_MODEL and parse_version(self.model) is None:
            return {**kwargs, "cache": False}
        rollout_id = kwargs.get("rollout_id", self.kwargs.get("rollout_id"))
        key = json.dumps(
            [self.session.run_id, self.policy.extra_body, rollout_id], sort_keys=True, default=str
        )
        return {**kwargs, "rollout_id": int(hashlib.sha256(key.encode()).hexdigest()[:12], 16)}

    def _warn_zero_temp_rollout(self, temperature: float | None, rollout_id: Any) -> None:
        """Not logged: here the id tells runs apart, at any temperature."""

    def _log_fallback_use(self) -> None:
        if self.is_fallback and current_rollout() is None:
            default_lm_fallback.log_once(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyLM:
        copied = self.copy()  # locks and the session's pool are shared, as in copy()
        version_pinning.register_copy(copied)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has neither address nor token: it is the LM of the run it is unpickled in.

        In the run it was made in it asks the version that it asked here.
        """
        return _unpickled, (self.dump_state(), self.session.run_id, self.model, self.compiled)

    def dump_state(self) -> dict[str, Any]:
        """Settings without address or token: those of a plain LM of the same name on a vLLM.

        `launcher.client.load` makes it an LM of the run that it is loaded in.
        """
        name = BASE_MODEL if self.model == BASE_MODEL else self.session.model
        return BaseLM.dump_state(self) | {
            LM_CLASS_STATE_KEY: _PLAIN_CLASS,
            "model": f"{_PLAIN_PROVIDER}/{name}",
            "num_retries": _PLAIN_RETRIES,
            "cache": False,  # without version and run in its key it would answer for other weights
            "launch_kwargs": {_SAVED_MODEL: self.model},
            "extra_body": self.policy.extra_body,
        }

    @classmethod
    def load_state(cls, state: dict[str, Any], *, allow_custom_lm_class: bool = False) -> PolicyLM:
        """The LM of the run this program is in now: a saved program never calls the run that trained it."""
        return cls.from_state(state)

    @classmethod
    def from_state(cls, state: dict[str, Any], session: Session | None = None) -> PolicyLM:
        """The LM of this run with the settings that `dump_state` wrote: the newest version, or the base."""
        left_out = {*_NOT_RESTORED, *_CONNECTION_KWARGS}
        kept = {key: value for key, value in state.items() if key not in left_out}
        return cls(session, model=BASE_MODEL if _saved_model(state) == BASE_MODEL else None, **kept)


def is_saved_policy(state: dict[str, Any]) -> bool:
    """Whether a saved LM is the policy's; a copy of one that was moved to another model is not."""
    is_plain = _SAVED_MODEL in _launch_kwargs(state)
    is_at_vllm = str(state.get("model")).startswith(f"{_PLAIN_PROVIDER}/")
    return state.get(LM_CLASS_STATE_KEY) in _POLICY_LM_CLASSES or (is_plain and is_at_vllm)


def _saved_model(state: dict[str, Any]) -> Any:
    return _launch_kwargs(state).get(_SAVED_MODEL, state.get("model"))


def _launch_kwargs(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("launch_kwargs") or {}


def _unpickled(state: dict[str, Any], run_id: str = "", model: str = "", compiled: bool = False) -> PolicyLM:
    lm = PolicyLM.from_state(state)
    if parse_version(model) is not None and lm.session.run_id == run_id:
        lm.model, lm.compiled = model, compiled
    return lm


_CONNECTION_KWARGS = frozenset({"api_key", "api_base", "base_url", "headers", "extra_headers", "timeout"})
# vLLM's ways of saying that no token is left out, at which DSPy's requests would fail.
_NO_TOP_K = (-1, 0)
_VLLM_PARAMETERS = ("min_p", "repetition_penalty", "chat_template_kwargs")
