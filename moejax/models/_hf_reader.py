"""Reading a Hugging Face `config.json` with errors that name the key."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def load_config(config: Any) -> tuple[Mapping[str, Any], str]:
    """The parsed config and a name for the model, from a dict, a file or the folder that holds it.

    **Raises:** `ValueError` where there is no such file or no JSON object in it.
    """
    if isinstance(config, Mapping):
        return config, Path(str(config.get("_name_or_path") or "")).name
    if not isinstance(config, str | os.PathLike):
        raise ValueError(f"config = {config!r}: allowed is a dict or the path of a config.json")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: no config.json to read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{path}: holds no JSON object")
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return parsed, name


def find_family(config: Mapping[str, Any], families: Mapping[str, Iterable[str]]) -> str:
    """The `model_type` to read the config as, or the one whose class stands in `architectures`.

    **Arguments:** `families`: names of model classes by `model_type`.

    **Raises:** `ValueError` naming what is supported, and the key that is missing.
    """
    nested = config.get("text_config")
    levels = [nested, config] if isinstance(nested, Mapping) else [config]
    types = [str(level["model_type"]) for level in levels if level.get("model_type")]
    for model_type in types:
        if model_type.removesuffix("_text") in families:
            return model_type.removesuffix("_text")
    classes = [name for level in levels for name in level.get("architectures") or ()]
    for model_type, known in families.items():
        if set(known) & set(classes):
            return model_type
    supported = f"(supported: {', '.join(families)})"
    if not types:
        raise ValueError(f"config: missing key 'model_type' {supported}")
    message = f"config: unknown model_type {types[0]!r} {supported}"
    if not any(key in level for level in levels for key in _EXPERT_COUNTS):
        message += f"; missing key for the number of experts ({', '.join(_EXPERT_COUNTS)})"
    raise ValueError(message)


class ConfigReader:
    """Keys of a config, those of a nested `text_config` first.

    JSON's null counts as absent, except where a caller says what it means.
    """

    def __init__(self, config: Mapping[str, Any], family: str):
        nested = config.get("text_config")
        levels = [config, nested] if isinstance(nested, Mapping) else [config]
        self._values = {
            key: value for level in levels for key, value in level.items() if value is not None
        }
        self._nulls = {key for level in levels for key in level} - set(self._values)
        self.family = family

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def refuse(self, why: str, *keys: str) -> NoReturn:
        """Raises `ValueError` showing the values of `keys`."""
        shown = ", ".join(f"{key} = {self._values[key]!r}" for key in keys if key in self)
        raise ValueError(f"{self.family} config: {shown}: {why}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default`."""
        return self._values.get(key, default)

    def size(
        self, *keys: str, least: int = 1, default: int | None = None, null: int | None = None
    ) -> int:
        """A whole number under the first key that is there; `null` is what null stands for."""
        key = next((key for key in keys if key in self), keys[0])
        value = self.get(key, null if key in self._nulls and null is not None else default)
        if value is None:
            others = f" (or {', '.join(map(repr, keys[1:]))})" if keys[1:] else ""
            raise ValueError(f"{self.family} config: missing key {key!r}{others}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(f"allowed is a whole number >= {least}", key)
        return value

    def number(self, key: str, default: float) -> float:
        """A JSON number."""
        value = self.get(key, default)
        if not isinstance(value, int | float):
            self.refuse("allowed is a number", key)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A JSON boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse("allowed is true or false", key)
        return value

    def choice(self, key: str, default: str, allowed: Iterable[str]) -> str:
        """One of a few words."""
        value = self.get(key, default)
        if value not in allowed:
            self.refuse(f"allowed is {', '.join(allowed)}", key)
        return value

    def items(self, key: str, default: Iterable[Any]) -> tuple[Any, ...]:
        """A JSON list."""
        value = self.get(key, tuple(default))
        if not isinstance(value, list | tuple):
            self.refuse("allowed is a list", key)
        return tuple(value)
