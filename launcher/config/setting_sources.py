"""Every setting of a run, each with its source.

Flags > `LAUNCH_*` > `.env` > `launch.toml` > the user's `config.toml` > under `--arbor` the script's LoRA >
defaults. An unknown key is an error.
Neighbours: `main.py` hands in the flags, `settings.py` has our keys, `runtime_config.py` the runtime's own.
Knows nothing of printing or of a run's life.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import credentials, embedded_models
from launcher.base.errors import ConfigError, LaunchError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.base.suggestions import closest_match
from launcher.config import script_lora
from launcher.types.settings import SETTINGS, Setting, Settings, Value, variable_of

if TYPE_CHECKING:
    from launcher.types.adapter import Adapter

# LAUNCH_* names that are not settings: ours to read, or values that a run passes to its program.
_NOT_SETTINGS = frozenset(
    {
        "LAUNCH_HOME",
        "LAUNCH_FAILPOINT",
        "LAUNCH_BASE_URL",
        "LAUNCH_API_KEY",
        "LAUNCH_RUN_DIR",
        "LAUNCH_RUN_ID",
        "LAUNCH_PROGRAM",
        "LAUNCH_LINE",
        "LAUNCH_PATIENCE_SECONDS",
    }
)
_ENVIRONMENT = "the environment"
# A foreign LAUNCH_X in the environment is no mistake; one whose name is this close to a setting's is.
_MIN_TYPO_SIMILARITY = 0.8
# Of two keys' last words: `lerning_rate` is `learning_rate`, `init_adapter` is nothing.
_MIN_SIMILARITY = 0.7
# Settings under the names of other trainers, besides those of `train.` (runtime/shared/train_config.py).
_ALIASES = {
    "max_seq_len": "max_model_len",
    "max_length": "max_model_len",
    "gpu_memory_utilization": "memory_fraction",
    "torch_dtype": "dtype",
}


@dataclass(frozen=True)
class _Layer:
    """One source: raw values by key, the name of a key's place, and the type of its errors."""

    values: dict[str, Any]
    place: Callable[[str], str]
    error: type[LaunchError]


def load(
    flags: Mapping[str, Any] | None = None,
    sets: tuple[str, ...] = (),
    env_file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    home: Home | None = None,
    command: Sequence[str] = (),
) -> Settings:
    """All sources merged. `flags` by key, None if not given; `sets` as `key=value` texts; `command`: the
    program, if its LoRA is to be followed.

    Raises UsageError for a flag, ConfigError for a file or the environment.
    """
    environ = os.environ if environ is None else environ
    folder = _this_folder() if folder is None else folder
    home = Home.find() if home is None else home
    from launcher.config import runtime_config  # pydantic: 0.25 s that help and status do without

    runtime_defaults = runtime_config.defaults()
    known = [*SETTINGS, *runtime_defaults]
    read = credentials.read_dotenv(env_file, folder)
    dotenv = read.variables
    layers = [
        _flag_layer(flags or {}),
        _set_layer(sets, list(runtime_defaults)),
        _environment_layer(environ, known, _inside_a_run(environ)),
        _dotenv_layer(dotenv, known, env_file),
        _toml_layer(folder / "launch.toml", "launch.toml", known),
        _toml_layer(home.user_config, str(home.user_config), known),
    ]
    values = {key: _resolve(setting, layers) for key, setting in SETTINGS.items()}
    from launcher.config import from_option
    from launcher.models import adapter_folder

    if (flags or {}).get("from") is not None:
        values["model"] = from_option.adapter_of_run(flags or {}, home)
    model = values["model"].value
    adapter = adapter_folder.find_adapter(model)
    if adapter is not None:
        layers.append(_adapter_layer(model, adapter))
    base = adapter.base if adapter else model
    if embedded_models.is_embedded(base):
        layers.append(_toml_layer(embedded_models.settings_file(base), "the built-in model", known))
    script = script_lora.script_of(command) if values["arbor"].value else None
    if script is not None:
        layers.append(_Layer(script_lora.settings_of(folder / script), lambda _key: script, ConfigError))
    overrides = _overrides(layers, runtime_defaults, values)
    return Settings(
        model=adapter.base if adapter else model,
        adapter=adapter,
        name=values["name"].value,
        gpus=values["gpus"].value,
        infra=values["infra"].value,
        train_gpus=values["train_gpus"].value,
        infer_gpus=values["infer_gpus"].value,
        disk_gb=values["disk"].value,
        max_seconds=values["max"].value,
        lease_seconds=values["lease"].value,
        idle_seconds=values["idle"].value,
        grace_seconds=values["grace"].value,
        copy_rate=values["copy_rate"].value,
        budget=values["budget"].value,
        max_price=values["max_price"].value,
        port=values["port"].value,
        openai_env=values["openai_env"].value,
        arbor=values["arbor"].value,
        art=values["art"].value,
        keep_output=values["keep_output"].value,
        wandb=values["wandb"].value,
        trackio=values["trackio"].value,
        yes=values["yes"].value,
        runtime=overrides,
        values=values,
        secrets=_secrets(environ, dotenv, env_file),
        warnings=(*read.warnings, *_taken_from_script(values, script)),
    )


def _taken_from_script(values: Mapping[str, Value], script: str | None) -> list[str]:
    """A line about the settings that a script's own text decides, if any."""
    taken = [f"{key}={it.value}" for key, it in values.items() if script is not None and it.source == script]
    return [f"{', '.join(taken)}: as {script} has it"] if taken else []


# ------------------------------------------------------------------ the sources


def _this_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise PreflightError(
            "this folder is gone", "it was removed or moved since you entered it", "cd ~"
        ) from None


def _flag_layer(flags: Mapping[str, Any]) -> _Layer:
    given = {key: value for key, value in flags.items() if value is not None}
    return _Layer(given, lambda key: "--" + key.replace("_", "-"), UsageError)


def _set_layer(sets: tuple[str, ...], known: list[str]) -> _Layer:
    values: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                f"--set {text}: no value",
                "a setting is given as KEY=VALUE",
                f"launch --set {key}=VALUE  # `launch config` lists the keys",
            )
        if key in SETTINGS:
            option = "--" + key.replace("_", "-")
            what = f"--set {key}: this setting has its own option"
            raise UsageError(what, f"use {option}", f"launch {option} {value}")
        _require_known(key, f"--set {key}", known, UsageError, "launch --set {}=" + value)
        values[key] = value
    return _Layer(values, lambda key: f"--set {key}", UsageError)


def _environment_layer(environ: Mapping[str, str], known: list[str], inside_a_run: bool) -> _Layer:
    values = _from_variables(environ, known, _ENVIRONMENT)
    if inside_a_run:
        # There LAUNCH_MODEL is the model name that the program sends to the endpoint.
        values.pop("model", None)
    return _Layer(values, variable_of, ConfigError)


def _dotenv_layer(dotenv: Mapping[str, str], known: list[str], env_file: Path | None) -> _Layer:
    name = str(env_file) if env_file else ".env"
    return _Layer(
        _from_variables(dotenv, known, name), lambda key: f"{name}: {variable_of(key)}", ConfigError
    )


def _toml_layer(path: Path, name: str, known: list[str]) -> _Layer:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        table = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read", str(error), f"correct {path}") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read", error.strerror, f"ls -l {path}") from None
    values = _flatten("", table)
    for key in values:
        _require_known(key, f"{name}: {key}", known, ConfigError, f"in {path}: {{}} = …")
    return _Layer(values, lambda _key: name, ConfigError)


def _adapter_layer(model: str, adapter: Adapter) -> _Layer:
    """The adapter's own rank and layers: it can only be trained on with these, so the run takes them."""
    values: dict[str, Any] = {
        "train.lora.rank": adapter.rank,
        "train.lora.alpha": adapter.alpha,
        "train.lora.use_rslora": adapter.use_rslora,
    }
    if adapter.target_modules:
        values["train.lora.target_modules"] = adapter.target_modules
    return _Layer(values, lambda key: f"{key} of the adapter {model}", ConfigError)


def _secrets(
    environ: Mapping[str, str], dotenv: Mapping[str, str], env_file: Path | None
) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name in credentials.SECRETS:
        if environ.get(name):
            found[name] = Value(environ[name], _ENVIRONMENT)
        elif dotenv.get(name):
            found[name] = Value(dotenv[name], str(env_file) if env_file else ".env")
    return found


# ------------------------------------------------------------------ keys and values


def _from_variables(variables: Mapping[str, str], known: list[str], place: str) -> dict[str, Any]:
    """The LAUNCH_* settings among `variables`; an empty one counts as not set."""
    by_variable = {variable_of(key): key for key in known}
    values: dict[str, Any] = {}
    for name, value in variables.items():
        if not name.startswith("LAUNCH_") or name in _NOT_SETTINGS or not value:
            continue
        if name in by_variable:
            values[by_variable[name]] = value
        elif meant := closest_match(name, by_variable, _MIN_TYPO_SIMILARITY):
            why = f"did you mean {meant}?"
            here = f"unset {name}; export {meant}={shlex.quote(value)}"
            hint = here if place == _ENVIRONMENT else f"in {place}: {meant} in the place of {name}"
            raise ConfigError(f"{name} in {place}: no such setting", why, hint)
    return values


def _require_known(key: str, place: str, known: list[str], error: type[LaunchError], hint: str) -> None:
    if key in known:
        return
    from launcher.config.runtime_config import LAUNCHER_KEYS

    if key in LAUNCHER_KEYS:
        raise error(f"{place}: launch sets this itself", "it depends on the options", "launch config")
    full = _closest_key(key, known)
    raise error(
        f"{place}: no such setting",
        f"did you mean {full}?" if full else "`launch config` lists every key",
        hint.format(full) if full else "launch config",
        without=(key,),
    )


def _closest_key(key: str, known: list[str]) -> str | None:
    """The known key closest to an unknown one. The last word decides, because people leave the prefix out
    or use another, and a long prefix makes two unrelated keys alike."""
    from runtime.shared import train_config

    last = key.rpartition(".")[2]
    last = (_ALIASES | train_config.aliases()).get(last, last)
    by_word = {name.rpartition(".")[2]: name for name in known}
    word = last if last in by_word else closest_match(last, by_word, _MIN_SIMILARITY)
    return by_word[word] if word else None


def _resolve(setting: Setting, layers: list[_Layer]) -> Value:
    for layer in layers:
        if setting.key in layer.values:
            raw, place = layer.values[setting.key], layer.place(setting.key)
            try:
                return Value(setting.parse(raw), place)
            except ValueError as reason:
                raise layer.error(f"{place}: {raw!r} is not valid", str(reason), "launch --help") from None
    return Value(setting.default, "default")


def _check_runtime(overrides: Mapping[str, Any], layers: list[_Layer]) -> None:
    """Refuse values that the runtime would refuse, alone or beside one another, and name their source."""
    from launcher.config import runtime_config

    try:
        runtime_config.user_values(dict(overrides))
    except runtime_config.InvalidSettingError as invalid:
        key = invalid.key
        layer = next(layer for layer in layers if key in layer.values)
        place = layer.place(key)
        name = place if key in place else f"{place}: {key}"
        problem = f"{name}: {overrides[key]!r} is not valid"
        raise layer.error(problem, invalid.reason, "launch config") from None


def _overrides(layers: list[_Layer], defaults: Mapping[str, Any], values: dict[str, Value]) -> dict[str, Any]:
    """The runtime's keys that someone set; every one of its keys is added to `values` with its source."""
    overrides: dict[str, Any] = {}
    for key, default in defaults.items():
        layer = next((layer for layer in layers if key in layer.values), None)
        if layer is None:
            values[key] = Value(default, "default")
            continue
        overrides[key] = _none_or(layer.values[key])
        values[key] = Value(overrides[key], layer.place(key))
    _check_runtime(overrides, layers)
    return overrides


def _inside_a_run(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("LAUNCH_RUN_ID"))


def _none_or(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _flatten(prefix: str, table: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        keys.update(_flatten(f"{key}.", value) if isinstance(value, dict) else {key: value})
    return keys
